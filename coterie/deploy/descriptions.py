"""What nodes tell about their tables: check each description, and leave out nodes that contradict the others.

A node may be broken or hostile. Nothing that one node says ends the run or changes the reading of everybody's table
unnoticed: it is left out by name, or a warning names it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coterie._core.printable import is_plain
from coterie.data.client_sums import ClientSums
from coterie.data.column_formats import FORMATS
from coterie.data.federated import Roles, target_format
from coterie.data.statistics import Moments, Statistics
from coterie.data.target_task import MOST_LEVELS
from coterie.deploy.wire import WireError

KINDS = {"numeric", "category", "empty", "unsupported"}
MOST_CLIENTS, MOST_COLUMNS, MOST_ROWS = 100_000, 10_000, 10**9
MANY_ROWS, MANY_CLIENTS = 10**6, 10**4  # below these a node may have any multiple of what others have
FAR_MORE = 1000  # times the median of the other nodes
FAR_LARGER = 1e4  # times the size of numbers at the other nodes
LARGEST = 1e100

Note = Callable[[str], None]


def require(told: Any) -> None:
    """Raise `WireError` unless this is a description that `federated.describe` can have made."""
    if not isinstance(told, dict):
        raise WireError("malformed description of its table")
    require_clients(told)
    clients, rows, clusters = told["clients"], told["rows"], told.get("clusters")
    if clusters is not None and (not _texts(clusters) or len(clusters) != len(clients)):
        raise WireError("malformed clusters")
    columns = told.get("columns")
    if not isinstance(columns, list) or len(columns) > MOST_COLUMNS:
        raise WireError("malformed columns")
    if not all(_texts(column) and len(column) == 2 and column[1] in KINDS for column in columns):
        raise WireError("malformed columns")
    if not plain([name for name, _ in columns], MOST_COLUMNS):
        raise WireError("malformed names of columns")
    target = told.get("target")
    if not isinstance(target, dict) or target.get("kind") not in ("quantity", "words", "whole"):
        raise WireError("malformed target")
    formats = target.get("formats", [])
    if not isinstance(formats, list) or not all(
        isinstance(name, str) and name in FORMATS for name in formats
    ):
        raise WireError("malformed formats of the target")
    if target["kind"] != "quantity":
        levels = target.get("levels")
        if not isinstance(levels, list) or not levels or not plain(levels, min(MOST_LEVELS, sum(rows))):
            raise WireError("malformed classes of the target")
    _require_words(told)


def require_clients(told: Mapping[str, Any]) -> None:
    """Raise `WireError` unless a node names clients and says how many rows each has."""
    clients, rows = told.get("clients"), told.get("rows")
    if not isinstance(clients, list) or not plain(clients, MOST_CLIENTS) or not clients:
        raise WireError("malformed names of clients")
    if not isinstance(rows, list) or len(rows) != len(clients) or not all(_is_size(size) for size in rows):
        raise WireError("malformed numbers of rows")


def _require_words(told: Mapping[str, Any]) -> None:
    """Raise `WireError` for levels, missing columns or fixed encodings that no node has."""
    levels, missing, fixed = told.get("levels", {}), told.get("missing", []), told.get("fixed", {})
    if not isinstance(levels, dict) or not all(
        isinstance(some, list) and plain(some, MOST_LEVELS) for some in levels.values()
    ):
        raise WireError("malformed levels of columns")
    if not _texts(missing) or not isinstance(fixed, dict):
        raise WireError("malformed description of its columns")
    for pair in fixed.values():
        if not isinstance(pair, list) or len(pair) != 2 or not all(_is_number(part) for part in pair):
            raise WireError("malformed encoding of a column")


def agreed(
    told: Mapping[str, Any], nodes: Mapping[str, Sequence[str]], roles: Roles, note: Note
) -> dict[str, Any]:
    """Return the descriptions of nodes that do not contradict the majority; the others are named in notes.

    Parameters
    ----------
    told
        Descriptions by node, each of which `require` accepts.
    nodes
        Clients that each node is expected to have, where they are known.
    roles
        Which columns are used.
    note
        Receives remarks about nodes.
    """
    left = dict(told)
    for reasons in (twice, too_many, _other_target, _other_columns):
        for name, why in reasons(left, nodes, roles).items():
            note(f"{name} is left out: {why}")
            del left[name]
    for remark in _remarks(left):
        note(remark)
    return left


def twice(told: Mapping[str, Any], nodes: Mapping[str, Sequence[str]], roles: Roles) -> dict[str, str]:
    """Return nodes with a client of another node, unless the federation lists the client for them."""
    counts = Counter(client for description in told.values() for client in description["clients"])
    twice = {client for client, count in counts.items() if count > 1}
    listed = {client: name for name, clients in nodes.items() for client in clients}
    return {
        name: f"its client {client!r} is at another node too"
        for name, description in told.items()
        for client in reversed(description["clients"])
        if client in twice and listed.get(client) != name
    }


def too_many(told: Mapping[str, Any], nodes: Mapping[str, Sequence[str]], roles: Roles) -> dict[str, str]:
    """Return nodes that claim far more rows or clients than the others."""
    found = {}
    for what, many, count in (
        ("rows", MANY_ROWS, lambda description: sum(description["rows"])),
        ("clients", MANY_CLIENTS, lambda description: len(description["clients"])),
    ):
        for name in told:
            others = [count(description) for other, description in told.items() if other != name]
            own = count(told[name])
            if len(others) > 1 and own > many and own > FAR_MORE * statistics.median(others):
                found[name] = f"it claims {own} {what}, more than {FAR_MORE} times what others have"
    return found


def _other_target(
    told: Mapping[str, Any], nodes: Mapping[str, Sequence[str]], roles: Roles
) -> dict[str, str]:
    """Return nodes whose target is of another kind than at most nodes; rows decide a tie."""

    def is_quantity(description: Mapping[str, Any]) -> bool:
        return bool(description["target"]["kind"] == "quantity")

    def votes(quantity: bool) -> tuple[int, int]:
        same = [one for one in told.values() if is_quantity(one) == quantity]
        return len(same), sum(sum(one["rows"]) for one in same)

    wanted = votes(True) > votes(False) if roles.task is None else roles.task == "regression"
    if roles.task == "regression":
        return _otherwise_written(told, roles)
    found = {
        name: f"its target {roles.target!r} is {'a quantity' if is_quantity(one) else 'classes'}, unlike at most "
        "nodes. If it is a quantity, say so: --task regression"
        for name, one in told.items()
        if is_quantity(one) != wanted and not (wanted and one["target"]["kind"] == "whole")
    }
    if wanted:
        return found | _otherwise_written({name: told[name] for name in told.keys() - found.keys()}, roles)
    rest = {name: set(one["target"]["levels"]) for name, one in told.items() if name not in found}
    for name, mine in rest.items():
        others = [levels for other, levels in rest.items() if other != name]
        known: set[str] = set().union(*others)
        if len(others) > 1 and len(mine - known) > max(2, len(known)):
            found[name] = f"{len(mine - known)} of its classes are at no other node"
    return found


def _otherwise_written(told: Mapping[str, Any], roles: Roles) -> dict[str, str]:
    """Return nodes whose target is text that the format of most nodes does not read."""
    usual = target_format(told.values())
    return {
        name: f"its target {roles.target!r} is written as {formats[0]}, and as {usual} at most nodes"
        for name, formats in ((name, one["target"].get("formats")) for name, one in told.items())
        if formats and usual not in formats
    }


def _other_columns(
    told: Mapping[str, Any], nodes: Mapping[str, Sequence[str]], roles: Roles
) -> dict[str, str]:
    """Return nodes that lack, or see as another kind, more than half of the columns that most nodes have."""
    half = len(told) / 2
    kinds = {name: dict(description["columns"]) for name, description in told.items()}
    usual: dict[str, str] = {}
    for column in dict.fromkeys(column for mine in kinds.values() for column in mine):
        votes = Counter(mine[column] for mine in kinds.values() if mine.get(column, "empty") != "empty")
        if votes and votes.most_common(1)[0][1] > half:
            usual[column] = votes.most_common(1)[0][0]
    found = {}
    for name, mine in kinds.items():
        differs = [column for column, kind in usual.items() if mine.get(column) not in (kind, "empty")]
        text = [column for column in differs if mine.get(column) == "category"]
        if text:
            found[name] = (
                f"its column {text[0]!r} holds text, which is numbers elsewhere. Clean it, or --drop it"
            )
        elif 2 * len(differs) > len(usual):
            found[name] = f"{len(differs)} of {len(usual)} columns are missing there, or of another kind"
    return found


def _remarks(told: Mapping[str, Any]) -> list[str]:
    remarks = []
    whole = sum(sum(description["rows"]) for description in told.values())
    for name, description in told.items():
        rows = sum(description["rows"])
        if len(told) > 2 and 10 * rows > 9 * whole:
            remarks.append(f"{name} claims {rows} of {whole} rows, so it decides most of what is learned")
        others = [one["target"].get("levels", ()) for other, one in told.items() if other != name]
        only = sorted(set(description["target"].get("levels", ())).difference(*others)) if others else []
        if only and len(told) > 2:
            remarks.append(f"{name} alone has the class {only[0]!r} of the target")
    return remarks


def require_statistics(found: Statistics, sizes: Mapping[str, int]) -> None:
    """Raise `WireError` unless these can be the statistics of clients with so many training rows."""
    rows = sum(sizes.values())
    for name, moments in found.numeric.items():
        _require_moments(name, moments, rows)
    if found.target != Moments():
        _require_moments("the target", found.target, rows)
    for name, seen in found.categories.items():
        if not all(is_plain(level, 1000) for level in seen.counts):
            raise WireError(f"malformed levels of {name!r}")
        counts = list(seen.counts.values())
        if not all(1 <= own <= rows and 1 <= clients <= len(sizes) for own, clients in counts):
            raise WireError(f"impossible counts of the levels of {name!r}")
    _require_by_client(found.by_client, sizes)


def _require_by_client(sums: ClientSums, sizes: Mapping[str, int]) -> None:
    """Raise `WireError` for sums of other clients than the node's own, or of other numbers of rows."""
    if len(set(sums.names)) != len(sums.names) or not set(sums.names) <= set(sizes):
        raise WireError("sums of clients that it does not have")
    most = np.array([sizes[name] for name in sums.names]).reshape(-1, 1)
    if (sums.sums[..., 0] > most).any() or (sums.sums[..., 3] > sums.sums[..., 0]).any():
        raise WireError("sums of clients over more rows than they have")
    if (np.abs(sums.sums) > LARGEST).any():
        raise WireError("impossible sums of clients")


def _require_moments(name: str, moments: Moments, rows: int) -> None:
    if moments.count < 0 or moments.missing < 0 or moments.count + moments.missing != rows:
        raise WireError(f"the counts of {name!r} do not add up to its {rows} training rows")
    if not 0 <= moments.squares <= LARGEST or not abs(moments.mean) <= LARGEST:
        raise WireError(f"impossible moments of {name!r}")


def implausible(parts: Mapping[str, Statistics]) -> dict[str, str]:
    """Return the nodes whose numbers are far larger than those of the others, and why."""
    found = {}
    for name, mine in parts.items():
        for column, moments in mine.numeric.items():
            others = [
                _size(part.numeric[column])
                for other, part in parts.items()
                if other != name and part.numeric[column].count
            ]
            usual = statistics.median(others) if len(others) > 1 else 0.0
            if usual and _size(moments) > FAR_LARGER * usual:
                found[name] = (
                    f"the numbers of {column!r} are {_size(moments) / usual:.0e} times those of the others"
                )
    return found


def _size(moments: Moments) -> float:
    return abs(moments.mean) + moments.sd


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and is_plain(item) for item in value)


def plain(names: list[Any], most: int) -> bool:
    """Return True if these are at most so many different, printable names."""
    return len(names) <= most and _texts(names) and len(set(names)) == len(names)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_size(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= MOST_ROWS

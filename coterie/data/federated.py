"""One table on many nodes: what each node reveals of its rows so that all nodes encode theirs alike.

A node reveals the names and sizes of its clients, counts over its columns (`ColumnFacts`), the classes of the target
and, of its training rows, the sums and levels in `Statistics`. Rows and single values of numeric columns stay on the
node, and so do the texts of columns that identify rows: the server asks for no levels of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from coterie._core.errors import DataError, SettingError, nearest
from coterie.data import column_formats, grouping, tables
from coterie.data import column_types as columns
from coterie.data.client_sums import ClientSums
from coterie.data.column_facts import ColumnFacts
from coterie.data.column_readings import ColumnReading
from coterie.data.column_readings import read as read_columns
from coterie.data.statistics import Levels, Moments, Statistics, most_levels
from coterie.data.table_spec import TableSpec, spec_of
from coterie.data.target_task import MOST_LEVELS, read_as, written_in

if TYPE_CHECKING:
    import polars

MOST_WHOLE_CLASSES = 20  # whole numbers with more values than this are a quantity, as in a local table


@dataclass(frozen=True)
class Roles:
    """Which columns the federation uses, and for what.

    Parameters
    ----------
    client
        Name of the client column.
    target
        Name of the target column.
    cluster
        Name of the cluster column, or None.
    task
        The task, or None to infer it.
    drop
        Names of columns to leave out.
    keep
        Names of columns to use although they look like identifiers.
    groups
        Names of grouping columns of rows, where there are several; `school:class` pairs two columns.
    """

    client: str
    target: str
    cluster: str | None = None
    task: str | None = None
    drop: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Roles:
        """Return the roles that `to_json` wrote."""
        return cls(
            **{**stored, **{name: tuple(stored.get(name) or ()) for name in ("drop", "keep", "groups")}}
        )

    def to_json(self) -> dict[str, Any]:
        """Return the roles as JSON values; without grouping columns as before there were any."""
        stored = asdict(self)
        return stored if self.groups else {name: value for name, value in stored.items() if name != "groups"}

    @property
    def no_features(self) -> set[str | None]:
        """Columns that are no features."""
        labels = grouping.only_in_pairs(self.groups) - set(self.keep)
        return {self.client, self.target, self.cluster, *self.drop, *labels}


def own_rows(frame: polars.DataFrame, roles: Roles, client: str | None, source: str) -> polars.DataFrame:
    """Return the rows of a node, with a client column.

    Parameters
    ----------
    frame
        The node's table.
    roles
        Which columns the federation uses.
    client
        The one client whose rows these are. A table with a client column is filtered by it; a table without one
        gets it.
    source
        Where the rows are from, for error messages.

    Returns
    -------
    polars.DataFrame
        The rows the node takes part with.

    Raises
    ------
    DataError
        If a column or the client is missing.
    """
    import polars as pl

    frame = grouping.combined(frame, roles.groups)
    clusters = [("cluster", name) for name in (roles.cluster, *roles.groups)]
    for role, name in [("target", roles.target), *clusters]:
        if name is not None and name not in frame.columns:
            raise DataError(f"{source}: there is no {role} column {name!r}.{nearest(name, frame.columns)}")
    if roles.client in frame.columns:
        if client is None:
            return frame
        label = columns.labels(frame[roles.client])
        mine = frame.filter(label == client)
        if not mine.height:
            known = sorted(set(label.drop_nulls().to_list()))
            raise DataError(f"{source}: no row of client {client!r}.{nearest(client, known)}")
        return mine
    if client is None:
        raise DataError(
            f"{source}: there is no client column {roles.client!r}. Say whose rows these are: --client NAME"
        )
    return frame.with_columns(pl.lit(client).alias(roles.client))


def describe(frame: polars.DataFrame, roles: Roles, source: str) -> dict[str, Any]:
    """Return what a node reveals before training: clients, their sizes and clusters, kinds of columns, classes.

    Parameters
    ----------
    frame
        The node's rows, from `own_rows`.
    roles
        Which columns the federation uses.
    source
        Where the rows are from, for error messages.

    Returns
    -------
    dict
        JSON values, to be sent to the server.
    """
    import torch

    frame, names, sizes = tables.by_client(frame, roles.client)
    clusters = None
    if roles.cluster is not None:
        if grouping.finest(frame, roles.client, [roles.cluster]) is None:
            raise DataError(
                f"{source}: clients have rows in several clusters of column {roles.cluster!r}. Put all rows of "
                "a client into one; if the column is crossed with clients, name it twice: "
                f"--cluster {roles.cluster} --cluster {roles.cluster}"
            )
        first = (torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)).tolist()
        clusters = [columns.labels(frame[roles.cluster])[row] for row in first]
    features = [name for name in frame.columns if name not in roles.no_features]
    target = _classes(frame[roles.target], roles, source)
    facts = _facts_of(frame, features, roles, target)
    return {
        "clients": names,
        "rows": sizes,
        "clusters": clusters,
        "columns": [[name, facts[name].kind] for name in features],
        "facts": {name: one.to_json() for name, one in facts.items()},
        "target": target,
    }


def readings(frame: polars.DataFrame, roles: Roles) -> list[ColumnReading]:
    """Return how the columns of one node's table are read, by its own rows alone.

    Parameters
    ----------
    frame
        The node's table.
    roles
        Which columns the federation uses.

    Returns
    -------
    list of ColumnReading
        One for each feature column.
    """
    import polars as pl

    if roles.client not in frame.columns:
        frame = frame.with_columns(pl.lit("").alias(roles.client))
    frame = grouping.combined(frame, roles.groups)
    features = [name for name in frame.columns if name not in roles.no_features]
    target = _classes(frame[roles.target], roles, "the table")
    return read_columns(_facts_of(frame, features, roles, target), roles.keep, groups=roles.groups)


def _facts_of(
    frame: polars.DataFrame, features: Sequence[str], roles: Roles, target: Mapping[str, Any]
) -> dict[str, ColumnFacts]:
    """Return the facts of a node's feature columns, given what it tells of its target."""
    format = "" if "levels" in target else next(iter(target.get("formats", ())), "")
    return tables.all_facts(frame, features, roles.client, roles.target, target.get("levels", ()), format)


def _classes(target: polars.Series, roles: Roles, source: str) -> dict[str, Any]:
    """Return the classes of the target if it may have some, and the formats in which text may be a quantity."""
    import polars as pl

    if target.null_count():
        raise DataError(f"{source}: target column {target.name!r} has missing values. Remove these rows.")
    formats = written_in(target)
    written = {"formats": formats} if formats else {}
    if roles.task == "regression":
        return {"kind": "quantity"} | written
    levels = list(columns.levels(target))
    target = read_as(target, formats[0]) if formats and roles.task is None else target
    words = columns.kind(target) == "category" or target.dtype == pl.Boolean
    limit = MOST_LEVELS if words or roles.task else MOST_WHOLE_CLASSES
    whole = target.dtype.is_integer() or (target.dtype.is_float() and bool((target == target.floor()).all()))
    if not (words or whole) or target.n_unique() > limit:
        return {"kind": "quantity"} | written
    return {"kind": "words" if words else "whole", "levels": levels} | written


def merge(descriptions: Mapping[str, Mapping[str, Any]], roles: Roles) -> TableSpec:
    """Combine the descriptions of all nodes into one reading of the columns.

    Parameters
    ----------
    descriptions
        What `describe` returned, by node.
    roles
        Which columns the federation uses.

    Returns
    -------
    TableSpec
        The role of every column; columns that nodes lack are left out and named in the warnings.

    Raises
    ------
    DataError
        If the nodes have no feature in common, or disagree on the target.
    """
    found: dict[str, ColumnFacts] = {}
    for told in descriptions.values():
        for name, kind in told["columns"]:
            one = _facts(told, name, kind)
            found[name] = found[name].merge(one) if name in found else one
    warnings = []
    for name in list(found):
        without = [place for place, told in descriptions.items() if name not in dict(told["columns"])]
        if without:
            warnings.append(f"Column {name!r} is left out, because {columns.some(without)} has none.")
            del found[name]
    task, classes = _task(descriptions, roles)
    format = target_format(descriptions.values()) if task == "regression" else ""
    read = read_columns(found, roles.keep, groups=roles.groups)
    spec = spec_of(read, roles.client, roles.target, roles.cluster, task, classes, roles.groups, None, format)
    if not (spec.numeric or spec.categories):
        raise DataError(
            "The places have no feature column in common. Look at their tables, at --drop and at --keep."
        )
    spec.warnings[:0] = warnings
    return spec


def _facts(told: Mapping[str, Any], name: str, kind: str) -> ColumnFacts:
    """Return what a node counted in a column; its kind alone if it counted nothing that can be."""
    try:
        return ColumnFacts.from_json(told["facts"][name])
    except (KeyError, TypeError, ValueError):
        return ColumnFacts(kind if kind in ("numeric", "category") else "empty", int(kind != "empty"))


def _task(descriptions: Mapping[str, Mapping[str, Any]], roles: Roles) -> tuple[str, tuple[str, ...]]:
    quantities = [place for place, told in descriptions.items() if told["target"]["kind"] == "quantity"]
    words = any(told["target"]["kind"] == "words" for told in descriptions.values())
    if roles.task not in (None, "regression", "classification", "binary", "multiclass"):
        raise SettingError(f"Unknown task {roles.task!r}; it is classification or regression")
    if quantities and (words or roles.task not in (None, "regression")):
        raise DataError(
            f"Target column {roles.target!r} holds classes, but at {columns.some(quantities)} it is a quantity."
        )
    if quantities or roles.task == "regression":
        return "regression", ()
    classes = in_order({level for told in descriptions.values() for level in told["target"]["levels"]})
    if len(classes) < 2:
        raise DataError(f"Target column {roles.target!r} has one value only, so there is nothing to learn.")
    if len(classes) > MOST_WHOLE_CLASSES and not words and roles.task is None:
        return "regression", ()
    return "binary" if len(classes) == 2 else "multiclass", classes


def target_format(descriptions: Iterable[Mapping[str, Any]]) -> str:
    """Return the format that reads the target at most places where it is text; "" if it is text at none."""
    told = [name for one in descriptions for name in one["target"].get("formats", ())]
    return max((name for name in column_formats.FORMATS if name in told), key=told.count, default="")


def in_order(labels: set[str] | Sequence[str]) -> tuple[str, ...]:
    """Sort names as a table sorts them: numbers by size, everything else as text."""
    import polars as pl

    given = sorted(labels)
    order, _ = columns.order_and_label(columns.tidy(pl.Series("name", given, dtype=pl.String)))
    return tuple(pl.DataFrame({"order": order, "label": given}).sort("order", "label")["label"])


def client_order(places: Mapping[str, Sequence[str]]) -> list[str]:
    """Return all clients in the order of a table that holds them all.

    Parameters
    ----------
    places
        Names of the clients, by node.

    Returns
    -------
    list of str
        Names of all clients.

    Raises
    ------
    DataError
        If two nodes claim the same client.
    """
    counts = Counter(name for names in places.values() for name in names)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        who = [place for place, names in places.items() if twice[0] in names]
        raise DataError(
            f"client {twice[0]!r} is at {columns.some(who)}. Give each client to one node (--client NAME)."
        )
    return list(in_order(list(counts)))


def statistics_to_json(statistics: Statistics) -> dict[str, Any]:
    """Return statistics as lists of numbers; floats come back bit for bit."""

    def sums(moments: Moments) -> list[float]:
        return [moments.count, moments.mean, moments.squares, moments.missing]

    return {
        "numeric": {name: sums(moments) for name, moments in statistics.numeric.items()},
        "categories": {
            name: [[[level, *found] for level, found in sorted(seen.counts.items())], seen.missing]
            for name, seen in statistics.categories.items()
        },
        "target": sums(statistics.target),
        "clients": statistics.by_client.to_json(),
    }


def statistics_from_json(stored: Mapping[str, Any], spec: TableSpec) -> Statistics:
    """Return the statistics that a node sent.

    Parameters
    ----------
    stored
        What `statistics_to_json` made.
    spec
        The columns they must be of.

    Returns
    -------
    Statistics
        Sums and levels of the node's training rows.

    Raises
    ------
    DataError
        If these are not the statistics of `spec`.
    """
    try:
        return Statistics(
            {name: _moments(stored["numeric"][name]) for name in spec.numeric},
            {name: _levels(stored["categories"][name], most_levels(spec, name)) for name in spec.categories},
            _moments(stored["target"]),
            ClientSums.from_json(stored["clients"], len(spec.numeric) + 1),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise DataError(f"statistics that cannot be read ({problem})") from None


def _moments(stored: Any) -> Moments:
    count, mean, squares, missing = stored
    return Moments(int(count), float(mean), float(squares), int(missing))


def _levels(stored: Any, most: int) -> Levels:
    levels, missing = stored
    if len(levels) > most:
        raise ValueError("too many levels")
    counts = {level: (rows, clients) for level, rows, clients in levels}
    numbers = [number for pair in counts.values() for number in pair]
    if not all(isinstance(level, str) for level in counts) or not all(
        type(number) is int and 0 < number < 1 << 62 for number in numbers
    ):
        raise ValueError("levels that no rows have")
    return Levels(counts, bool(missing))

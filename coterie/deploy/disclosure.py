"""What of a node's table its policy lets out: columns, clients, levels, sums and scores of enough rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie._core.errors import DataError
from coterie.data import column_types as columns
from coterie.data import federated
from coterie.data.client_sums import ClientSums
from coterie.data.column_facts import ColumnFacts
from coterie.data.federated import Roles
from coterie.data.statistics import Levels, Moments, Statistics
from coterie.data.table_spec import TableSpec
from coterie.deploy.consent import Refusal
from coterie.deploy.policy import Policy

if TYPE_CHECKING:
    import polars

RARE = "(rare)"  # stands for levels of too few rows


def offered(
    policy: Policy, rows: polars.DataFrame, roles: Roles, source: str, log: Callable[[str], None]
) -> polars.DataFrame:
    """Return the columns that the policy names, of clients with enough rows; for a server there is nothing else."""
    if policy.columns is not None:
        missing = [name for name in policy.columns if name not in rows.columns]
        if missing:
            raise DataError(f"{source}: no column {missing[0]!r}, which the policy names")
        names = {roles.client, roles.target, roles.cluster, *policy.columns}
        rows = rows.select([name for name in rows.columns if name in names])
    if policy.min_rows > 1:
        sizes = rows[roles.client].value_counts()
        name, count = sizes.columns
        small = sizes.filter(sizes[count] < policy.min_rows)
        if small.height:
            log(f"{small.height} client(s) with fewer than {policy.min_rows} rows take no part")
        rows = rows.filter(~rows[roles.client].is_in(small[name].to_list()))
        if not rows.height:
            raise Refusal(f"policy: no client of this node has {policy.min_rows} rows")
    return _without_few(policy, rows, roles)


def _without_few(policy: Policy, rows: polars.DataFrame, roles: Roles) -> polars.DataFrame:
    """Return the table in which values of a column count as missing where a client has too few of them."""
    import polars as pl

    if policy.min_rows_per_statistic <= 1:
        return rows
    features = [name for name in rows.columns if name not in (roles.client, roles.target, roles.cluster)]
    present = {name: pl.col(name).count().over(roles.client) for name in features}
    kept = [
        pl.when(present[name] >= policy.min_rows_per_statistic).then(pl.col(name)).alias(name)
        for name in features
    ]
    return rows.with_columns(kept)


def common_levels(policy: Policy, column: polars.Series) -> frozenset[str]:
    """Return the levels of training rows that enough of them have."""
    counts = columns.labels(column).drop_nulls().value_counts()
    label, count = counts.columns
    return frozenset(counts.filter(counts[count] >= policy.min_rows_per_statistic)[label].to_list())


def statistics(policy: Policy, sums: Statistics, train: polars.DataFrame) -> Statistics:
    """Return the statistics of training rows without what too few rows are behind.

    A column whose encoding the policy fixes is reported as that encoding, whatever its rows are.
    """
    fixed = policy.encoding
    rows, clients = train.height, max(1, len(sums.by_client.names))

    def enough(moments: Moments) -> Moments:
        few = moments.count < policy.min_rows_per_statistic
        return Moments(missing=moments.count + moments.missing) if few else moments

    def numbers(name: str, moments: Moments) -> Moments:
        if name not in fixed:
            return enough(moments)
        count, (mean, sd) = moments.count + moments.missing, fixed[name]
        return Moments(count, float(mean), count * float(sd) ** 2)

    def levels(name: str, seen: Levels) -> Levels:
        if name in fixed:
            return Levels(dict.fromkeys(map(str, fixed[name]), (rows, clients)), False)
        common = common_levels(policy, train[name])
        return Levels({level: count for level, count in seen.counts.items() if level in common}, seen.missing)

    return Statistics(
        {name: numbers(name, moments) for name, moments in sums.numeric.items()},
        {name: levels(name, seen) for name, seen in sums.categories.items()},
        enough(sums.target) if sums.target.count else sums.target,
        _by_client(policy, sums),
    )


def in_words(policy: Policy, told: dict[str, Any], rows: polars.DataFrame, roles: Roles) -> dict[str, Any]:
    """Return a description for a run with secure sums: how columns are read and which levels they have, no counts.

    Identifiers and free text are "unsupported", whatever other nodes think of them.
    """
    found, levels = {}, {}
    for one in federated.readings(rows, roles):
        format = {one.format: 1} if one.format else {}
        if one.kind in ("number", "date"):
            found[one.column] = ColumnFacts("category" if format else "numeric", 1, formats=format)
        elif one.kind == "category":
            found[one.column] = ColumnFacts("category", 1)
            levels[one.column] = sorted(common_levels(policy, rows[one.column]))
        else:
            found[one.column] = ColumnFacts("empty" if one.kind == "empty" else "unsupported")
    kinds = [
        [name, "unsupported" if found[name].kind == "unsupported" else kind] for name, kind in told["columns"]
    ]
    fixed = {name: value for name, value in policy.encoding.items() if name not in levels}
    return {
        **told,
        "columns": kinds,
        "facts": {name: one.to_json() for name, one in found.items()},
        "levels": levels
        | {name: list(map(str, policy.encoding[name])) for name in levels if name in policy.encoding},
        "missing": [name for name in found if rows[name].null_count()],
        "fixed": {name: [float(part) for part in value] for name, value in fixed.items()},
    }


def _by_client(policy: Policy, sums: Statistics) -> ClientSums:
    """Return the sums of single clients, without those of few rows: few outliers could be told from their sums."""
    least, by_client = policy.min_rows_per_statistic, sums.by_client
    if least <= 1 and not policy.encoding:
        return by_client
    found = by_client.sums.copy()
    count, outliers = found[..., 0], found[..., 3]
    few = (outliers > 0) & (outliers < least)
    found[few, 4:6] = found[few, 1:3]  # as if these rows were none
    found[few, 3] = found[few, 6] = 0
    found[count < least] = 0
    for place, name in enumerate(sums.numeric):
        if name in policy.encoding:
            found[:, place] = 0
    return ClientSums(by_client.names, found, by_client.groups)


def facts(policy: Policy, told: dict[str, Any]) -> dict[str, Any]:
    """Return a node's description with the kinds of columns that the policy says, and counts where it lets them out.

    Nothing but its kind is said of a column whose encoding the owner fixed.
    """
    if policy.columns is None:
        return told
    kinds, rows = policy.columns, sum(told["rows"])
    found = {
        name: ColumnFacts(kinds[name], rows if kinds[name] != "empty" else 0).to_json()
        if name in policy.encoding
        else one
        for name, one in told["facts"].items()
    }
    return {**told, "columns": [[name, kinds[name]] for name, _ in told["columns"]], "facts": found}


def without_rare(policy: Policy, frame: polars.DataFrame, train: Tensor, spec: TableSpec) -> polars.DataFrame:
    """Return the table with the levels of too few training rows replaced by one that stands for all of them.

    Otherwise an encoding with such a level, which another node may have more often, would single these rows out.
    """
    import polars as pl

    for name in spec.categories:
        common = common_levels(policy, frame[name][train.numpy()])
        label = columns.labels(frame[name])
        known = label.is_null() | label.is_in(list(common))
        frame = frame.with_columns(pl.when(known).then(label).otherwise(pl.lit(RARE)).alias(name))
    return frame


def scores(policy: Policy, values: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Return sums of metrics [k, ...] with NaN for clients that have rows in the split, but too few of them."""
    hidden = ((rows > 0) & (rows < policy.min_rows_per_statistic)).unsqueeze(-1)
    if not bool(hidden.any()):
        return values
    return {
        name: value if name in ("value.rows", "good") else torch.where(hidden, torch.nan, value)
        for name, value in values.items()
    }

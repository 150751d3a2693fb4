"""What of a node's table its policy lets out: columns, clients, levels, sums and scores of enough rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie._core.errors import DataError
from coterie.data import column_types as columns
from coterie.data.federated import Roles
from coterie.data.preprocess import Levels, Moments, Statistics
from coterie.data.tables import TableSpec
from coterie.deploy.guard import Refusal
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
    return rows


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
            return Levels(frozenset(fixed[name]), False)
        return Levels(seen.levels & common_levels(policy, train[name]), seen.missing)

    return Statistics(
        {name: numbers(name, moments) for name, moments in sums.numeric.items()},
        {name: levels(name, seen) for name, seen in sums.categories.items()},
        enough(sums.target) if sums.target.count else sums.target,
    )


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

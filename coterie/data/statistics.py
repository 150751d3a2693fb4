"""Sums over training rows from which the shared encoding is fitted; those of different clients add up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from coterie.data import column_types as columns
from coterie.data import grouping
from coterie.data.client_sums import ClientSums
from coterie.data.table_spec import TableSpec
from coterie.data.target_task import MOST_LEVELS

if TYPE_CHECKING:
    import polars

_ROUNDING = 1e-12  # a standard deviation below this share of the mean is rounding, not variation


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squares about the mean of the values present, and how many are missing.

    Sums about the mean merge exactly, and do not cancel when the mean is large.

    Examples
    --------
    >>> import polars
    >>> from coterie.data.statistics import Moments
    >>> both = Moments.of(polars.Series([1.0, None])).merge(Moments.of(polars.Series([3.0])))
    >>> both, both.sd
    (Moments(count=2, mean=2.0, squares=2.0, missing=1), 1.0)
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    missing: int = 0

    @classmethod
    def of(cls, values: polars.Series) -> Self:
        """Return the moments of a column that may hold nulls."""
        present = values.drop_nulls().to_numpy()
        if not len(present):
            return cls(missing=len(values))
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(present.mean())
            squares = float(np.square(present - mean).sum())
        return cls(len(present), mean, squares, len(values) - len(present))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of values together (Chan, Golub, LeVeque 1983)."""
        count = self.count + other.count
        missing = self.missing + other.missing
        if not count:
            return Moments(missing=missing)
        gap, share = other.mean - self.mean, other.count / count
        squares = self.squares + other.squares + gap * gap * self.count * share
        return Moments(count, self.mean + gap * share, squares, missing)

    @property
    def sd(self) -> float:
        """Standard deviation of these values (divided by their count); 0 for constants."""
        sd = math.sqrt(self.squares / self.count) if self.count else 0.0
        return sd if sd > _ROUNDING * abs(self.mean) else 0.0


@dataclass(frozen=True)
class Levels:
    """Levels of a category column with their rows and clients, and whether a value was missing.

    Parameters
    ----------
    counts
        (rows, clients) of each level.
    missing
        Whether a value was missing.
    """

    counts: Mapping[str, tuple[int, int]]
    missing: bool

    @classmethod
    def of(cls, column: polars.Series, owner: polars.Series, most: int = MOST_LEVELS) -> Self:
        """Return the levels of a column; at most so many, the most frequent ones."""
        import polars as pl

        table = pl.DataFrame({"level": columns.labels(column), "owner": owner}).drop_nulls("level")
        found = table.group_by("level").agg(rows=pl.len(), clients=pl.col("owner").n_unique())
        found = found.sort(["rows", "level"], descending=[True, False]).head(most)
        return cls(
            {level: (rows, clients) for level, rows, clients in found.iter_rows()}, column.null_count() > 0
        )

    def merge(self, other: Levels) -> Levels:
        """Return the levels of both sets of rows together."""
        counts = dict(self.counts)
        for level, (rows, clients) in other.counts.items():
            before = counts.get(level, (0, 0))
            counts[level] = (before[0] + rows, before[1] + clients)
        return Levels(counts, self.missing or other.missing)


@dataclass(frozen=True)
class Statistics:
    """What clients reveal of their training rows so that the preprocessor can be fitted.

    Parameters
    ----------
    numeric
        Moments of each numeric column.
    categories
        Levels of each category column.
    target
        Moments of the target; empty for classes.
    by_client
        Sums of each client by itself, by which a client in other units is noticed.
    """

    numeric: dict[str, Moments]
    categories: dict[str, Levels]
    target: Moments
    by_client: ClientSums

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of both sets of rows together."""
        return Statistics(
            {name: mine.merge(other.numeric[name]) for name, mine in self.numeric.items()},
            {name: mine.merge(other.categories[name]) for name, mine in self.categories.items()},
            self.target.merge(other.target),
            self.by_client.merge(other.by_client),
        )


def local_statistics(frame: polars.DataFrame, spec: TableSpec) -> Statistics:
    """Return the statistics of the training rows of one client, or of several pooled.

    Parameters
    ----------
    frame
        The training rows, from `tables.read`.
    spec
        What each column is for, from `tables.check`.

    Returns
    -------
    Statistics
        Sums to be merged with those of the other clients.
    """
    frame = grouping.combined(frame, spec.groups)
    numbers = {name: spec.numbers(frame, name) for name in spec.numeric}
    owner = columns.labels(frame[spec.client])
    target = target_values(frame, spec)
    group = None
    if spec.cluster is not None and spec.cluster in frame.columns:
        group = columns.labels(frame[spec.cluster])
    return Statistics(
        {name: Moments.of(values) for name, values in numbers.items()},
        {name: Levels.of(frame[name], owner, most_levels(spec, name)) for name in spec.categories},
        Moments.of(target) if spec.task == "regression" else Moments(),
        ClientSums.of(owner, [*numbers.values(), target], group),
    )


def most_levels(spec: TableSpec, name: str) -> int:
    """Return how many levels of a category column are counted."""
    return grouping.MOST_GROUPS if name in spec.groups else MOST_LEVELS


def target_values(frame: polars.DataFrame, spec: TableSpec) -> polars.Series:
    """Return the target as numbers: values of a quantity, 0 or 1 for two classes, nothing for more."""
    import polars as pl

    if spec.task == "regression":
        return spec.numbers(frame, spec.target)
    if spec.task == "binary":
        return pl.Series(columns.codes(columns.labels(frame[spec.target]), spec.classes).astype(float))
    return pl.Series([None] * frame.height, dtype=pl.Float64)

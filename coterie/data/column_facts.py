"""Count in a column what tells its use: how often values repeat, which formats read them, how they go with the target.

Every client counts by itself (`facts`), the counts are added (`ColumnFacts.merge`), and `column_readings` decides from
the sums. A federation whose nodes send the sums decides as one table with all rows would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.data import column_formats
from coterie.data import column_types as columns

if TYPE_CHECKING:
    import polars


@dataclass(frozen=True)
class ColumnFacts:
    """Sums over the rows of one column; those of different clients add up.

    Parameters
    ----------
    kind
        "numeric", "category", "empty" or "unsupported".
    rows
        Values that are there.
    missing
        Values that are not.
    pairs
        Pairs of values of one client.
    equal
        Pairs among them that are equal.
    single
        Values that occur once at their client.
    whole
        Values that are whole numbers.
    words
        Words in texts.
    sum, squares
        Sum and sum of squares of whole numbers.
    clients, fixed
        Clients with values, and those that have one value only.
    fixed_sum, fixed_squares
        Sum and sum of squares of the whole numbers that are the only one of their client.
    agreeing, majority, judged
        Rows of the most frequent class given the value, of the most frequent class, and rows in all.
    explained, variation
        Squares of the column that the classes of the target explain, and all of them.
    xy, xx, yy
        Products and squares of column and target about the means of the client.
    formats
        Values by the format that reads them.
    """

    kind: str = "empty"
    rows: int = 0
    missing: int = 0
    pairs: int = 0
    equal: int = 0
    single: int = 0
    whole: int = 0
    words: int = 0
    sum: float = 0.0
    squares: float = 0.0
    clients: int = 0
    fixed: int = 0
    fixed_sum: float = 0.0
    fixed_squares: float = 0.0
    agreeing: int = 0
    majority: int = 0
    judged: int = 0
    explained: float = 0.0
    variation: float = 0.0
    xy: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    formats: Mapping[str, int] = field(default_factory=dict)

    def merge(self, other: ColumnFacts) -> ColumnFacts:
        """Return the facts of both sets of rows together."""
        sums: dict[str, Any] = {
            one.name: getattr(self, one.name) + getattr(other, one.name)
            for one in fields(self)
            if one.name not in ("kind", "formats")
        }
        kinds = {self.kind, other.kind} - {"empty"}
        kind = next((name for name in ("unsupported", "category", "numeric") if name in kinds), "empty")
        names = {*self.formats, *other.formats}
        formats = {name: self._read_by(name) + other._read_by(name) for name in names}
        return ColumnFacts(kind, **sums, formats=formats)

    def _read_by(self, name: str) -> int:
        """Return how many values a format reads; all of a column that is numbers already, if it is of numbers."""
        plain = self.kind == "numeric" and not self.formats and name != column_formats.BOUNDS
        return self.rows if plain else self.formats.get(name, 0)

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Any) -> ColumnFacts:
        """Return the facts that `to_json` wrote; raise ValueError for what no client counts."""
        try:
            kind, formats = stored["kind"], dict(stored["formats"])
            sums = {one.name: stored[one.name] for one in fields(cls) if one.name not in ("kind", "formats")}
            numbers = [*sums.values(), *formats.values()]
            counts = [value for name, value in sums.items() if isinstance(getattr(cls, name), int)]
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"malformed facts of a column ({problem})") from None
        whole = all(type(value) is int and 0 <= value < 1 << 62 for value in (*counts, *formats.values()))
        finite = all(isinstance(value, int | float) and math.isfinite(value) for value in numbers)
        if not (whole and finite and kind in ("numeric", "category", "empty", "unsupported")):
            raise ValueError("facts of a column that no rows have")
        known = {
            name: formats[name]
            for name in (*column_formats.FORMATS, column_formats.BOUNDS)
            if name in formats
        }
        return cls(kind=kind, **sums, formats=known)


def facts(
    frame: polars.DataFrame, name: str, owner: np.ndarray, target: np.ndarray, classes: bool
) -> ColumnFacts:
    """Return the facts of one column over the rows of these clients.

    Parameters
    ----------
    frame
        The rows.
    name
        The column.
    owner
        Client of each row, whole numbers from 0.
    target
        Class number or value of each row's target; NaN where unknown.
    classes
        Whether the target has classes.

    Returns
    -------
    ColumnFacts
        Sums that say nothing of a single row where clients have several.
    """
    import polars as pl

    column = frame[name]
    kind = columns.kind(column)
    missing, rows = column.null_count(), len(column) - column.null_count()
    if kind is None or not rows:
        return ColumnFacts("unsupported" if kind is None else "empty", rows, missing)
    text = column.dtype == pl.String
    values = None if kind == "category" else _values(column)
    whole = values is not None and bool((values[~np.isnan(values)] % 1 == 0).all())
    found: dict[str, Any] = {"rows": rows, "missing": missing}
    if kind == "category" or whole:
        found |= _repeats(column, owner, target, classes)
    if values is not None:
        with np.errstate(over="ignore", invalid="ignore"):  # squares of large numbers, which are named later
            found |= _sums(values, owner, target, classes, whole)
    if text or column.dtype.is_integer():
        found["formats"] = column_formats.count(column) if text or _like_dates(column) else {}
    if kind == "category":
        found["words"] = int(column.cast(pl.String).str.count_matches(r"\S+").sum())
    return ColumnFacts(kind, **found)


def _values(column: polars.Series) -> np.ndarray:
    """Return numbers with NaN for what is missing or too large to be squared."""
    values = columns.as_floats(column).to_numpy()
    return np.where(np.abs(values) < 1e150, values, np.nan)


def _like_dates(column: polars.Series) -> bool:
    return bool(column.drop_nulls().is_between(19000101, 20991231).all())


def _repeats(column: polars.Series, owner: np.ndarray, target: np.ndarray, classes: bool) -> dict[str, Any]:
    """Count equal values inside clients, and how well values tell the class."""
    import polars as pl

    table = pl.DataFrame({"owner": owner, "value": columns.labels(column), "target": target})
    sizes = table.drop_nulls("value").group_by("owner", "value").len()
    clients = sizes.group_by("owner").agg(rows=pl.col("len").sum(), values=pl.len())
    found = {
        "pairs": int((clients["rows"] * (clients["rows"] - 1) // 2).sum()),
        "equal": int((sizes["len"] * (sizes["len"] - 1) // 2).sum()),
        "single": int((sizes["len"] == 1).sum()),
        "clients": clients.height,
        "fixed": int((clients["values"] == 1).sum()),
    }
    if not classes:
        return found
    cells = table.group_by("owner", "value", "target").len()
    levels = cells.group_by("owner", "value").agg(most=pl.col("len").max(), rows=pl.col("len").sum())
    judged = levels.filter(pl.col("rows") > 1)
    repeated = table.join(judged, on=["owner", "value"], nulls_equal=True)
    majority = repeated.group_by("owner", "target").len().group_by("owner").agg(pl.col("len").max())
    return found | {
        "agreeing": int(judged["most"].sum()),
        "majority": int(majority["len"].sum()),
        "judged": int(judged["rows"].sum()),
    }


def _sums(
    values: np.ndarray, owner: np.ndarray, target: np.ndarray, classes: bool, whole: bool
) -> dict[str, Any]:
    """Return sums of squares and products about the means of clients, and of classes."""
    import polars as pl

    there = ~np.isnan(values) & ~np.isnan(target)
    x, who, y = values[there], owner[there], target[there]
    found: dict[str, Any] = {}
    if whole and not np.isnan(values).all():
        every, by = values[~np.isnan(values)], owner[~np.isnan(values)]
        first = np.unique(by, return_index=True)[1]
        low, high = np.full(by.max() + 1, np.inf), np.full(by.max() + 1, -np.inf)
        np.minimum.at(low, by, every)
        np.maximum.at(high, by, every)
        alone = every[first][(low == high)[by[first]]]
        found |= {"whole": len(every), "sum": float(every.sum()), "squares": float(np.square(every).sum())}
        found |= {"fixed_sum": float(alone.sum()), "fixed_squares": float(np.square(alone).sum())}
    if not len(x):
        return found
    x = _centred(x, who)
    variation = float(np.square(x).sum())
    if classes:
        cell = who * (int(y.max()) + 1) + y.astype(np.int64)
        inside = float(np.square(_centred(x, np.unique(cell, return_inverse=True)[1])).sum())
        if not whole:
            most = pl.DataFrame({"owner": who, "target": y}).group_by("owner", "target").len()
            most = most.group_by("owner").agg(pl.col("len").max())
            found |= {"majority": int(most["len"].sum()), "judged": len(x)}
        return found | {"explained": variation - inside, "variation": variation}
    y = _centred(y, who)
    return found | {"xy": float((x * y).sum()), "xx": variation, "yy": float(np.square(y).sum())}


def _centred(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    means = np.bincount(group, values) / np.maximum(np.bincount(group), 1)
    centred: np.ndarray = values - means[group]
    return centred

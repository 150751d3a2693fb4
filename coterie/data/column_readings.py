"""Decide what a column is for: number, date, category, or an identifier, free text or leak that is left out."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from coterie.data import column_formats
from coterie.data import column_types as columns
from coterie.data.column_facts import ColumnFacts

FEW_VALUES = 50  # a column with fewer values than this, in effect, is never taken for an identifier
_UNIQUE = 0.98  # share of the rows whose value occurs once at its client
_MOSTLY = 0.5  # share of the values that are numbers or dates, where almost every row has another value
_WORDS = 3.0  # per value, in free text
_SAME = 0.9999  # share of the target's variation that a copy of it explains
_MISSED = 6  # pairs of equal values that chance would have brought, where row numbers have none
_EVIDENCE = 20  # rows that are not of their client's most frequent class
_NAMES = re.compile(
    r"(^|[_\W]|(?<=[a-z]))(id|ids|uuid|guid|mrn|ssn|identifier|rownum|row_?number|index)$", re.IGNORECASE
)
_PLURAL = {
    "identifier": "identifiers of rows",
    "client code": "codes of the client",
    "target copy": "copies of the target, which may be known only afterwards",
    "unsupported": "not plain values",
}


@dataclass(frozen=True)
class ColumnReading:
    """How a column is read.

    Parameters
    ----------
    column
        Name of the column.
    kind
        "number", "date", "category", or why it is left out: "identifier", "free text", "constant", "empty",
        "client code", "target copy", "unsupported", "dropped".
    used
        Whether it becomes a feature.
    format
        Format of numbers or dates that are written as text, or "".
    why
        What was seen.
    """

    column: str
    kind: str
    used: bool
    format: str = ""
    why: str = ""


def read(
    found: Mapping[str, ColumnFacts],
    keep: Collection[str] = (),
    constant: Collection[str] = (),
    groups: Collection[str] = (),
) -> list[ColumnReading]:
    """Decide how every column is read.

    Parameters
    ----------
    found
        Facts of every feature column, over all clients.
    keep
        Columns that are used whatever they look like.
    constant
        Columns that are known to have one value only.
    groups
        Columns whose values are groups of rows: categories, whatever they look like.

    Returns
    -------
    list of ColumnReading
        One for each column. If nothing else is left, copies of the target and numbers that look like identifiers
        are used, with a warning.

    Examples
    --------
    >>> import numpy as np, polars
    >>> from coterie.data.column_facts import facts
    >>> rows = range(200)
    >>> frame = polars.DataFrame({"key": [f"p{k}" for k in rows], "fee": [f"${k % 7}" for k in rows]})
    >>> who, y = np.repeat([0, 1], 100), np.arange(200.0) % 3
    >>> for one in read({name: facts(frame, name, who, y, True) for name in frame.columns}):
    ...     print(one.column, one.kind, one.format or one.used)
    key identifier False
    fee number number $
    """
    readings = [
        ColumnReading(name, "constant", False, why="has one value only")
        if name in constant
        else ColumnReading(name, "category", True)
        if name in groups
        else _read(name, one, name in keep)
        for name, one in found.items()
    ]
    if not any(one.used for one in readings):
        readings = [_last_resort(one, found[one.column]) for one in readings]
    return readings


def _last_resort(one: ColumnReading, found: ColumnFacts) -> ColumnReading:
    """Use a column that was left out for what it may be, where its values say anything about a new row."""
    kind = _type(found)[0] if found.rows and found.kind != "unsupported" else ""
    if one.kind == "target copy" or (one.kind == "identifier" and kind == "number"):
        return ColumnReading(one.column, kind, True, one.format, f"{one.why}; no other column is left")
    return one


def _type(one: ColumnFacts) -> tuple[str, str, bool]:
    """Return "number", "date" or "category", the format of text, and whether day and month could be exchanged."""
    chosen = column_formats.choose(one.formats, one.rows) if one.formats else None
    if chosen is not None and column_formats.is_date(chosen[0]):
        return "date", *chosen
    if one.kind == "numeric":
        return "number", "", False
    return ("category", "", False) if chosen is None else ("number", *chosen)


def _read(name: str, one: ColumnFacts, kept: bool) -> ColumnReading:
    if one.kind == "unsupported":
        return ColumnReading(
            name, "unsupported", False, why="holds lists, records or bytes, not plain values"
        )
    if not one.rows:
        return ColumnReading(name, "empty", False, why="has no values")
    kind, format, exchangeable = _type(one)
    left_out = None if kept else _left_out(name, one, kind)
    if left_out is not None:
        return ColumnReading(name, left_out[0], False, format, left_out[1])
    if kind == "category" and not kept and one.single >= max(FEW_VALUES, one.rows / 2):
        chosen = column_formats.choose(one.formats, one.rows, _MOSTLY)  # levels would be lost one by one
        if chosen is not None:
            kind, (format, exchangeable) = "date" if column_formats.is_date(chosen[0]) else "number", chosen
    why = []
    if exchangeable:
        why.append(f"day and month could be exchanged; {format} is assumed")
    if format and one.formats[format] < one.rows:
        why.append(f"{one.rows - one.formats[format]} values are not written so and count as missing")
    return ColumnReading(name, kind, True, format, "; ".join(why))


def _left_out(name: str, one: ColumnFacts, kind: str) -> tuple[str, str] | None:
    """Return why a column is left out, in a word and in a sentence, or None."""
    if _copies_target(one, kind):
        return "target copy", "tells the target exactly: it may be known only afterwards"
    if kind != "category" and not one.whole:
        return None
    if kind == "date":
        return None
    effective = one.pairs / (one.equal + 1)
    unique = one.single >= _UNIQUE * one.rows
    if kind == "category" and one.words >= _WORDS * one.rows and one.single >= 0.5 * one.rows:
        return "free text", "holds sentences"
    if effective >= FEW_VALUES and (
        (kind == "category" and unique)
        or (kind == "number" and unique and (_dense(one) or _large(one)))
        or _NAMES.search(name)
    ):
        return "identifier", "has a different value in almost every row" if unique else "is named like one"
    if one.whole and one.clients >= 3 and one.fixed == one.clients and _numbered(one):
        return "client code", "numbers the clients"
    return None


def _copies_target(one: ColumnFacts, kind: str) -> bool:
    """Return True if the class is the same for all rows of a value, or one number is the other in other units."""
    evidence = one.judged - one.majority >= _EVIDENCE
    if (kind == "category" or one.whole) and evidence and 2 * one.judged >= one.rows:
        if one.agreeing >= _SAME * one.judged:
            return True
    if one.variation > 0:
        return evidence and one.explained >= _SAME * one.variation
    return one.rows >= _EVIDENCE and one.xy * one.xy >= _SAME * one.xx * one.yy > 0


def _spread(one: ColumnFacts) -> float:
    """Return the variance of whole numbers."""
    return max(0.0, one.squares / one.whole - (one.sum / one.whole) ** 2)


def _dense(one: ColumnFacts) -> bool:
    """Return True if n different whole numbers lie as close as row numbers do, whose variance is n²/12.

    Values drawn at random from as narrow a range would agree in some pairs: fewer than expected by `_MISSED` pairs do
    (a chance of e^-6 if none does). So 60 ages are no row numbers. Numbers of a smaller variance are different at each
    client only, as years of a panel are.
    """
    reach = math.sqrt(12 * _spread(one))
    return one.whole <= 2 * reach <= 4 * one.whole and one.pairs >= reach * (one.equal + _MISSED)


def _large(one: ColumnFacts) -> bool:
    """Return True for whole numbers of seven digits or more that spread over their range, as drawn keys do."""
    mean = one.sum / one.whole
    return mean >= 1e6 and math.sqrt(_spread(one)) < 0.75 * mean


def _numbered(one: ColumnFacts) -> bool:
    """Return True if clients with one whole number each have numbers like 1, 2, 3, ..."""
    n = one.fixed
    squares = one.fixed_squares - one.fixed_sum**2 / n
    return 0.5 <= squares / (n * (n * n - 1) / 12) <= 4


def column_warnings(readings: Sequence[ColumnReading]) -> list[str]:
    """Return a sentence for each kind of column that is left out, and for each one that is read with a doubt."""
    found = []
    for kind in dict.fromkeys(one.kind for one in readings if not one.used):
        names = [one.column for one in readings if one.kind == kind and not one.used]
        overrule = (
            "" if kind in ("constant", "empty", "unsupported") else " Use one all the same: --keep COLUMN"
        )
        found.append(f"Left out as {_PLURAL.get(kind, kind)}: {columns.some(names)}.{overrule}")
    found += [f"Column {one.column!r}: {one.why}." for one in readings if one.used and one.why]
    return found

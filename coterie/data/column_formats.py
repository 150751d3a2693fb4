"""Numbers, dates and times written as text: which format a column has, decided over all its values, and what they say.

`count` says how many values each format reads. The counts of several clients add up, so a federation decides as one
table would.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars

ENOUGH = 0.95  # share of the values that a format must read; the others are taken for missing
BOUNDS = "bounds"  # counted beside the formats: where all values are bounds, they are levels ("<50", ">=50")
FEWEST = 20  # below this number of values a format must read them all
_SAMPLE = 200  # different values that decide which formats are tried on all
_TIME = r"(\d{1,2}):(\d{2})(?::(\d{2}(?:\.\d{1,9})?))?\s*([AaPp][Mm])?\s*(?:Z|UTC|([+-]\d{2}):?(\d{2}))?"
_DAY, _HOUR, _MINUTE = 1.0, 1 / 24, 1 / 1440


@dataclass(frozen=True)
class NumberFormat:
    """Numbers with groups of three, a currency or a per cent sign, or a bound such as "<0.3".

    Parameters
    ----------
    decimal
        "." or ",".
    symbol
        The one sign that may stand before or after the number, or "".
    """

    decimal: str
    symbol: str

    @functools.cached_property
    def pattern(self) -> str:
        """Regular expression with the number as its first group."""
        group = r",\u00a0\u202f '’" if self.decimal == "." else r".\u00a0\u202f '’"
        point = r"\." if self.decimal == "." else ","
        sign = rf"[{self.symbol}]?\s*" if self.symbol else ""
        digits = rf"(?:\d{{1,3}}(?:[{group}]\d{{3}})+|\d+)(?:{point}\d*)?|{point}\d+"
        return rf"^(?:[<>≤≥~≈]=?)?\s*{sign}([+\-−]?(?:{digits})(?:[eE][+-]?\d+)?)\s*{sign}$"

    def parse(self, text: polars.Series) -> polars.Series:
        """Return the numbers, null where a value is not written so."""
        import polars as pl

        found = text.str.extract(self.pattern, 1)
        if found.null_count() == len(found):
            return found.cast(pl.Float64)
        group = "," if self.decimal == "." else "."
        plain = found.str.replace_all(rf"[{group}\u00a0\u202f '’]", "").str.replace("−", "-", literal=True)
        plain = plain.str.replace(",", ".", literal=True) if self.decimal == "," else plain
        values = plain.cast(pl.Float64, strict=False)
        return values.zip_with(values.is_finite().fill_null(False), pl.Series([None], dtype=pl.Float64))


@dataclass(frozen=True)
class DateFormat:
    """Dates, with or without a time of day, as days since 1970-01-01.

    Parameters
    ----------
    shape
        Regular expression of the date.
    code
        The date for `strptime`.
    """

    shape: str
    code: str

    def parse(self, text: polars.Series) -> polars.Series:
        """Return days, null where a value is not written so."""
        import polars as pl

        date = text.str.extract(rf"^({self.shape})(?:[T ,]\s*{_TIME})?$", 1)
        if date.null_count() == len(date):
            return date.cast(pl.Float64)
        days = date.str.to_date(self.code, strict=False).to_physical().cast(pl.Float64)
        times = text.str.extract(rf"^{self.shape}[T ,]\s*(.+)$", 1)
        return days + _time_of_day(times).fill_null(0.0)


@dataclass(frozen=True)
class TimeFormat:
    """Times of day, as fractions of a day."""

    def parse(self, text: polars.Series) -> polars.Series:
        """Return fractions of days, null where a value is not written so."""
        return _time_of_day(text)


def _time_of_day(text: polars.Series) -> polars.Series:
    import polars as pl

    if not text.str.contains(f"^{_TIME}$").any():
        return pl.repeat(None, len(text), dtype=pl.Float64, eager=True)
    parts = [text.str.extract(f"^{_TIME}$", place) for place in range(1, 7)]
    hour, minute, second = (part.cast(pl.Float64, strict=False) for part in parts[:3])
    half = parts[3].str.to_lowercase()
    hour = (hour % 12).zip_with((half == "am").fill_null(False), hour)
    hour = (hour % 12 + 12).zip_with((half == "pm").fill_null(False), hour)
    offset = parts[4].cast(pl.Float64, strict=False).fill_null(0.0)
    value = (hour - offset) * _HOUR + minute * _MINUTE + second.fill_null(0.0) * _MINUTE / 60
    good = (hour < 24) & (minute < 60) & (second.fill_null(0.0) < 61)
    return value.zip_with(good.fill_null(False), pl.Series([None], dtype=pl.Float64))


_Y, _D, _WORD = r"\d{4}", r"\d{1,2}", r"[A-Za-z]{3,9}"
_NUMBERS: dict[str, NumberFormat | DateFormat | TimeFormat] = {
    f"{name} {symbol}".strip(): NumberFormat(decimal, symbol)
    for decimal, name in ((".", "number"), (",", "decimal comma"))
    for symbol in ("", "%", "$", "€", "£", "¥")
}
_DATES: dict[str, NumberFormat | DateFormat | TimeFormat] = {
    "yyyy-mm-dd": DateFormat(f"{_Y}-{_D}-{_D}", "%Y-%m-%d"),
    "yyyy/mm/dd": DateFormat(f"{_Y}/{_D}/{_D}", "%Y/%m/%d"),
    "yyyy.mm.dd": DateFormat(rf"{_Y}\.{_D}\.{_D}", "%Y.%m.%d"),
    "yyyymmdd": DateFormat(r"(?:19|20)\d{6}", "%Y%m%d"),
    "dd/mm/yyyy": DateFormat(f"{_D}/{_D}/{_Y}", "%d/%m/%Y"),
    "mm/dd/yyyy": DateFormat(f"{_D}/{_D}/{_Y}", "%m/%d/%Y"),
    "dd.mm.yyyy": DateFormat(rf"{_D}\.{_D}\.{_Y}", "%d.%m.%Y"),
    "dd-mm-yyyy": DateFormat(f"{_D}-{_D}-{_Y}", "%d-%m-%Y"),
    "mm-dd-yyyy": DateFormat(f"{_D}-{_D}-{_Y}", "%m-%d-%Y"),
    "dd/mm/yy": DateFormat(rf"{_D}/{_D}/\d\d", "%d/%m/%y"),
    "mm/dd/yy": DateFormat(rf"{_D}/{_D}/\d\d", "%m/%d/%y"),
    "dd.mm.yy": DateFormat(rf"{_D}\.{_D}\.\d\d", "%d.%m.%y"),
    "dd Mon yyyy": DateFormat(f"{_D} {_WORD} {_Y}", "%d %B %Y"),
    "dd-Mon-yyyy": DateFormat(f"{_D}-{_WORD}-{_Y}", "%d-%B-%Y"),
    "Mon dd, yyyy": DateFormat(f"{_WORD} {_D}, ?{_Y}", "%B %d, %Y"),
    "hh:mm": TimeFormat(),
}
FORMATS = _DATES | _NUMBERS  # "1.2.2024" is a date before it is a number
_TWINS = {"dd/mm/yyyy": "mm/dd/yyyy", "dd-mm-yyyy": "mm-dd-yyyy", "dd/mm/yy": "mm/dd/yy"}


def is_date(name: str) -> bool:
    """Return True for the format of a date or time."""
    return name in _DATES


def bounds(written: polars.Series) -> int:
    """Return how many values of a column are written as bounds, such as "<0.3", or as rough values, such as "~5".

    Examples
    --------
    >>> import polars
    >>> bounds(polars.Series(["<0.3", "0.4", None, ">= 9"]))
    2
    """
    import polars as pl

    return int(written.str.contains(r"^\s*[<>≤≥~≈]").sum()) if written.dtype == pl.String else 0


def parse(text: polars.Series, name: str) -> polars.Series:
    """Return what a column of text says in a format.

    Parameters
    ----------
    text
        The values as they are written; of any type that polars writes as text.
    name
        One of `FORMATS`.

    Returns
    -------
    polars.Series
        float64: numbers, or days since 1970-01-01; null for a value that is not written so.

    Examples
    --------
    >>> import polars
    >>> parse(polars.Series(["$1,005", "<0.3", "-2", "none"]), "number $").to_list()
    [1005.0, 0.3, -2.0, None]
    >>> parse(polars.Series(["31/12/1969", "02/01/1970 12:00"]), "dd/mm/yyyy").to_list()
    [-1.0, 1.5]
    """
    import polars as pl

    return FORMATS[name].parse(text.cast(pl.String))


def count(text: polars.Series) -> dict[str, int]:
    """Count the values that each format reads.

    Parameters
    ----------
    text
        A column of text, or of whole numbers, which may be dates such as 20240131.

    Returns
    -------
    dict
        Number of values by format; formats that read none of the first values are left out.

    Examples
    --------
    >>> import polars
    >>> count(polars.Series(["03/04/2024", "25/12/2024"]))
    {'dd/mm/yyyy': 2, 'mm/dd/yyyy': 1}
    """
    import polars as pl

    table = pl.DataFrame({"text": text.cast(pl.String)}).drop_nulls().group_by("text").len().sort("text")
    values, sizes = table["text"], table["len"]
    tried = _DATES if text.dtype.is_integer() else FORMATS
    found = {}
    for name, format in tried.items():
        if format.parse(values.head(_SAMPLE)).is_not_null().any():
            found[name] = int(sizes.filter(format.parse(values).is_not_null()).sum())
    found[BOUNDS] = int(sizes.filter(values.str.contains("^[<>≤≥]")).sum())
    return {name: number for name, number in found.items() if number}


def read_all(text: polars.Series) -> list[str]:
    """Return the formats that read every value of a column of text; none where all values are bounds.

    Examples
    --------
    >>> import polars
    >>> read_all(polars.Series(["1.234,50 €", "99 €"])), read_all(polars.Series(["7 days", "3"]))
    (['decimal comma €'], [])
    """
    counts = count(text)
    total = text.len() - text.null_count()
    if counts.get(BOUNDS, 0) > ENOUGH * total:
        return []
    return [name for name in FORMATS if counts.get(name) == total]


def choose(counts: Mapping[str, int], total: int, enough: float = ENOUGH) -> tuple[str, bool] | None:
    """Return the format that reads the most values, and whether day and month could be exchanged.

    Parameters
    ----------
    counts
        What `count` returned, added up over clients.
    total
        Number of values.
    enough
        Share of the values that the format must read.

    Returns
    -------
    tuple or None
        None if no format reads enough of the values.

    Examples
    --------
    >>> choose({"dd/mm/yyyy": 40, "mm/dd/yyyy": 12}, 40), choose({"number": 3}, 40)
    (('dd/mm/yyyy', False), None)
    """
    known = {name: counts[name] for name in FORMATS if name in counts}
    if not known:
        return None
    best = max(known, key=lambda name: known[name])
    if known[best] < (enough * total if total >= FEWEST else total):
        return None
    if best in _NUMBERS and counts.get(BOUNDS, 0) > ENOUGH * total:
        return None
    return best, known.get(_TWINS.get(best, "")) == known[best]

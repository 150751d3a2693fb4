"""Types of columns: tidy values, infer what they are, and view them as numbers or as levels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coterie._core.errors import DataError
from coterie.data import column_formats, delimited

if TYPE_CHECKING:
    import polars

MISSING = (
    *("", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "?"),
    *("#N/A", "#NA", "#DIV/0!", "#NULL!", "#VALUE!", "#REF!", "#NUM!"),  # what spreadsheets write
)
_DAY = 86_400_000_000  # microseconds
_EXACT = 2.0**53  # whole numbers beyond this are not all floats


def tidy(column: polars.Series, decimal_comma: bool = False) -> polars.Series:
    """Strip spaces, turn words for missing values into null, and give text the type that all its values have."""
    import polars as pl

    column = column.alias(column.name.strip())
    if column.dtype.is_float():
        return column.fill_nan(None)
    if column.dtype != pl.String:
        return column
    text = column.str.strip_chars()
    text = text.zip_with(~text.is_in(MISSING), pl.Series([None], dtype=pl.String))
    if decimal_comma and text.drop_nulls().str.contains(r"^[+-]?\d+(,\d+)?$").all():
        text = text.str.replace(",", ".", literal=True)
    return _typed(text)


def _typed(text: polars.Series) -> polars.Series:
    """Convert text to the narrowest type that all its values have."""
    values = text.drop_nulls()
    if values.is_empty():
        return text
    if _reads_as_numbers(text):
        return text if _are_codes(values) else _as_numbers(text)
    if values.str.to_lowercase().is_in(["true", "false"]).all():
        return text.str.to_lowercase() == "true"
    if values.str.contains(r"^\d{4}-\d\d-\d\d$").all():
        return _unless_lost(text, text.str.to_date("%Y-%m-%d", strict=False))
    if values.str.contains(r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?Z?$").all():
        plain = text.str.replace("T", " ").str.strip_chars_end("Z").str.replace(r"^(.{16})$", "${1}:00")
        return _unless_lost(text, plain.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", strict=False))
    return text


def _reads_as_numbers(text: polars.Series) -> bool:
    import polars as pl

    return text.cast(pl.Float64, strict=False).null_count() == text.null_count()


def _are_codes(values: polars.Series) -> bool:
    """Return True for numbers that would not come back as written (007, or twenty digits): they may be names."""
    import polars as pl

    whole = values.filter(values.str.contains(r"^[+-]?\d+$"))
    return whole.str.contains(r"^[+-]?0\d").any() or whole.cast(pl.Int64, strict=False).null_count() > 0


def _as_numbers(text: polars.Series) -> polars.Series:
    import polars as pl

    whole = text.cast(pl.Int64, strict=False)
    return whole if whole.null_count() == text.null_count() else text.cast(pl.Float64).fill_nan(None)


def _unless_lost(text: polars.Series, parsed: polars.Series) -> polars.Series:
    """Return the parsed values, or the text if a value (a 31 February) did not parse."""
    return parsed if parsed.null_count() == text.null_count() else text


def kind(column: polars.Series) -> str | None:
    """Return 'numeric' (also booleans, times, and text that reads as numbers), 'category', or None for others."""
    import polars as pl

    if column.dtype.is_numeric() or column.dtype.is_temporal() or column.dtype in (pl.Boolean, pl.Null):
        return "numeric"
    if column.dtype == pl.String:
        return "numeric" if _reads_as_numbers(column) else "category"
    return "category" if column.dtype in (pl.Categorical, pl.Enum) else None


def as_floats(column: polars.Series) -> polars.Series:
    """Return a column as float64: booleans as 0 and 1, dates and times as days, null for what is not a number."""
    import polars as pl

    if column.dtype.is_temporal():
        return _days(column)
    column = column.cast(pl.String) if column.dtype in (pl.Categorical, pl.Enum) else column
    return column.cast(pl.Float64, strict=False)


def numbers(
    frame: polars.DataFrame,
    name: str,
    source: str = "the table",
    client: str | None = None,
    format: str = "",
) -> polars.Series:
    """Return a column as float64 with nulls: booleans as 0 and 1, dates and times as days.

    Parameters
    ----------
    frame
        The table.
    name
        The column.
    source
        Where the table is from, for error messages.
    client
        Name of the client column, so that errors can name the client.
    format
        Format of `column_formats` in which text is written; a value that is not written so is missing.

    Returns
    -------
    polars.Series
        float64 with nulls.

    Raises
    ------
    DataError
        If a value is not a number or is infinite.
    """
    import polars as pl

    column = frame[name]
    if kind(column) is None:
        raise DataError(f"{source}: column {name!r} holds {column.dtype}, not numbers. Convert it first.")
    as_text = kind(column) == "category" or (column.dtype.is_integer() and column_formats.is_date(format))
    if format and (as_text or column.dtype == pl.String):
        return column_formats.parse(column, format)
    values = as_floats(column)
    words = column.is_not_null() & values.is_null()
    for wrong, what in ((words, "is not a number"), (values.is_infinite(), "is infinite")):
        if wrong.any():
            row = int(wrong.arg_max() or 0)
            raise DataError(
                f"{source}: column {name!r}, {place(frame, row, source, client)}: the value {column[row]!r} "
                f"{what}. Correct it, empty it or remove the row."
            )
    return values.fill_nan(None)


def _days(column: polars.Series) -> polars.Series:
    """Return dates as days since 1970-01-01 (UTC), durations and times of day as fractions of days."""
    import polars as pl

    if column.dtype == pl.Date:
        return column.to_physical().cast(pl.Float64)
    if column.dtype == pl.Time:
        return column.to_physical().cast(pl.Float64) / (1000 * _DAY)
    if column.dtype == pl.Duration:
        return column.dt.total_microseconds().cast(pl.Float64) / _DAY
    return column.dt.epoch("us").cast(pl.Float64) / _DAY


def labels(column: polars.Series) -> polars.Series:
    """Return values as text; whole floats as whole numbers, so that 1.0 and 1 are one level."""
    import polars as pl

    if column.dtype == pl.Duration:
        column = column.to_physical()
    if not column.dtype.is_float():
        return column.cast(pl.String)
    whole = (column == column.floor()) & (column.abs() < _EXACT)
    return column.cast(pl.Int64, strict=False).cast(pl.String).zip_with(whole, column.cast(pl.String))


def order_and_label(column: polars.Series) -> tuple[polars.Series, polars.Series]:
    """Return the values to sort levels by (numbers, where they are numbers) and their text."""
    label = labels(column)
    order = numbers(column.to_frame(), column.name) if kind(column) == "numeric" else label
    return order, label


def levels(column: polars.Series) -> tuple[str, ...]:
    """Return the distinct values as text, sorted; numbers by size."""
    import polars as pl

    order, label = order_and_label(column.drop_nulls())
    return tuple(pl.DataFrame({"order": order, "label": label}).unique().sort("order", "label")["label"])


def codes(label: polars.Series, known: Sequence[str]) -> np.ndarray:
    """Return the index of each label among the known ones, -1 for missing and unknown."""
    import polars as pl

    places = label.cast(pl.Enum(list(known)), strict=False).to_physical()
    return places.cast(pl.Int64).fill_null(-1).to_numpy(writable=True)


def place(frame: polars.DataFrame, row: int, source: str, client: str | None = None) -> str:
    """Return where a row is: its line, if the source is a text file with these rows, and its client."""
    found = f"row {row + 1}"
    path = Path(source)
    if delimited.is_delimited(path) and path.is_file():
        lines = delimited.lines(path)
        if len(lines) == frame.height:
            found = f"line {lines[row]}"
    return found if client is None else f"{found} (client {labels(frame[client])[row]!r})"


def some(names: Iterable[str], most: int = 5) -> str:
    """Return "'a', 'b' and 7 more" for a list of names."""
    listed = list(names)
    text = ", ".join(repr(name) for name in listed[:most])
    return text if len(listed) <= most else f"{text} and {len(listed) - most} more"

"""Find out whether a target is a quantity or has classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coterie._core.errors import DataError, SettingError, nearest
from coterie.data import column_formats
from coterie.data import column_types as columns

if TYPE_CHECKING:
    import polars

MOST_LEVELS = 1000
SCALE = 5  # whole numbers with so many values may well be a scale


def find_task(
    frame: polars.DataFrame, client: str, target: str, task: str | None, source: str
) -> tuple[str, tuple[str, ...], list[str], str]:
    """Return the task, the names of the classes unless it is regression, hints, and how a quantity is written.

    Parameters
    ----------
    frame
        A table from `tables.read`.
    client
        Name of the client column.
    target
        Name of the target column.
    task
        What the user said it is, or None.
    source
        Where the table is from, for error messages.

    Returns
    -------
    tuple
        "regression", "binary" or "multiclass"; class names; hints; a format of `column_formats` or "".
    """
    import polars as pl

    if task == "survival":
        raise SettingError("survival needs the column that says whether the event happened: --event COLUMN")
    known = ("regression", "classification", "binary", "multiclass")
    if task is not None and task not in known:
        raise SettingError(f"Unknown task {task!r}.{nearest(task, known)}")
    column = frame[target]
    distinct = column.n_unique()
    if distinct == 1:
        raise DataError(
            f"{source}: target column {target!r} has one value only ({columns.labels(column)[0]!r}), "
            "so there is nothing to learn. Name another target."
        )
    formats = written_in(column)
    format, values = (formats[0], read_as(column, formats[0])) if formats else ("", column)
    if columns.kind(column) == "numeric" or task == "regression":
        columns.numbers(frame, target, source, client, format)
    if (task or _natural_task(values)) == "regression":
        bounds = column_formats.bounds(column) if format else 0
        limits = f", {bounds} of them bounds such as <0.3, which is read as 0.3" if bounds else ""
        hints = (
            [f"Target column {target!r} is read as a quantity, written as {format}{limits}."]
            if format
            else []
        )
        return "regression", (), hints, format
    if distinct > MOST_LEVELS or (column.dtype.is_float() and distinct > 50):
        raise DataError(
            f"{source}: target column {target!r} has {distinct} different values, too many for classes. "
            "Use --task regression for a quantity, or name another target."
        )
    found = "binary" if distinct == 2 else "multiclass"
    if task not in (None, "classification", found):
        raise DataError(f"{source}: target column {target!r} has {distinct} classes, so the task is {found}.")
    hints = []
    if (
        task is None
        and distinct >= SCALE
        and columns.kind(values) == "numeric"
        and column.dtype != pl.Boolean
    ):
        hints.append(
            f"Target column {target!r} holds {distinct} whole numbers, which are taken for classes without an order. "
            "If they are a quantity, say so: --task regression"
        )
    if task is None and distinct >= SCALE and columns.kind(values) == "category":
        hints += _mostly_numbers(column)
    return found, columns.levels(column), hints, ""


def written_in(target: polars.Series) -> list[str]:
    """Return the formats in which a target of text may be written, if it is a quantity."""
    return column_formats.read_all(target) if columns.kind(target) == "category" else []


def read_as(target: polars.Series, format: str) -> polars.Series:
    """Return the numbers that a target of text says in a format, as integers where all are whole."""
    import polars as pl

    values = column_formats.parse(target, format)
    whole = values.cast(pl.Int64, strict=False)  # null beyond 64 bits
    return whole if not whole.null_count() and bool((whole == values).all()) else values


def _mostly_numbers(target: polars.Series) -> list[str]:
    """Say which values make a target classes, where most are numbers."""
    found = column_formats.choose(column_formats.count(target), len(target), 0.5)
    if found is None:
        return []
    wrong = target.filter(column_formats.parse(target, found[0]).is_null())
    return [
        f"Target column {target.name!r} has {target.n_unique()} classes, because {len(wrong)} values are not "
        f"written as the others ({found[0]}): {columns.some(wrong.unique().sort())}. If it is a quantity, correct them."
    ]


def _natural_task(target: polars.Series) -> str:
    """Return the task a target suggests: text, two values or few whole numbers are classes."""
    import polars as pl

    distinct = target.n_unique()
    if columns.kind(target) == "category" or target.dtype == pl.Boolean or distinct == 2:
        return "classification"
    whole = target.dtype.is_integer() or (
        target.dtype == pl.String and target.cast(pl.Int64, strict=False).null_count() == 0
    )
    return "classification" if whole and distinct <= 20 else "regression"

"""Find out whether a target is a quantity or has classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coterie._core.errors import DataError, SettingError, nearest
from coterie.data import column_types as columns

if TYPE_CHECKING:
    import polars

MOST_LEVELS = 1000
SCALE = 5  # whole numbers with so many values may well be a scale


def find_task(
    frame: polars.DataFrame, client: str, target: str, task: str | None, source: str
) -> tuple[str, tuple[str, ...], list[str]]:
    """Return the task, the names of the classes unless it is regression, and hints.

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
        "regression", "binary" or "multiclass"; class names; hints.
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
    if columns.kind(column) == "numeric" or task == "regression":
        columns.numbers(frame, target, source, client)
    if (task or _natural_task(column)) == "regression":
        return "regression", (), []
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
        and columns.kind(column) == "numeric"
        and column.dtype != pl.Boolean
    ):
        hints.append(
            f"Target column {target!r} holds {distinct} whole numbers, which are taken for classes without an order. "
            "If they are a quantity, say so: --task regression"
        )
    return found, columns.levels(column), hints


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

"""Survival times of a table: a column with times and one that says whether the event happened then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from coterie._core.errors import DataError, SettingError
from coterie.data import column_types as columns

if TYPE_CHECKING:
    import polars

TASK = "survival"
HAPPENED = {"1", "yes", "true", "y", "t"}
CENSORED = {"0", "no", "false", "n", "f"}


def check_times(
    frame: polars.DataFrame, client: str, target: str, event: str, task: str | None, source: str
) -> list[str]:
    """Check times and events, and return hints.

    Parameters
    ----------
    frame
        A table from `tables.read`.
    client, target, event
        Names of the columns with the client, the time and whether the event happened.
    task
        What the user said the task is, or None.
    source
        Where the table is from, for error messages.

    Returns
    -------
    list of str
        What the reader of a report should know.

    Raises
    ------
    DataError
        If a time is not above 0, an event is neither yes nor no, or nothing ever happened.
    """
    if task not in (None, TASK):
        raise SettingError(f"a table with --event is about survival, not {task}; leave out one of them")
    happened = signed_times(frame, target, event, source, client) > 0
    if not happened.any():
        raise DataError(
            f"{source}: event column {event!r}: the event never happened, so there is nothing to learn. Name another."
        )
    label = columns.labels(frame[client])
    without = [
        name for name in label.unique(maintain_order=True) if not happened[(label == name).to_numpy()].any()
    ]
    if not without:
        return []
    return [
        f"{len(without)} client(s) without any event: {columns.some(without)}. They have nothing to learn from by "
        "themselves and no say in the shared model."
    ]


def signed_times(
    frame: polars.DataFrame, target: str, event: str, source: str = "the table", client: str | None = None
) -> np.ndarray:
    """Return +t for an event at t and -t for a row that was last seen at t without one, [rows].

    Parameters
    ----------
    frame
        A table from `tables.read`.
    target, event
        Names of the columns with the time and whether the event happened.
    source
        Where the table is from, for error messages.
    client
        Name of the client column, if there is one, so that errors can name the client.

    Returns
    -------
    numpy.ndarray
        float64.

    Raises
    ------
    DataError
        If a time is not above 0, or an event is neither yes nor no.

    Examples
    --------
    >>> import polars
    >>> frame = polars.DataFrame({"days": [3, 8], "died": ["yes", "no"]})
    >>> signed_times(frame, "days", "died").tolist()
    [3.0, -8.0]
    """
    import polars as pl

    if frame[target].dtype in (pl.Date, pl.Datetime):
        raise DataError(
            f"{source}: target column {target!r} holds dates. Give the time from the beginning of the observation to "
            "the event or to its end, such as a number of days."
        )
    time = columns.numbers(frame, target, source, client).cast(float).fill_null(np.nan).to_numpy()
    _require(frame, time > 0, target, "is no time above 0", source, client)
    word = columns.labels(frame[event]).str.to_lowercase()
    happened = word.is_in(list(HAPPENED)).fill_null(False).to_numpy()
    known = happened | word.is_in(list(CENSORED)).fill_null(False).to_numpy()
    _require(frame, known, event, "is neither 1, yes, true nor 0, no, false", source, client)
    return np.where(happened, time, -time)


def _require(
    frame: polars.DataFrame, good: np.ndarray, name: str, what: str, source: str, client: str | None
) -> None:
    if good.all():
        return
    row = int((~good).argmax())
    value = columns.labels(frame[name])[row]
    raise DataError(
        f"{source}: column {name!r}, {columns.place(frame, row, source, client)}: {value!r} {what}. Correct or remove "
        f"it ({int((~good).sum())} such row(s))."
    )

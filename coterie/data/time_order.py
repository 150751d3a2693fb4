"""Rows in the order of time: each client's earliest rows train, later ones validate, the latest test."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie._core.errors import DataError, SettingError, nearest
from coterie.data import column_formats
from coterie.data import column_types as columns
from coterie.data.split import Split, split_parts

if TYPE_CHECKING:
    import polars


def times_of(
    frame: polars.DataFrame, name: str, source: str = "the table", client: str | None = None
) -> Tensor:
    """Return a column of dates, times or numbers as numbers, float64 [rows].

    Parameters
    ----------
    frame
        A table from `tables.read`.
    name
        The column.
    source
        Where the table is from, for error messages.
    client
        Name of the client column, so that errors can name the client.

    Returns
    -------
    Tensor
        Days of dates, numbers as they are.

    Raises
    ------
    DataError
        There is no such column, or a value is missing or no time.

    Examples
    --------
    >>> from coterie.data import tables
    >>> times_of(tables.read({"day": ["2024-01-02", "2024-01-05"]}), "day").diff().tolist()
    [3.0]
    """
    if name not in frame.columns:
        raise DataError(f"{source}: there is no time column {name!r}.{nearest(name, frame.columns)}")
    column = frame[name]
    format = ""
    if columns.kind(column) == "category":
        found = column_formats.choose(column_formats.count(column), column.len() - column.null_count())
        format = found[0] if found and column_formats.is_date(found[0]) else ""
        if not format:
            raise DataError(
                f"{source}: time column {name!r} holds text such as {columns.labels(column).drop_nulls()[0]!r}. Give "
                "dates (2024-01-31) or numbers."
            )
    values = columns.numbers(frame, name, source, client, format)
    missing = values.is_null() | values.is_nan()
    if missing.any():
        where = columns.place(frame, int(missing.arg_max() or 0), source, client)
        raise DataError(
            f"{source}: time column {name!r} has {missing.sum()} value(s) that are missing or no times, the first in "
            f"{where}. Fill them in or remove these rows."
        )
    return torch.tensor(values.to_numpy())


def in_time(
    frame: polars.DataFrame, counts: Sequence[int], name: str, source: str = "the table"
) -> tuple[polars.DataFrame, Tensor]:
    """Sort the rows of each client by time, and return them with their times.

    Parameters
    ----------
    frame
        Rows sorted by client.
    counts
        Number of rows of each client.
    name
        The time column.
    source
        Where the table is from, for error messages.

    Returns
    -------
    tuple
        The rows, and their times [rows].
    """
    times = times_of(frame, name, source)
    order = torch.argsort(times, stable=True)
    owner = torch.repeat_interleave(torch.tensor(counts))
    order = order[torch.argsort(owner[order], stable=True)]
    return frame[order.numpy()], times[order]


def cuts(times: Tensor, shares: Sequence[float]) -> list[int]:
    """Return where ordered rows are cut into parts of about these shares, so that equal times stay together.

    Where that would leave a part without rows, rows of equal time are parted.

    Parameters
    ----------
    times
        Times of a client's rows, ascending, [rows].
    shares
        Shares of the parts, which add up to 1.

    Returns
    -------
    list of int
        Where each part but the first begins.

    Examples
    --------
    >>> cuts(torch.tensor([1.0, 2.0, 3.0, 3.0, 4.0]), (0.6, 0.2, 0.2))
    [2, 4]
    """
    size = len(times)
    wanted = [max(1, round(sum(shares[: k + 1]) * size)) for k in range(len(shares) - 1)]
    changes = (torch.nonzero(times[1:] > times[:-1]).squeeze(-1) + 1).tolist()
    together: list[int] = []
    for cut in wanted:
        first = together[-1] if together else 0
        near = [change for change in changes if change > first]
        together.append(
            min(near, key=lambda change: (abs(change - max(cut, first + 1)), change)) if near else size
        )
    filled = [[b > a for a, b in itertools.pairwise([0, *ends, size])] for ends in (wanted, together)]
    return wanted if any(plain and not whole for plain, whole in zip(*filled, strict=True)) else together


def split_in_time(sizes: Tensor, times: Tensor, fractions: tuple[float, float, float]) -> Split:
    """Split rows of every client that are in the order of time.

    Parameters
    ----------
    sizes
        Number of rows of each client, [n].
    times
        Their times, ascending inside a client, [rows].
    fractions
        Shares of train, validation and test.

    Returns
    -------
    Split
        The earliest rows train, the latest test; every client trains on a row.

    Examples
    --------
    >>> parts = split_in_time(torch.tensor([5]), torch.arange(5.0), (0.6, 0.2, 0.2))
    >>> parts.train.order.tolist(), parts.test.order.tolist()
    ([0, 1, 2], [4])
    """
    part = torch.cat([_numbered(mine, fractions) for mine in times.split(sizes.tolist())])
    return split_parts(part, sizes)


def windows(sizes: Tensor, times: Tensor, count: int) -> list[Tensor]:
    """Return divisions of ordered rows by a rolling origin: test rows are later than all others.

    Each client's rows are cut into count + 2 blocks. Window k trains on the first k + 1 of them, validates on the next
    and tests on the one after; later rows take no part (-1).

    Parameters
    ----------
    sizes, times
        As in `split_in_time`.
    count
        Number of windows.

    Returns
    -------
    list of Tensor
        Where each row is: 0, 1, 2 for train, validation, test, [rows].

    Examples
    --------
    >>> [split.tolist() for split in windows(torch.tensor([4]), torch.arange(4.0), 2)]
    [[0, 1, 2, -1], [0, 0, 1, 2]]
    """
    if count < 1:
        raise SettingError(f"{count} windows; give 1 or more")
    shares = [1 / (count + 2)] * (count + 2)
    block = torch.cat([_numbered(mine, shares) for mine in times.split(sizes.tolist())])
    return [torch.where(block > k + 2, -1, (block - k).clamp_min(0)) for k in range(count)]


def _numbered(times: Tensor, shares: Sequence[float]) -> Tensor:
    """Return the number of the part that each row is in, [rows]."""
    at = torch.zeros(len(times), dtype=torch.long)
    for cut in cuts(times, shares):
        at[cut:] += 1
    return at

"""Cells and tables for the terminal."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from coterie.models.metrics import find

Column = tuple[str, list[str]]


def direction(metric: str) -> str:
    """Return "higher is better" or "lower is better"."""
    return find(metric).direction


@dataclasses.dataclass(frozen=True)
class Decimals:
    """Format numbers with the same number of decimals; very long ones with three significant digits."""

    places: int

    @classmethod
    def for_metric(cls, metric: str, values: Iterable[float]) -> Decimals:
        """Use three decimals for accuracy, else enough for four digits of a typical value."""
        sizes = [abs(value) for value in values if value and math.isfinite(value)]
        if find(metric).percent or not sizes:
            return cls(3)
        return cls(min(max(3 - math.floor(math.log10(statistics.median(sizes))), 0), 8))

    def __call__(self, value: float, sign: str = "") -> str:
        """Write one value, with its sign where `sign` is "+"."""
        if not math.isfinite(value):
            return "not finite"
        text = f"{value:{sign}.{self.places}f}"
        return text if len(text) <= self.places + 8 else f"{value:{sign}.3g}"


def titled(title: str, rows: Sequence[Any], most: int) -> str:
    """Add to a title how many rows are shown, if not all are."""
    return title if len(rows) <= most else f"{title} (first {most} of {len(rows)})"


def number_table(
    title: str, first: Column, columns: Sequence[Column], best: int | None = None, legend: str | None = None
) -> Table:
    """Return a table of one column of names and columns of numbers, which are never truncated."""
    table = Table(title=Text(title) if title else None, caption=legend)
    table.add_column(first[0], overflow="fold", min_width=min(max(map(len, first[1])), 12))
    for header, cells in columns:
        longest = max(map(len, (header, *cells)))
        table.add_column(header, justify="right", no_wrap=True, min_width=longest)
    for k, name in enumerate(first[1]):
        cells = [name, *(cells[k] for _, cells in columns)]
        table.add_row(*map(Text, cells), style="bold" if k == best else None)
    return table


def text_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of text, folded where it is too wide."""
    table = Table(title=Text(title) if title else None)
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table

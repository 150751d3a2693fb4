"""A chart of the report: plotly traces whose colours are names, words for it, and the same as a table."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Trace = dict[str, Any]
Rows = Sequence[Sequence[str]]

COLOURS = 8  # "$c0" ... "$c7" are the colours of runs and clusters, set by the page's theme
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "triangle-down")


@dataclass(frozen=True)
class Panel:
    """One figure. `rows` is what a reader without the picture gets."""

    key: str
    title: str
    caption: str
    data: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    headers: Sequence[str] = ()
    rows: Rows = ()
    height: int = 360

    def json(self) -> dict[str, Any]:
        return {"data": self.data, "layout": self.layout, "height": self.height}


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "automargin": True, **more}


def colour(k: int) -> str:
    return f"$c{k % COLOURS}"


def plain(names: Sequence[str]) -> list[str]:
    """Names as plotly's text shows them unchanged; it reads tags otherwise."""
    return [html.escape(str(name), quote=False) for name in names]


def numbers(values: Sequence[float] | np.ndarray, places: int = 5) -> list[float | None]:
    """For JSON: that many significant digits, null where there is no number."""
    return [float(f"{value:.{places}g}") if np.isfinite(value) else None for value in np.asarray(values)]


def line(k: int, x: Sequence[Any], y: Sequence[Any], name: str, **more: Any) -> Trace:
    """A line told apart by colour, dash and marker."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": list(x),
        "y": list(y),
        "name": html.escape(name, quote=False),
        "line": {"color": colour(k), "dash": DASHES[k % len(DASHES)], "width": 2},
        "marker": {"color": colour(k), "symbol": SYMBOLS[k % len(SYMBOLS)], "size": 6},
        **more,
    }

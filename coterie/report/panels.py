"""One chart of the report: plotly traces with colours by name, a caption, and the numbers as a table."""

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
    """One figure of the report; `headers` and `rows` hold its numbers for readers who cannot see the picture."""

    key: str
    title: str
    caption: str
    data: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    headers: Sequence[str] = ()
    rows: Rows = ()
    height: int = 360

    def json(self) -> dict[str, Any]:
        """Return what the page's script draws."""
        return {"data": self.data, "layout": self.layout, "height": self.height}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return a plotly axis with this title."""
    return {"title": {"text": title}, "automargin": True, **more}


def colour(k: int) -> str:
    """Return the name of the k-th colour of the page's theme."""
    return f"$c{k % COLOURS}"


def plain(names: Sequence[str]) -> list[str]:
    """Escape names so that plotly, which interprets HTML tags, shows them unchanged."""
    return [html.escape(str(name), quote=False) for name in names]


def numbers(values: Sequence[float] | np.ndarray, places: int = 5) -> list[float | None]:
    """Round to this many significant digits for JSON; None for what is not finite."""
    return [float(f"{value:.{places}g}") if np.isfinite(value) else None for value in np.asarray(values)]


def line(k: int, x: Sequence[Any], y: Sequence[Any], name: str, **more: Any) -> Trace:
    """Return the k-th line of a chart, with its own colour, dash and marker."""
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

"""Line plots as web pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.runs import files

SCRIPT = "plotly.min.js"


def line_plot(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float | None]]],
    *,
    title: str = "",
    x: str = "round",
    y: str = "",
    log: bool = False,
) -> Any:
    """A plotly figure with a line for each name; values that a logarithmic axis cannot show are left out."""
    import plotly.graph_objects as graph

    figure = graph.Figure()
    for name, (places, values) in curves.items():
        shown = [None if value is None or (log and value <= 0) else value for value in values]
        figure.add_trace(graph.Scatter(x=list(places), y=shown, mode="lines+markers", name=name))
    figure.update_layout(title=title, template="plotly_white", hovermode="x unified")
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y, type="log" if log else "linear")
    return figure


def save_plot(path: Path, figure: Any) -> None:
    """Write a page and, unless it is there already, plotly's script beside it."""
    from plotly.offline import get_plotlyjs

    script = path.with_name(SCRIPT)
    if not script.exists():
        files.write_text(script, get_plotlyjs())
    files.write_text(path, figure.to_html(include_plotlyjs=SCRIPT))

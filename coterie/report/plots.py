"""Line plots saved as web pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie._core import files

SCRIPT = "plotly.min.js"


def line_plot(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float | None]]],
    *,
    title: str = "",
    x: str = "round",
    y: str = "",
    log: bool = False,
) -> Any:
    """Plot one line per name; a logarithmic axis leaves out values that are not positive.

    Parameters
    ----------
    curves
        Horizontal and vertical values by name; None leaves a gap.
    title, x, y
        Titles of the plot and its axes.
    log
        Whether the vertical axis is logarithmic.

    Returns
    -------
    plotly.graph_objects.Figure

    Examples
    --------
    >>> from coterie.report.plots import line_plot
    >>> figure = line_plot({"ditto": ([1, 2, 3], [0.9, 0.5, 0.4])}, y="loss")
    >>> len(figure.data)
    1
    """
    import plotly.graph_objects as graph

    figure = graph.Figure()
    for name, (places, values) in curves.items():
        shown = [None if value is None or (log and value <= 0) else value for value in values]
        figure.add_trace(graph.Scatter(x=list(places), y=shown, mode="lines+markers", name=name))
    figure.update_layout(title=title, template="plotly_white", hovermode="x unified")
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y, type="log" if log else "linear")
    return figure


def panel_plot(title: str, panels: Sequence[Mapping[str, Any]]) -> Any:
    """Draw plots in two columns with a common legend; a panel has `x`, `y`, `log` and `curves` of `line_plot`."""
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    rows = (len(panels) + 1) // 2
    figure = make_subplots(rows, 2, subplot_titles=[f"{one['y']} against {one['x']}" for one in panels])
    colours = {name: k for k, name in enumerate(dict.fromkeys(n for one in panels for n in one["curves"]))}
    for k, one in enumerate(panels):
        place = {"row": k // 2 + 1, "col": k % 2 + 1}
        for trace in line_plot(one["curves"], log=one["log"]).data:
            colour = qualitative.Dark24[colours[trace.name] % len(qualitative.Dark24)]
            trace.update(mode="lines", line_color=colour, legendgroup=trace.name, showlegend=k == 0)
            figure.add_trace(trace, **place)
        figure.update_xaxes(title=one["x"], **place)
        figure.update_yaxes(title=one["y"], type="log" if one["log"] else "linear", **place)
    figure.update_layout(title=title, template="plotly_white", height=420 * rows)
    return figure


def save_plot(path: Path, figure: Any) -> None:
    """Write the figure as a web page, and plotly's script beside it if it is not there."""
    from plotly.offline import get_plotlyjs

    script = path.with_name(SCRIPT)
    if not script.exists():
        files.write_text(script, get_plotlyjs())
    files.write_text(path, figure.to_html(include_plotlyjs=SCRIPT))

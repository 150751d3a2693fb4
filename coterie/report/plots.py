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
    errors: Mapping[str, Sequence[float | None]] | None = None,
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
    errors
        Standard deviations of the vertical values by name, drawn as bars.

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
        bars = {"type": "data", "array": list(errors[name])} if errors and name in errors else None
        figure.add_trace(
            graph.Scatter(x=list(places), y=shown, error_y=bars, mode="lines+markers", name=name)
        )
    figure.update_layout(title=title, template="plotly_white", hovermode="x unified")
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y, type="log" if log else "linear")
    return figure


def dot_plot(rows: Sequence[tuple[str, float, float, float | None]], *, title: str = "", x: str = "") -> Any:
    """Plot a number for each label with its standard deviation, and a second one beside it where there is one.

    Parameters
    ----------
    rows
        Label, number, standard deviation, and the number to compare with or None.
    title, x
        Titles of the plot and its horizontal axis.

    Returns
    -------
    plotly.graph_objects.Figure

    Examples
    --------
    >>> from coterie.report.plots import dot_plot
    >>> figure = dot_plot([("local", 4.49, 0.08, 4.5), ("ours", 3.43, 0.04, None)], x="distance")
    >>> [trace.name for trace in figure.data]
    ['ours, ± sd over seeds', 'paper']
    """
    import plotly.graph_objects as graph

    labels = [row[0] for row in rows]
    bars = {"type": "data", "array": [row[2] for row in rows]}
    ours = graph.Scatter(
        x=[row[1] for row in rows], y=labels, error_x=bars, mode="markers", name="ours, ± sd over seeds"
    )
    paper = graph.Scatter(
        x=[row[3] for row in rows if row[3] is not None],
        y=[row[0] for row in rows if row[3] is not None],
        mode="markers",
        marker={"symbol": "line-ns-open", "size": 14},
        name="paper",
    )
    figure = graph.Figure([ours, paper] if paper.x else [ours])
    figure.update_layout(title=title, template="plotly_white", height=160 + 22 * len(rows))
    figure.update_xaxes(title=x)
    figure.update_yaxes(title="row of the table", autorange="reversed", automargin=True)
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

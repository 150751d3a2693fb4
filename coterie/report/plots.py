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


Dot = tuple[str, float, float, float | None]


def dot_plot(groups: Mapping[str, Sequence[Dot]], *, title: str = "") -> Any:
    """Plot a number for each label with its standard deviation, and a second one beside it where there is one.

    Parameters
    ----------
    groups
        By what is measured, which names an axis of its own: label, number, standard deviation, and the number to
        compare with or None.
    title
        Title of the plot.

    Returns
    -------
    plotly.graph_objects.Figure

    Examples
    --------
    >>> from coterie.report.plots import dot_plot
    >>> figure = dot_plot({"distance": [("local", 4.49, 0.08, 4.5), ("ours", 3.43, 0.04, None)]})
    >>> [trace.name for trace in figure.data]
    ['ours, ± sd over seeds', 'paper']
    """
    import plotly.graph_objects as graph
    from plotly.subplots import make_subplots

    groups = groups or {"": []}
    many = [len(rows) for rows in groups.values()]
    height = 100 + 22 * sum(many) + 110 * len(many)
    spacing = min(90 / height, 1 / (len(many) + 1))
    figure = make_subplots(len(many), 1, row_heights=[rows + 1 for rows in many], vertical_spacing=spacing)
    for k, (measured, rows) in enumerate(groups.items(), start=1):
        found = {
            "ours, ± sd over seeds": [(label, ours, sd) for label, ours, sd, _ in rows],
            "paper": [(label, paper, 0.0) for label, _, _, paper in rows if paper is not None],
        }
        for name, dots in found.items():
            paper = name == "paper"
            seen = any(trace.name == name for trace in figure.data)
            dot = graph.Scatter(
                x=[dot[1] for dot in dots],
                y=[dot[0] for dot in dots],
                error_x=None if paper else {"type": "data", "array": [dot[2] for dot in dots]},
                mode="markers",
                marker={"symbol": "line-ns-open", "size": 14} if paper else {},
                marker_color="#d62728" if paper else "#1f77b4",
                name=name,
                legendgroup=name,
                showlegend=not seen,
            )
            if dots:
                figure.add_trace(dot, row=k, col=1)
        figure.update_xaxes(title=measured, row=k, col=1)
    figure.update_layout(title=title, template="plotly_white", height=height)
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_yaxes(title="row of the table", row=1, col=1)
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

"""Plot the weights between clients round by round, and how close they come to the known clusters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.report.panels import plain
from coterie.report.plots import save_plot
from coterie.train.history import History

CELLS = 100  # largest matrix drawn cell by cell; larger ones are averaged over blocks
CURVES = {"recovery": "recovery", "inside": "mean weight inside clusters", "between": "mean weight between"}
Curve = tuple[Sequence[float], Sequence[float | None]]


def weights_plot(
    title: str,
    rounds: Sequence[int],
    matrices: Sequence[Sequence[Sequence[float]]],
    names: Sequence[str],
    curves: Mapping[str, Curve],
) -> Any:
    """Draw the matrix of every recorded round with a slider, and curves beside it.

    Parameters
    ----------
    title
        Title of the figure.
    rounds, matrices
        Recorded rounds and the weights [n, n] after each.
    names
        Clients, or groups of clients, in the order of the matrices.
    curves
        Rounds and values by name.

    Returns
    -------
    plotly.graph_objects.Figure
    """
    import plotly.graph_objects as graph
    from plotly.subplots import make_subplots

    figure = make_subplots(
        1, 2, subplot_titles=["client (row) is pulled towards client (column)", "over the rounds"]
    )
    largest = max((value for matrix in matrices for row in matrix for value in row), default=1.0) or 1.0
    for k, matrix in enumerate(matrices):
        heat = graph.Heatmap(
            z=matrix, x=plain(names), y=plain(names), zmin=0, zmax=largest, colorscale="Blues", name="weight"
        )
        heat.update(visible=k == len(matrices) - 1, colorbar={"x": 0.46, "thickness": 12})
        figure.add_trace(heat, 1, 1)
    for name, (places, values) in curves.items():
        figure.add_trace(graph.Scatter(x=list(places), y=list(values), mode="lines+markers", name=name), 1, 2)
    shown = [True] * len(curves)
    steps = [
        {
            "label": str(t),
            "method": "restyle",
            "args": [{"visible": [m == k for m in range(len(rounds))] + shown}],
        }
        for k, t in enumerate(rounds)
    ]
    slider = {"steps": steps, "active": len(steps) - 1, "currentvalue": {"prefix": "round "}, "len": 0.46}
    figure.update_layout(title=title, template="plotly_white", height=560, sliders=[slider])
    square = {"scaleanchor": "x", "constrain": "domain", "autorange": "reversed", "type": "category"}
    figure.update_xaxes(type="category", constrain="domain", row=1, col=1)
    figure.update_yaxes(**square, row=1, col=1)
    figure.update_xaxes(title="round", row=1, col=2)
    figure.update_yaxes(range=[-0.02, 1.02], row=1, col=2)
    return figure


def weights_of(
    history: History, names: Sequence[str], clusters: Tensor | None, title: str = "Weights between clients"
) -> dict[str, Any] | None:
    """Collect the arguments of `weights_plot` from the history of a run.

    Parameters
    ----------
    history
        `run.history` of a method that records weights, such as CoBo.
    names, clusters
        Clients, and their known clusters, by which the matrix is ordered.
    title
        Title of the figure.

    Returns
    -------
    dict or None
        None if the run recorded no weights.
    """
    recorded = [
        (t, value) for t, split, name, value in history.blocks if (split, name) == ("server", "weights")
    ]
    if not recorded:
        return None
    order = torch.arange(len(names)) if clusters is None else clusters.cpu().argsort(stable=True)
    labels = [str(names[k]) for k in order.tolist()]
    if len(order) > CELLS:
        edges = torch.linspace(0, len(order), CELLS + 1).long().tolist()
        labels = [f"{labels[a]} to {labels[b - 1]}" for a, b in itertools.pairwise(edges)]
    last = dict(recorded)
    return {
        "title": title,
        "rounds": list(last),
        "matrices": [_shown(value[order][:, order]) for value in last.values()],
        "names": labels,
        "curves": {
            CURVES[name]: curve for name in CURVES if (curve := history.curve("server", name)) and curve[0]
        },
    }


def save_weights(
    path: Path, history: History, names: Sequence[str], clusters: Tensor | None, title: str
) -> bool:
    """Write the page of `weights_plot` if the run recorded weights; return whether it did."""
    found = weights_of(history, names, clusters, title)
    if found is not None:
        save_plot(path, weights_plot(**found))
    return found is not None


def _shown(matrix: Tensor) -> list[list[float]]:
    """Average to at most CELLS rows and columns, and round to three digits."""
    if len(matrix) > CELLS:
        matrix = torch.nn.functional.adaptive_avg_pool2d(matrix[None, None], CELLS)[0, 0]
    return [[round(value, 3) for value in row] for row in matrix.tolist()]

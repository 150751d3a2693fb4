"""Charts on the quality of predictions: ROC, calibration, thresholds, confusion and errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coterie.report import quality, survival
from coterie.report.gains import interval
from coterie.report.held_out import HeldOut
from coterie.report.numbers import digits, show
from coterie.report.panels import Panel, Trace, axis, line, numbers, plain

POINTS = 1500  # dots of a scatter plot at most


def panels(held: Sequence[HeldOut], threshold: float) -> list[Panel]:
    """Return the charts for the runs, of which the first is the one the page is about."""
    main = held[0]
    if main.task == "regression":
        return [_scatter(main), _errors(held)]
    if main.task == "survival":
        return survival.panels(main)
    if main.task == "multiclass":
        return [_confusion(main), _calibration_panel(held[:1])]
    return [_roc_panel(held, threshold), _calibration_panel(held), _thresholds_panel(main, threshold)]


def _roc_panel(held: Sequence[HeldOut], threshold: float) -> Panel:
    """Draw the ROC curves, with the chosen threshold on the first."""
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [0, 100],
            "y": [0, 100],
            "name": "guessing",
            "line": {"color": "$muted", "dash": "dot", "width": 1},
            "hoverinfo": "skip",
        }
    ]
    rows = []
    for k, one in enumerate(held):
        false, true, _ = quality.roc(one)
        thin = np.unique(np.linspace(0, len(false) - 1, 400).astype(int))
        area, low, high = quality.auc(one.output[:, 1], one.target == 1)
        name = f"{one.run.label}: AUC {show('auc', area)}"
        traces.append(
            {
                **line(k, numbers(100 * false[thin]), numbers(100 * true[thin]), name),
                "mode": "lines",
                "hovertemplate": "%{y:.0f} % found at %{x:.0f} % false alarms<extra></extra>",
            }
        )
        rows.append([one.run.label, show("auc", area), f"{show('auc', low)} to {show('auc', high)}"])
    at = quality.rates(held[0], threshold)
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": numbers([100 * (1 - at["specificity"])]),
            "y": numbers([100 * at["sensitivity"]]),
            "name": f"threshold {threshold:g}",
            "marker": {"color": "$text", "size": 11, "symbol": "star"},
        }
    )
    return Panel(
        "roc",
        "ROC curve: cases found against false alarms",
        f"Every point is a threshold on the probability of {held[0].positive}. The nearer to the upper left corner, "
        "the better; the dotted line is guessing. AUC is the chance that a row of the class gets a higher probability "
        "than one that is not. Rows of all clients together, each scored by its own client's model.",
        traces,
        {
            "xaxis": axis("false alarms (%)", range=[-2, 102]),
            "yaxis": axis("cases found (%)", range=[-2, 102]),
            "hovermode": "closest",
        },
        ("method", "AUC", "95 % interval"),
        rows,
        420,
    )


def _calibration_panel(held: Sequence[HeldOut]) -> Panel:
    """Draw the share of right predictions against the predicted probability."""
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [0, 100],
            "y": [0, 100],
            "name": "perfectly calibrated",
            "line": {"color": "$muted", "dash": "dot", "width": 1},
            "hoverinfo": "skip",
        }
    ]
    rows = []
    for k, one in enumerate(held):
        chance, hit, size = quality.calibration(one)
        low, high = interval("accuracy", hit, size)
        traces.append(
            {
                **line(k, numbers(100 * chance), numbers(100 * hit), one.run.label),
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": numbers(100 * (high - hit)),
                    "arrayminus": numbers(100 * (hit - low)),
                    "thickness": 1,
                    "width": 3,
                },
                "hovertemplate": "predicted %{x:.0f} %, happened %{y:.0f} %<extra></extra>",
            }
        )
        if k == 0:
            ends = zip(chance, hit, low, high, size, strict=True)
            rows = [
                [f"{100 * a:.1f} %", f"{100 * b:.1f} %", f"{100 * c:.1f} % to {100 * d:.1f} %", f"{n:.0f}"]
                for a, b, c, d, n in ends
            ]
    what = f"{held[0].positive}" if held[0].task == "binary" else "the most likely class"
    return Panel(
        "calibration",
        "Calibration: can the probabilities be trusted?",
        f"Rows in groups by their predicted probability of {what}, and how often it really was so. On the dotted line "
        "a predicted 30 % happens in 30 % of the rows. Whiskers are 95 % intervals.",
        traces,
        {
            "xaxis": axis("predicted probability (%)", range=[-2, 102]),
            "yaxis": axis("how often it was so (%)", range=[-2, 102]),
            "hovermode": "closest",
        },
        ("mean predicted", "happened", "95 % interval", "rows"),
        rows,
        420,
    )


def _thresholds_panel(held: HeldOut, threshold: float) -> Panel:
    """Draw sensitivity and specificity against the threshold."""
    grid = sorted({*np.round(np.arange(0.05, 1, 0.05), 2).tolist(), threshold})
    found = [quality.rates(held, at) for at in grid]
    traces: list[Trace] = []
    for k, (name, what) in enumerate(
        (("sensitivity", "sensitivity: cases found"), ("specificity", "specificity: others left alone"))
    ):
        shares = numbers([100 * one[name] for one in found])
        traces.append({**line(k, grid, shares, what), "hovertemplate": "%{x}: %{y:.0f} %<extra></extra>"})
    shape = {"type": "line", "x0": threshold, "x1": threshold, "yref": "paper", "y0": 0, "y1": 1}
    layout = {
        "xaxis": axis("threshold on the probability", range=[0, 1]),
        "yaxis": axis("share of rows (%)", range=[-2, 102]),
        "hovermode": "x unified",
        "shapes": [shape | {"line": {"color": "$text", "width": 1, "dash": "dash"}}],
    }
    keys = ("sensitivity", "specificity", "ppv", "npv", "called")
    rows = [
        [
            f"{at:g}{' (chosen)' if at == threshold else ''}",
            *("–" if math.isnan(one[key]) else f"{100 * one[key]:.1f} %" for key in keys),
        ]
        for at, one in zip(grid, found, strict=True)
    ]
    return Panel(
        "thresholds",
        "Where to draw the line",
        f"A row is called {held.positive} if its probability is at least the threshold. A lower threshold finds more "
        f"cases and raises more false alarms. The dashed line is the chosen threshold, {threshold:g}; another one is "
        "chosen with --threshold.",
        traces,
        layout,
        ("threshold", "sensitivity", "specificity", "right when called", "right when not called", "called"),
        rows,
        400,
    )


def _confusion(held: HeldOut) -> Panel:
    """Draw how often rows of each class are taken for each."""
    size = len(held.classes)
    table = np.zeros((size, size))
    np.add.at(table, (held.target, held.output.argmax(1)), 1)
    shares = 100 * table / np.maximum(table.sum(1, keepdims=True), 1)
    labels = plain(held.classes)
    trace = {
        "type": "heatmap",
        "z": [numbers(row) for row in shares],
        "x": labels,
        "y": labels,
        "colorscale": "$sequence",
        "zmin": 0,
        "zmax": 100,
        "colorbar": {"title": {"text": "%"}},
        "hovertemplate": "%{y} taken for %{x}: %{z:.1f} %<extra></extra>",
    }
    recall = np.diag(table) / np.maximum(table.sum(1), 1)
    precision = np.diag(table) / np.maximum(table.sum(0), 1)
    return Panel(
        "confusion",
        "Which classes are taken for which",
        "Every line adds up to 100 %: of the rows that really are of this class, how many are taken for each class.",
        [trace],
        {
            "xaxis": axis("taken for", type="category"),
            "yaxis": axis("really", type="category", autorange="reversed"),
        },
        ("class", "rows", "found (recall)", "right when named (precision)"),
        [
            [name, f"{table[k].sum():,.0f}", f"{100 * recall[k]:.1f} %", f"{100 * precision[k]:.1f} %"]
            for k, name in enumerate(held.classes)
        ],
        min(640, 220 + 34 * size),
    )


def _scatter(held: HeldOut) -> Panel:
    """Draw predictions against what really was."""
    at = np.unique(np.linspace(0, len(held) - 1, POINTS).astype(int))
    ends = numbers([min(held.target.min(), held.output.min()), max(held.target.max(), held.output.max())])
    _, overall = quality.half_widths(held)
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": ends,
            "y": ends,
            "name": "exactly right",
            "line": {"color": "$muted", "dash": "dot", "width": 1},
            "hoverinfo": "skip",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "x": numbers(held.output[at]),
            "y": numbers(held.target[at]),
            "name": held.run.label,
            "text": plain([held.run.names[k] for k in held.client[at]]),
            "marker": {"color": "$c0", "size": 5, "opacity": 0.5},
            "hovertemplate": "%{text}: predicted %{x:.4g}, was %{y:.4g}<extra></extra>",
        },
    ]
    return Panel(
        "scatter",
        "Predicted and real",
        f"Every dot is a held-out row. {100 * quality.LEVEL:.0f} % of new rows are within {digits(overall)} of "
        "their prediction (split conformal prediction over these rows).",
        traces,
        {"xaxis": axis("predicted"), "yaxis": axis("really"), "hovermode": "closest"},
        ("rows", f"{100 * quality.LEVEL:.0f} % prediction interval"),
        [[f"{len(held):,}", f"prediction ± {digits(overall)}"]],
        420,
    )


def _errors(held: Sequence[HeldOut]) -> Panel:
    """Draw how large the errors are."""
    traces, rows = [], []
    for k, one in enumerate(held):
        size = np.sort(np.abs(one.error))
        share = 100 * (np.arange(len(size)) + 1) / len(size)
        thin = np.unique(np.linspace(0, len(size) - 1, 300).astype(int))
        traces.append({**line(k, numbers(size[thin]), numbers(share[thin]), one.run.label), "mode": "lines"})
        rows.append([one.run.label, *(digits(float(v)) for v in np.quantile(size, [0.5, 0.75, 0.9, 0.99]))])
    return Panel(
        "errors",
        "How far off predictions are",
        "The share of held-out rows whose prediction is off by at most this much; the higher the curve, the better.",
        traces,
        {
            "xaxis": axis("off by at most (units of the target)"),
            "yaxis": axis("share of rows (%)", range=[0, 102]),
        },
        ("method", "half of the rows within", "three quarters within", "nine tenths within", "99 % within"),
        rows,
        420,
    )

"""How good the predictions are: ROC, calibration, thresholds, confusion, errors and prediction intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coterie.models.metrics import find
from coterie.report.gains import interval
from coterie.report.held_out import HeldOut
from coterie.report.numbers import count, digits, show
from coterie.report.panels import Panel, Trace, axis, line, numbers, plain

LEVEL = 0.9  # share of new rows that a prediction interval holds
POINTS = 1500  # dots of a scatter plot at most
Z = 1.959964


def roc(held: HeldOut) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return false and true positive rates from the strictest threshold to the mildest, and these thresholds.

    A row is called positive if its probability is at least the threshold.

    Parameters
    ----------
    held
        Rows of a task with two classes.

    Returns
    -------
    tuple of ndarray
        False positive rate, true positive rate and threshold, from (0, 0, inf) to (1, 1, lowest probability).
    """
    chance, positive = held.output[:, 1], held.target == 1
    order = np.argsort(-chance, kind="stable")
    last = np.append(np.diff(chance[order]) != 0, True)
    true = np.cumsum(positive[order])[last]
    false = np.cumsum(~positive[order])[last]
    rates = [np.r_[0, part] / max(1, part[-1]) for part in (false, true)]
    return rates[0], rates[1], np.r_[np.inf, chance[order][last]]


def auc(chance: np.ndarray, positive: np.ndarray) -> tuple[float, float, float]:
    """Return the area under the ROC curve with its 95 % interval by DeLong's variance on the logit scale.

    Parameters
    ----------
    chance
        Probability of the positive class, [N].
    positive
        Whether the row is of that class, bool [N].

    Returns
    -------
    tuple of float
        The area and the ends of the interval; NaN where one class is missing.

    Examples
    --------
    >>> import numpy as np
    >>> auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))[0]
    0.75
    """
    from scipy.stats import rankdata

    m, n = int(positive.sum()), int((~positive).sum())
    if not m or not n:
        return math.nan, math.nan, math.nan
    joint, own = rankdata(chance), np.empty(len(chance))
    own[positive], own[~positive] = rankdata(chance[positive]), rankdata(chance[~positive])
    above = (joint - own)[positive] / n
    below = 1 - (joint - own)[~positive] / m
    area = float(above.mean())
    if min(m, n) < 2:
        return area, math.nan, math.nan
    spread = math.sqrt(above.var(ddof=1) / m + below.var(ddof=1) / n)
    if area in (0.0, 1.0):
        return area, math.nan, math.nan
    logit, half = math.log(area / (1 - area)), Z * spread / (area * (1 - area))
    return area, 1 / (1 + math.exp(half - logit)), 1 / (1 + math.exp(-half - logit))


def rates(held: HeldOut, threshold: float, rows: np.ndarray | slice = slice(None)) -> dict[str, float]:
    """Return sensitivity, specificity, predictive values and the share called positive at a threshold.

    Parameters
    ----------
    held
        Rows of a task with two classes.
    threshold
        Rows with at least this probability are called positive.
    rows
        Positions to look at, all by default.

    Returns
    -------
    dict of str to float
        Shares from 0 to 1, NaN where nothing can be said; "positives" and "negatives" are counts of rows.
    """
    called, positive = held.output[rows, 1] >= threshold, held.target[rows] == 1

    def share(part: np.ndarray, of: np.ndarray) -> float:
        return float(part[of].mean()) if of.any() else math.nan

    return {
        "sensitivity": share(called, positive),
        "specificity": share(~called, ~positive),
        "ppv": share(positive, called),
        "npv": share(~positive, ~called),
        "called": float(called.mean()) if len(called) else math.nan,
        "positives": float(positive.sum()),
        "negatives": float((~positive).sum()),
    }


def calibration(held: HeldOut) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean probability, share of right ones and number of rows in groups of about equal size.

    For two classes the probability is that of the positive one; for more, that of the most likely class.
    """
    chance = held.output[:, 1] if held.task == "binary" else held.output.max(1)
    hit = held.target == 1 if held.task == "binary" else held.right
    bins = int(np.clip(len(chance) // 20, 2, 10))
    parts = np.array_split(np.argsort(chance, kind="stable"), bins)
    means = np.array([[chance[part].mean(), hit[part].mean(), len(part)] for part in parts])
    return means[:, 0], means[:, 1], means[:, 2]


def half_widths(held: HeldOut, level: float = LEVEL) -> tuple[dict[str, float], float]:
    """Return by how much a new prediction may be off: split conformal prediction with the held-out rows.

    The k-th smallest absolute error with k = ceil((n + 1) level), so that a new row of the client is inside with at
    least this probability. A client with fewer than 1/(1 - level) rows gets the one over the rows of all clients.

    Parameters
    ----------
    held
        Rows of a regression that took no part in training.
    level
        Share of new rows inside.

    Returns
    -------
    tuple
        The half width by client, and over all rows.
    """

    def width(errors: np.ndarray) -> float:
        k = math.ceil((len(errors) + 1) * level)
        return float(np.sort(errors)[k - 1]) if k <= len(errors) else math.inf

    error = np.abs(held.error)
    overall, enough = width(error), math.ceil(1 / (1 - level) - 1e-9)
    own = {name: width(error[rows]) for name, rows in held.by_client() if len(rows) >= enough}
    return {name: own.get(name, overall) for name in held.run.names}, overall


def panels(held: Sequence[HeldOut], threshold: float) -> list[Panel]:
    """Return the charts for the runs, of which the first is the one the page is about."""
    main = held[0]
    if main.task == "regression":
        return [_scatter(main), _errors(held)]
    if main.task == "multiclass":
        return [_confusion(main), _calibration_panel(held[:1])]
    return [_roc_panel(held, threshold), _calibration_panel(held), _thresholds_panel(main, threshold)]


def summary_table(held: Sequence[HeldOut]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows: every metric over all held-out rows, a column per run."""
    rows = [
        [_capital(find(name).title), find(name).direction, *(_cell(one, name) for one in held)]
        for name in held[0].metrics()
    ]
    return ["", "", *(one.run.label for one in held)], rows


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cell(held: HeldOut, name: str) -> str:
    if name == "auc" and held.task == "binary":
        area, low, high = auc(held.output[:, 1], held.target == 1)
        return (
            show(name, area)
            if math.isnan(low)
            else f"{show(name, area)} ({show(name, low)} to {show(name, high)})"
        )
    if name == "accuracy":
        rows = np.array([float(len(held))])
        low, high = interval(name, np.array([held.right.mean()]), rows)
        return f"{show(name, float(held.right.mean()))} ({show(name, low[0])} to {show(name, high[0])})"
    return show(name, held.value(name))


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
        false, true, _ = roc(one)
        thin = np.unique(np.linspace(0, len(false) - 1, 400).astype(int))
        area, low, high = auc(one.output[:, 1], one.target == 1)
        name = f"{one.run.label}: AUC {show('auc', area)}"
        traces.append(
            {
                **line(k, numbers(100 * false[thin]), numbers(100 * true[thin]), name),
                "mode": "lines",
                "hovertemplate": "%{y:.0f} % found at %{x:.0f} % false alarms<extra></extra>",
            }
        )
        rows.append([one.run.label, show("auc", area), f"{show('auc', low)} to {show('auc', high)}"])
    at = rates(held[0], threshold)
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
        chance, hit, size = calibration(one)
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
    found = [rates(held, at) for at in grid]
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
    _, overall = half_widths(held)
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
        f"Every dot is a held-out row. {100 * LEVEL:.0f} % of new rows are expected within {digits(overall)} of their "
        "prediction (split conformal prediction over these rows).",
        traces,
        {"xaxis": axis("predicted"), "yaxis": axis("really"), "hovermode": "closest"},
        ("rows", f"{100 * LEVEL:.0f} % prediction interval"),
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


def threshold_sentence(held: HeldOut, threshold: float) -> str:
    """Say what the chosen threshold does, with the counts it rests on."""
    at = rates(held, threshold)

    def share(name: str, rows: str) -> str:
        low, high = interval("accuracy", np.array([at[name]]), np.array([at[rows]]))
        return f"{100 * at[name]:.0f} % (95 % interval {100 * low[0]:.0f} to {100 * high[0]:.0f} %)"

    if not at["positives"] or not at["negatives"]:
        return "The held-out rows hold one class only, so nothing can be said about the other."
    return (
        f"At a threshold of {threshold:g} on the probability of {held.positive}, the models find "
        f"{share('sensitivity', 'positives')} of {count(int(at['positives']), 'case')} (sensitivity) and leave "
        f"{share('specificity', 'negatives')} of {count(int(at['negatives']), 'other row')} alone (specificity)."
    )

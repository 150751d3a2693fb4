"""Is everybody served alike? Quality by client and by subgroup."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coterie.report.gains import interval
from coterie.report.held_out import HeldOut
from coterie.report.numbers import digits, show
from coterie.report.panels import Panel, axis, numbers, plain
from coterie.report.quality import auc, rates
from coterie.report.survival import concordance

METRICS = {"regression": "rmse", "survival": "concordance"}  # what groups are compared by, else by accuracy
SHOWN = 40  # groups in the chart at most
LISTED = 500  # groups in the table at most

Part = tuple[str, np.ndarray]


@dataclass(frozen=True)
class Served:
    """How one group of rows is served.

    Attributes
    ----------
    name : str
        The group.
    rows : int
        Its held-out rows.
    value, low, high : float
        Accuracy or RMSE with its 95 % interval.
    cells : list of str
        Further numbers, formatted.
    """

    name: str
    rows: int
    value: float
    low: float
    high: float
    cells: list[str]


def headers(held: HeldOut, what: str) -> list[str]:
    """Return the titles of the columns that `served` fills."""
    first = [what, "rows"]
    if held.task == "regression":
        return [*first, "typical error (RMSE)", "95 % interval", "mean error", "R²"]
    if held.task == "survival":
        return [*first, "concordance", "95 % interval", "events"]
    if held.task == "multiclass":
        return [*first, "right answers", "95 % interval", "mean probability of the right class"]
    share = [f"really {held.positive}", f"mean predicted {held.positive}"]
    return [*first, "right answers", "95 % interval", "AUC", "sensitivity", "specificity", *share]


def served(held: HeldOut, name: str, rows: np.ndarray, threshold: float) -> Served:
    """Return how some of the rows are served."""
    metric = METRICS.get(held.task, "accuracy")
    if held.task == "binary":
        value = float(((held.output[rows, 1] >= threshold) == (held.target[rows] == 1)).mean())
    else:
        value = held.value(metric, rows)
    if held.task == "survival":
        return Served(name, len(rows), *concordance(held, rows), [f"{int((held.target[rows] > 0).sum()):,}"])
    low, high = (float(end[0]) for end in interval(metric, np.array([value]), np.array([float(len(rows))])))
    if held.task == "regression":
        cells = [digits(float(held.error[rows].mean())), show("r2", held.value("r2", rows))]
    elif held.task == "multiclass":
        cells = [f"{100 * held.output[rows, held.target[rows]].mean():.1f} %"]
    else:
        positive = held.target[rows] == 1
        at, area = rates(held, threshold, rows), auc(held.output[rows, 1], positive)[0]
        shares = [at["sensitivity"], at["specificity"], positive.mean(), held.output[rows, 1].mean()]
        cells = [
            "–" if math.isnan(area) else show("auc", area),
            *("–" if math.isnan(share) else f"{100 * share:.0f} %" for share in shares),
        ]
    return Served(name, len(rows), value, low, high, cells)


def table(held: HeldOut, parts: Sequence[Part], threshold: float) -> list[list[str]]:
    """Return a row of text per group."""
    metric = METRICS.get(held.task, "accuracy")
    found = (served(held, name, rows, threshold) for name, rows in parts[:LISTED])
    return [
        [
            one.name,
            f"{one.rows:,}",
            show(metric, one.value),
            f"{show(metric, one.low)} to {show(metric, one.high)}",
            *one.cells,
        ]
        for one in found
    ]


def chance(held: HeldOut, parts: Sequence[Part], threshold: float) -> float:
    """Return how probable differences between groups as large as these are if all were served alike.

    A chi-square test of the counts of right rows, or the test of Kruskal and Wallis of absolute errors. NaN for one
    group, and for survival data.
    """
    if len(parts) < 2 or held.task == "survival":
        return math.nan
    if held.task == "regression":
        from scipy.stats import kruskal  # takes a second to load

        groups = [np.abs(held.error[rows]) for _, rows in parts]
        return float(kruskal(*groups).pvalue) if len(set(np.concatenate(groups).tolist())) > 1 else math.nan
    right = held.right
    if held.task == "binary":
        right = (held.output[:, 1] >= threshold) == (held.target == 1)
    counts = np.array([[right[rows].sum(), (~right[rows]).sum()] for _, rows in parts])
    if (counts.sum(0) == 0).any():
        return math.nan
    return _same_share(counts)


def _same_share(counts: np.ndarray) -> float:
    """Return the p-value of Pearson's test that groups, the rows of counts [groups, 2], have one share.

    Two groups have the correction of Yates, as in `scipy.stats.chi2_contingency`, which takes a second to load.
    """
    from scipy.special import chdtrc

    expected = counts.sum(1, keepdims=True) * counts.sum(0) / counts.sum()
    apart = np.abs(counts - expected)
    if len(counts) == 2:
        apart = np.maximum(apart - 0.5, 0.0)
    return float(chdtrc(len(counts) - 1, (apart**2 / expected).sum()))


def sentence(held: HeldOut, what: str, parts: Sequence[Part], threshold: float) -> str:
    """Say who is served best and worst, and whether chance alone explains it."""
    metric = METRICS.get(held.task, "accuracy")
    found = [
        one for one in (served(held, name, rows, threshold) for name, rows in parts) if one.value == one.value
    ]
    if len(found) < 2:
        return f"There is one {what} only, so there is nothing to compare."
    ordered = sorted(found, key=lambda one: one.value, reverse=metric != "rmse")
    best, worst = ordered[0], ordered[-1]
    p = chance(held, parts, threshold)
    if math.isnan(p):
        sure = ""
    elif p < 0.05:
        sure = f" Differences this large are hardly chance (p = {max(p, 0.0001):.2g})."
    else:
        sure = f" Chance alone may explain differences of this size (p = {p:.2g})."
    return (
        f"By {what}, {best.name} is served best ({show(metric, best.value)}, {best.rows:,} rows) and {worst.name} "
        f"worst ({show(metric, worst.value)}, {worst.rows:,} rows).{sure}"
    )


def panel(held: HeldOut, key: str, what: str, parts: Sequence[Part], threshold: float) -> Panel:
    """Draw the quality of every group with its interval, from worst to best."""
    metric = METRICS.get(held.task, "accuracy")
    scale = 100.0 if metric == "accuracy" else 1.0
    found = [served(held, name, rows, threshold) for name, rows in parts]
    found.sort(key=lambda one: one.value, reverse=metric == "rmse")
    note = ""
    if len(found) > SHOWN:
        note = f" The {SHOWN} served worst of {len(found):,} are shown."
        found = found[:SHOWN]
    value, low, high = (
        scale * np.array([getattr(one, name) for one in found]) for name in ("value", "low", "high")
    )
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": numbers(value),
        "y": plain([one.name for one in found]),
        "marker": {"color": "$c0", "size": 9},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": numbers(high - value),
            "arrayminus": numbers(value - low),
            "color": "$c0",
            "thickness": 1.5,
        },
        "hovertemplate": "%{y}: %{x:.4g}<extra></extra>",
    }
    title = {"rmse": "typical error (RMSE)", "concordance": "concordance"}.get(metric, "right answers (%)")
    return Panel(
        key,
        f"Quality by {what}",
        f"Every mark is one {what} with its 95 % interval; with few rows it is wide.{note}",
        [trace],
        {
            "xaxis": axis(title),
            "yaxis": axis("", type="category", autorange="reversed"),
            "showlegend": False,
        },
        headers(held, what),
        table(held, parts, threshold),
        140 + 26 * len(found),
    )

"""How good the predictions are: ROC, calibration, thresholds, confusion, errors and prediction intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coterie.models.metrics import find
from coterie.report.gains import interval
from coterie.report.held_out import HeldOut
from coterie.report.numbers import count, show
from coterie.report.survival import concordance

LEVEL = 0.9  # share of new rows that a prediction interval holds
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


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1, ties with their mean; loading scipy.stats for it would take a second."""
    _, at, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(count) - (count - 1) / 2)[at]
    return ranks


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
    m, n = int(positive.sum()), int((~positive).sum())
    if not m or not n:
        return math.nan, math.nan, math.nan
    joint, own = _ranks(chance), np.empty(len(chance))
    own[positive], own[~positive] = _ranks(chance[positive]), _ranks(chance[~positive])
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


def summary_table(held: Sequence[HeldOut]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows: every metric over all held-out rows, a column per run."""
    rows = [
        [_capital(find(name).title), find(name).direction, *(_cell(one, name) for one in held)]
        for name in held[0].metrics()
    ]
    return ["measure", "direction", *(one.run.label for one in held)], rows


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
    if name == "concordance":
        value, low, high = concordance(held, np.arange(len(held)))
        return (
            show(name, value)
            if math.isnan(low)
            else f"{show(name, value)} ({show(name, low)} to {show(name, high)})"
        )
    if name == "accuracy":
        share = np.array([held.right.mean()])
        ends = [show(name, float(end[0])) for end in interval(name, share, np.array([float(len(held))]))]
        return f"{show(name, float(share[0]))} ({' to '.join(ends)})"
    return show(name, held.value(name))


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

"""Gain of every client over training alone, with confidence intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from coterie.models.metrics import Metric, find
from coterie.report.facts import RunFacts
from coterie.select.verdict import Verdict, row_metric

BETTER, WORSE, UP, DOWN, SAME, UNKNOWN = "better", "worse", "up", "down", "same", "unknown"
VERDICTS = {
    BETTER: "better than alone",
    WORSE: "worse than alone",
    UP: "up, may be chance",
    DOWN: "down, may be chance",
    SAME: "no difference",
    UNKNOWN: "not known",
}


@dataclass(frozen=True)
class Scores:
    """Metric of every client with its 95 % interval, and its gain over training alone [n].

    Gains are positive if the client is better off, whatever the metric. Where single rows are known they are the
    shrunken ones of the verdict, with 95 % intervals; else plain differences. NaN means unknown.
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    gain: np.ndarray
    gain_low: np.ndarray
    gain_high: np.ndarray
    verdict: Verdict | None = None

    @property
    def verdicts(self) -> list[str]:
        """Verdict on every client, one of the keys of `VERDICTS`."""
        called = np.zeros(len(self.gain)) if self.verdict is None else self.verdict.called
        return [verdict(gain, said) for gain, said in zip(self.gain, called, strict=True)]


def verdict(gain: float, called: int) -> str:
    """Return the verdict on a client, a key of `VERDICTS`, from its gain and the sign that may be said."""
    if called:
        return BETTER if called > 0 else WORSE
    if math.isnan(gain):
        return UNKNOWN
    return SAME if gain == 0 else UP if gain > 0 else DOWN


def scores(run: RunFacts, alone: RunFacts | None) -> Scores:
    """Return scores and gains of a run.

    Parameters
    ----------
    run
        The run to score.
    alone
        The run in which every client trained alone on the same rows; without it gains are NaN.

    Returns
    -------
    Scores
    """
    rows = run.rows(run.split)
    count = np.full(len(run.names), np.nan) if rows is None else np.where(rows > 0, rows, np.nan)
    low, high = interval(run.metric, run.scores, count)
    if alone is None or alone is run or alone.split != run.split:
        nothing = np.full_like(run.scores, np.nan)
        return Scores(run.scores, low, high, nothing, nothing, nothing)
    metric = find(run.metric)
    judged = by_rows(run, alone, row_metric(metric, run.task))
    if judged is None:
        plain = metric.sign * (run.scores - alone.scores)
        nothing = np.full_like(plain, np.nan)
        told = Verdict.of_clients(run.scores, alone.scores, run.names, metric, run.task)
        return Scores(run.scores, low, high, plain, nothing, nothing, told if told.known else None)
    shown = judged if judged.metric.name == metric.name else by_rows(run, alone, metric)
    if shown is None:
        plain = metric.sign * (run.scores - alone.scores)
        nothing = np.full_like(plain, np.nan)
        return Scores(run.scores, low, high, plain, nothing, nothing, judged)
    with np.errstate(all="ignore"):
        unit = 1 / np.maximum(run.scores + alone.scores, 1e-300) if metric.is_root else 1.0
    gain, gain_low, gain_high = (part * unit for part in shown.intervals)
    return Scores(run.scores, low, high, gain, gain_low, gain_high, judged)


def by_rows(run: RunFacts, alone: RunFacts, metric: Metric) -> Verdict | None:
    """Return the verdict on two runs by the metric of single test rows, or None if they were not recorded."""
    mine, other = run.test_rows, alone.test_rows
    if mine is None or other is None or metric.name not in mine.values or metric.name not in other.values:
        return None
    return Verdict.of_rows(
        mine.values[metric.name],
        other.values[metric.name],
        mine.client,
        run.names,
        metric,
        mine.row,
        task=run.task,
    )


def interval(metric: str, value: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the 95 % interval of each client's metric, from its number of scored rows.

    Wilson's interval for accuracy, the chi-square interval for RMSE. Other metrics have none (NaN): how far they may
    be off does not follow from the number of rows.

    Examples
    --------
    >>> import numpy as np
    >>> from coterie.report.gains import interval
    >>> low, high = interval("accuracy", np.array([0.5]), np.array([100]))
    >>> low.round(3), high.round(3)
    (array([0.404]), array([0.596]))
    """
    if metric not in ("accuracy", "rmse"):
        return np.full_like(value, np.nan), np.full_like(value, np.nan)
    if metric == "accuracy":
        z2 = 1.959964**2
        middle = (value + z2 / (2 * rows)) / (1 + z2 / rows)
        half = np.sqrt(z2 * (value * (1 - value) / rows + z2 / (4 * rows**2))) / (1 + z2 / rows)
        return np.clip(middle - half, 0, 1), np.clip(middle + half, 0, 1)
    from scipy.special import gammaincinv

    low, high = (np.sqrt(rows / (2 * gammaincinv(rows / 2, tail))) for tail in (0.975, 0.025))
    return value * low, value * high

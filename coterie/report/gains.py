"""Gain of every client over training alone, with confidence intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from coterie.models.metrics import find
from coterie.report.facts import RunFacts

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
    """Metric of every client and its gain over training alone, both with 95 % intervals [n].

    Gains are positive if the client is better off, whatever the metric. NaN means unknown.
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    gain: np.ndarray
    gain_low: np.ndarray
    gain_high: np.ndarray

    @property
    def verdicts(self) -> list[str]:
        """Verdict on every client, one of the keys of `VERDICTS`."""
        return [verdict(*three) for three in zip(self.gain, self.gain_low, self.gain_high, strict=True)]


@dataclass(frozen=True)
class MeanGain:
    """Mean gain over clients with Student's 95 % interval (None for fewer than two clients), and counts."""

    mean: float
    low: float | None
    high: float | None
    improved: int
    harmed: int
    same: int


def verdict(gain: float, low: float, high: float) -> str:
    """Classify a gain by its sign and its 95 % interval; the result is a key of `VERDICTS`."""
    if math.isnan(gain):
        return UNKNOWN
    if gain == 0:
        return SAME
    if gain > 0:
        return BETTER if low > 0 else UP
    return WORSE if high < 0 else DOWN


def scores(run: RunFacts, alone: RunFacts | None) -> Scores:
    """Return scores and gains of a run.

    Parameters
    ----------
    run
        The run to score.
    alone
        The run in which every client trained alone; without it gains are NaN.

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
    other_low, other_high = interval(run.metric, alone.scores, count)
    if find(run.metric).higher_is_better:
        gain, down, up = run.scores - alone.scores, run.scores - low, high - run.scores
        other_down, other_up = other_high - alone.scores, alone.scores - other_low
    else:
        gain, down, up = alone.scores - run.scores, high - run.scores, run.scores - low
        other_down, other_up = alone.scores - other_low, other_high - alone.scores
    gain = np.where(np.abs(gain) < 1e-12, 0.0, gain)
    return Scores(
        run.scores, low, high, gain, gain - np.hypot(down, other_down), gain + np.hypot(up, other_up)
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


def mean_gain(gain: np.ndarray) -> MeanGain | None:
    """Summarise the gains of the clients that have one; None if no client has."""
    from scipy.special import stdtrit

    known = gain[~np.isnan(gain)]
    if not len(known):
        return None
    counts = int((known > 0).sum()), int((known < 0).sum()), int((known == 0).sum())
    if len(known) < 2:
        return MeanGain(float(known.mean()), None, None, *counts)
    half = float(stdtrit(len(known) - 1, 0.975) * known.std(ddof=1) / math.sqrt(len(known)))
    mean = float(known.mean())
    return MeanGain(mean, mean - half, mean + half, *counts)

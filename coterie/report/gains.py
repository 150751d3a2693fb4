"""Who gained and who lost against training alone, with honest intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from coterie.models.metrics import HIGHER_IS_BETTER
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
    """The metric of every client with its 95 % interval, and the gain over training alone with its own.

    Gains are positive where the client is better off, whatever the metric. NaN: not known.
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    gain: np.ndarray
    gain_low: np.ndarray
    gain_high: np.ndarray

    @property
    def verdicts(self) -> list[str]:
        return [verdict(*three) for three in zip(self.gain, self.gain_low, self.gain_high, strict=True)]


@dataclass(frozen=True)
class MeanGain:
    """The mean gain over clients and Student's 95 % interval (None for fewer than two clients)."""

    mean: float
    low: float | None
    high: float | None
    improved: int
    harmed: int
    same: int


def verdict(gain: float, low: float, high: float) -> str:
    """In which of the five ways a client fared."""
    if math.isnan(gain):
        return UNKNOWN
    if gain == 0:
        return SAME
    if gain > 0:
        return BETTER if low > 0 else UP
    return WORSE if high < 0 else DOWN


def scores(run: RunFacts, alone: RunFacts | None) -> Scores:
    """Metrics and gains of one run; `alone` is the run that trained without collaboration."""
    rows = run.rows(run.split)
    count = np.full(len(run.names), np.nan) if rows is None else np.where(rows > 0, rows, np.nan)
    low, high = interval(run.metric, run.scores, count)
    if alone is None or alone is run or alone.split != run.split:
        nothing = np.full_like(run.scores, np.nan)
        return Scores(run.scores, low, high, nothing, nothing, nothing)
    other_low, other_high = interval(run.metric, alone.scores, count)
    if HIGHER_IS_BETTER[run.metric]:
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
    """95 % interval of a client's metric from its number of scored rows: Wilson's for shares, chi-square for RMSE.

    How far perplexity may be off does not follow from the number of rows: there is none.
    """
    if metric == "perplexity":
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
    """Over the clients whose gain is known; None if there is none."""
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

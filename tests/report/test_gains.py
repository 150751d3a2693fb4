"""Intervals and verdicts against independent computations."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from coterie.report.gains import interval, mean_gain, scores, verdict


def test_interval_of_a_share_is_wilsons() -> None:
    for right, rows in ((0, 5), (3, 10), (40, 40), (77, 120)):
        low, high = interval("accuracy", np.array([right / rows]), np.array([float(rows)]))
        expected = stats.binomtest(right, rows).proportion_ci(0.95, "wilson")
        np.testing.assert_allclose([low[0], high[0]], [expected.low, expected.high], atol=1e-6)


def test_interval_of_an_error_covers_the_truth() -> None:
    errors = np.random.default_rng(0).normal(0, 2.0, (4000, 12))
    rmse = np.sqrt((errors**2).mean(1))
    low, high = interval("rmse", rmse, np.full(4000, 12.0))
    assert abs(((low < 2.0) & (high > 2.0)).mean() - 0.95) < 0.012


def test_mean_gain_is_students() -> None:
    gain = np.array([0.1, -0.02, 0.0, 0.05, np.nan])
    found = mean_gain(gain)
    assert found is not None and (found.improved, found.harmed, found.same) == (2, 1, 1)
    expected = stats.ttest_1samp(gain[:4], 0).confidence_interval(0.95)
    assert found.low == pytest.approx(expected.low) and found.high == pytest.approx(expected.high)


def test_gains_that_cannot_be_known() -> None:
    assert mean_gain(np.array([np.nan])) is None
    one = mean_gain(np.array([0.2]))
    assert one is not None and one.low is None


@pytest.mark.parametrize(
    ("gain", "low", "high", "expected"),
    [
        (0.1, 0.05, 0.2, "better"),
        (0.1, -0.05, 0.2, "up"),
        (-0.1, -0.3, 0.1, "down"),
        (-0.1, -0.3, -0.01, "worse"),
        (0.0, -0.1, 0.1, "same"),
        (np.nan, np.nan, np.nan, "unknown"),
    ],
)
def test_verdicts(gain: float, low: float, high: float, expected: str) -> None:
    assert verdict(gain, low, high) == expected


ROWS = np.array([10, 50])


def shown(metric: str, *values: float) -> SimpleNamespace:
    """What `scores` reads of a run."""
    return SimpleNamespace(
        names=["a", "b"], split="test", metric=metric, scores=np.array(values), rows=lambda split: ROWS
    )


@pytest.mark.parametrize(("metric", "sign"), [("rmse", -1), ("accuracy", 1)])
def test_the_interval_of_a_gain_combines_both_intervals(metric: str, sign: int) -> None:
    """The limits of a difference of two estimates, from the limits of each (Zou and Donner, 2008)."""
    run, alone = shown(metric, 0.5, 0.9), shown(metric, 0.7, 0.6)
    found = scores(run, alone)
    for k, rows in enumerate(ROWS):
        better, worse = (run, alone) if sign > 0 else (alone, run)
        one, other = better.scores[k], worse.scores[k]
        (low, high), (other_low, other_high) = limits(metric, one, rows), limits(metric, other, rows)
        assert found.gain[k] == pytest.approx(one - other)
        assert found.gain_low[k] == pytest.approx(
            one - other - np.hypot(one - low, other_high - other), abs=1e-6
        )
        assert found.gain_high[k] == pytest.approx(
            one - other + np.hypot(high - one, other - other_low), abs=1e-6
        )
        np.testing.assert_allclose(
            [found.low[k], found.high[k]], limits(metric, run.scores[k], rows), atol=1e-6
        )


def limits(metric: str, value: float, rows: int) -> tuple[float, float]:
    if metric == "accuracy":
        found = stats.binomtest(round(value * rows), int(rows)).proportion_ci(0.95, "wilson")
        return found.low, found.high
    return tuple(value * np.sqrt(rows / stats.chi2.ppf(tail, rows)) for tail in (0.975, 0.025))

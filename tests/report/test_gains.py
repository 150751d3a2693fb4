"""Intervals and verdicts against independent computations."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from coterie.report.gains import interval, mean_gain, verdict


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

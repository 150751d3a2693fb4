"""Intervals and verdicts against independent computations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from coterie.report.facts import TestRows
from coterie.report.gains import interval, scores, verdict


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


@pytest.mark.parametrize(
    ("gain", "called", "expected"),
    [
        (0.1, 1, "better"),
        (0.1, 0, "up"),
        (-0.1, 0, "down"),
        (-0.1, -1, "worse"),
        (0.0, 0, "same"),
        (np.nan, 0, "unknown"),
    ],
)
def test_verdicts(gain: float, called: int, expected: str) -> None:
    assert verdict(gain, called) == expected


def shown(metric: str, task: str, values: np.ndarray, client: np.ndarray, **changes: Any) -> SimpleNamespace:
    """What `scores` reads of a run: by default with the values of its test rows."""
    sizes = np.bincount(client)
    mean = np.bincount(client, values) / sizes
    facts = {
        "names": ["a", "b", "c"],
        "split": "test",
        "metric": metric,
        "task": task,
        "scores": np.sqrt(mean) if metric == "rmse" else mean,
        "rows": lambda split: sizes,
        "rows_hash": "same",
        "test_rows": TestRows(client, np.arange(len(client)), {metric: values, "loss": values}),
    }
    return SimpleNamespace(**facts | changes)


def test_gains_are_paired_by_row_and_shrunken() -> None:
    """Two models that differ little on rows that differ much: unpaired intervals would see nothing."""
    draw = np.random.default_rng(0)
    client = np.repeat([0, 1, 2], 50)
    alone = 4 * draw.gamma(1.0, size=150)
    run = shown("rmse", "regression", alone - 0.2 + 0.1 * draw.normal(size=150), client)
    found = scores(run, shown("rmse", "regression", alone, client))
    assert found.verdicts == ["better"] * 3 and (found.gain_low > 0).all()
    difference = shown("rmse", "regression", alone, client).scores - run.scores
    np.testing.assert_allclose(found.gain, difference, rtol=0.1)
    assert found.verdict is not None and found.verdict.by_rows.sign == 1
    spread = np.ptp(found.gain * (found.value + difference / 2))
    assert spread < np.ptp(difference * (found.value + difference / 2)), "drawn together"


def test_without_rows_clients_are_the_only_noise() -> None:
    client = np.repeat([0, 1, 2], 50)
    alone = shown("accuracy", "binary", np.full(150, 0.5), client, test_rows=None)
    run = shown("accuracy", "binary", np.repeat([0.6, 0.7, 0.65], 50), client, test_rows=None)
    found = scores(run, alone)
    np.testing.assert_allclose(found.gain, [0.1, 0.2, 0.15])
    assert found.verdicts == ["up"] * 3 and np.isnan(found.gain_low).all()
    expected = stats.ttest_1samp([0.1, 0.2, 0.15], 0).confidence_interval(0.95)
    assert found.verdict is not None
    assert found.verdict.by_clients.low == pytest.approx(expected.low)
    assert found.verdict.by_clients.high == pytest.approx(expected.high)

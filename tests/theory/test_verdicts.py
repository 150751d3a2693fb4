"""Verdicts by paired rows: against brute force, and what is said of clients in simulated federations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from coterie._core.errors import DataError, SettingError
from coterie.theory.verdicts import SPREADS, SURE, Evidence, _called, guarded, judge

Noise = Callable[[np.random.Generator, int], np.ndarray]


def test_evidence_is_the_mean_with_a_variance_that_borrows() -> None:
    """By hand: 4 and 2 rows; squares about the means add up to 5 + 0.5 over 4 degrees of freedom."""
    rows = np.array([1.0, 2.0, 3.0, 4.0, 0.0, 1.0])
    found = Evidence.of_rows(rows, np.array([0, 0, 0, 0, 2, 2]), 3)
    common = 5.5 / 4
    np.testing.assert_allclose(found.difference, [2.5, np.nan, 0.5])
    np.testing.assert_allclose(found.common, [common / 4, np.nan, common / 2])
    np.testing.assert_allclose(found.variance, [(5 + 4 * common) / 7 / 4, np.nan, (0.5 + 4 * common) / 5 / 2])
    assert found.rows.tolist() == [4, 0, 2] and found.pooled_freedom == 4


def test_a_row_that_is_tested_again_is_one_row() -> None:
    draw = np.random.default_rng(0)
    gain, client = draw.normal(size=60), np.repeat([0, 1], 30)
    once = Evidence.of_rows(gain, client, 2)
    row = np.arange(60)
    thrice = Evidence.of_rows(np.tile(gain, 3), np.tile(client, 3), 2, np.tile(row, 3))
    for name in ("difference", "variance", "common", "freedom", "rows"):
        np.testing.assert_allclose(getattr(thrice, name), getattr(once, name))
    uneven = Evidence.of_rows(np.append(gain, gain[0]), np.append(client, 0), 2, np.append(row, 0))
    assert uneven.rows.tolist() == [30, 30]
    assert uneven.difference[0] == pytest.approx((gain[:30].sum() + gain[0]) / 31)
    assert uneven.common[0] > once.common[0], "an uneven mean is less certain"


def test_the_posterior_is_that_of_brute_force_integration() -> None:
    """Common mean and spread integrated on a grid, true differences in closed form given both."""
    difference, variance = np.array([0.9, -0.2, 0.4, 1.6]), np.array([0.1, 0.3, 0.05, 0.4])
    rows = np.full(4, 30)
    found = judge(Evidence(difference, variance, variance, np.full(4, 1e12), rows, 10**12))
    scale = np.median(np.sqrt(variance))
    spreads = scale * np.tan(np.pi / 2 * (np.arange(SPREADS) + 0.5) / SPREADS)
    means = np.linspace(-20, 20, 8001)
    better, weights, estimate = np.zeros(4), 0.0, np.zeros(4)
    for spread in spreads:
        likely = np.ones_like(means)
        for d, v in zip(difference, variance, strict=True):
            likely *= stats.norm.pdf(d, means, np.sqrt(v + spread**2))
        weights += likely.sum()
        for k, (d, v) in enumerate(zip(difference, variance, strict=True)):
            pull = v / (v + spread**2)
            centre, sd = (1 - pull) * d + pull * means, np.sqrt((1 - pull) * v)
            better[k] += (likely * stats.norm.sf(0, centre, sd)).sum()
            estimate[k] += (likely * centre).sum()
    np.testing.assert_allclose(found.better, better / weights, atol=2e-5)
    np.testing.assert_allclose(found.estimate, estimate / weights, atol=2e-4)
    inside = found.low < found.estimate
    assert inside.all() and (found.estimate < found.high).all()


def test_means_have_students_interval() -> None:
    """Equal clients: the interval of both means is that of all rows about their clients' means."""
    gain = np.random.default_rng(1).normal(0.3, 1, (5, 40))
    found = judge(Evidence.of_rows(gain.ravel(), np.repeat(np.arange(5), 40), 5))
    sd = np.sqrt(((gain - gain.mean(1, keepdims=True)) ** 2).sum() / 195)
    half = stats.t.ppf(0.975, 195) * sd / np.sqrt(200)
    for mean in (found.by_rows, found.by_clients):
        assert mean.value == pytest.approx(gain.mean())
        assert mean.low == pytest.approx(gain.mean() - half, rel=0.01)
        assert mean.high == pytest.approx(gain.mean() + half, rel=0.01)
    uneven = judge(Evidence.of_rows(np.r_[np.ones(30), np.zeros(10)], np.r_[np.zeros(30), np.ones(10)], 2))
    assert (uneven.by_rows.value, uneven.by_clients.value) == pytest.approx((0.75, 0.5))


def test_nothing_is_said_of_too_few_rows() -> None:
    few = judge(Evidence.of_rows(np.full(12, 1.0), np.repeat(np.arange(4), 3), 4))
    assert not few.called.any()
    gain = np.random.default_rng(0).normal(2, 0.5, 60)
    found = judge(Evidence.of_rows(gain, np.r_[np.zeros(45), np.ones(15)], 2))
    assert found.called.tolist() == [1, 1] and found.clear.tolist() == [1, 0]
    one = judge(Evidence.of_rows(np.array([1.0]), np.array([0]), 2))
    assert one.by_rows.low is None and one.by_rows.sign == 0 and np.isnan(one.better).all()
    with pytest.raises(DataError, match="no client has rows"):
        judge(Evidence.of_rows(np.array([np.nan]), np.array([0]), 2))


def test_equal_models_are_equal() -> None:
    found = judge(Evidence.of_rows(np.zeros(50), np.repeat([0, 1], 25), 2))
    assert not found.called.any() and found.by_rows.value == 0 and found.by_rows.sign == 0


def test_few_calls_among_many_clients_need_more_evidence() -> None:
    """One client of 200 is 2.3 standard errors off, which is one of the 200 by chance."""
    draw = np.random.default_rng(3)
    gain = draw.normal(size=(200, 25))
    gain -= gain.mean(1, keepdims=True)
    gain[7] += 3.2 / 5
    client = np.repeat(np.arange(200), 25)
    assert judge(Evidence.of_rows(gain[7], np.zeros(25, dtype=int), 1)).called.tolist() == [1]
    assert not judge(Evidence.of_rows(gain.ravel(), client, 200)).called.any()


def normal(draw: np.random.Generator, count: int) -> np.ndarray:
    return draw.normal(size=count)


def heavy(draw: np.random.Generator, count: int) -> np.ndarray:
    return draw.standard_t(3, size=count) / 3**0.5


def skewed(draw: np.random.Generator, count: int) -> np.ndarray:
    return (np.exp(0.5 * draw.normal(size=count)) - np.exp(0.125)) / 0.6


def signs(draw: np.random.Generator, count: int) -> np.ndarray:
    """Accuracy: most rows do not change."""
    return draw.choice([-1.0, 0.0, 1.0], count, p=[0.08, 0.84, 0.08])


SHAPES = [(4, 5, 60), (20, 2, 8), (60, 1, 40), (300, 2, 10)]  # clients, fewest and most rows


def simulated(
    noise: Noise, shape: tuple[int, int, int], mean: float, spread: float, times: int, seed: int
) -> tuple[float, int, int, float]:
    """Return the share of clients called, how many were, how many wrongly, and how often the means were covered."""
    draw, (n, least, most) = np.random.default_rng(seed), shape
    share, said, wrong, covered = 0.0, 0, 0, 0.0
    for _ in range(times):
        rows = draw.integers(least, most + 1, n)
        client = np.repeat(np.arange(n), rows)
        true = mean + spread * draw.normal(size=n)
        size = np.exp(0.4 * draw.normal(size=n))
        found = judge(Evidence.of_rows(true[client] + size[client] * noise(draw, len(client)), client, n))
        calls = found.called != 0
        share += calls.mean() / times
        said += int(calls.sum())
        wrong += int((found.called[calls] != np.sign(true[calls])).sum())
        for one, weight in ((found.by_rows, rows / rows.sum()), (found.by_clients, np.full(n, 1 / n))):
            assert one.low is not None and one.high is not None
            covered += (one.low <= (weight * true).sum() <= one.high) / (2 * times)
    return share, said, wrong, covered


def test_calls_are_those_of_benjamini_and_hochberg() -> None:
    """scipy's own takes two seconds to load after installing, so that the package has four lines of its own."""
    draw = np.random.default_rng(0)
    for size in [0, *draw.integers(1, 30, 300)]:
        better = draw.beta(*draw.choice([0.05, 0.3, 1.0, 3.0], 2), size=size).round(draw.choice([2, 9]))
        tails = np.minimum(1, 2 * np.minimum(better, 1 - better))
        said = stats.false_discovery_control(tails) <= 2 * (1 - SURE) if size else np.zeros(0, dtype=bool)
        np.testing.assert_array_equal(_called(better), np.where(said, np.where(better > 0.5, 1, -1), 0))


@pytest.mark.slow
@pytest.mark.parametrize("noise", [normal, heavy, skewed, signs])
def test_without_a_difference_few_clients_are_called(noise: Noise) -> None:
    """At most 5 % of the clients in every shape, and means are covered by their intervals."""
    for shape in SHAPES:
        share, _, _, covered = simulated(noise, shape, 0.0, 0.0, 60, seed=1)
        assert share <= 0.05, (noise, shape, share)
        assert covered >= 0.88, (noise, shape, covered)


@pytest.mark.slow
@pytest.mark.parametrize(("mean", "spread"), [(0.0, 0.5), (0.2, 0.2), (0.3, 0.0), (-0.1, 0.4)])
def test_with_a_difference_what_is_said_is_right(mean: float, spread: float) -> None:
    """The sign is right in at least 95 % of what is said, over all shapes and kinds of noise."""
    said = wrong = 0
    for noise in (normal, heavy, skewed):
        for shape in SHAPES:
            _, calls, errors, _ = simulated(noise, shape, mean, spread, 12, seed=2)
            said, wrong = said + calls, wrong + errors
    assert said > 200 and wrong <= 0.05 * said, (said, wrong)


def deployed(rows: int, mean: float, lone: float, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return true gains of 30 clients, of which three gain `lone`, who is one of the three, and who keeps its own."""
    draw = np.random.default_rng(seed)
    odd = np.arange(30) < 3
    true = np.where(odd, lone, mean + 0.1 * draw.normal(size=30))
    client = np.repeat(np.arange(30), rows)
    found = judge(Evidence.of_rows(true[client] + draw.normal(size=len(client)), client, 30))
    return true, odd, guarded(found)


def test_a_guard_saves_who_is_harmed_and_costs_the_others_little() -> None:
    """Three of 30 clients lose a row deviation: 20 rows save them, and 97 % of the gain of the others stays."""
    saved, kept, whole = [], 0.0, 0.0
    for seed in range(20):
        true, odd, own = deployed(20, 0.3, -1.0, seed)
        saved.append(own[odd].mean())
        kept, whole = kept + true[~odd & ~own].sum(), whole + true[~odd].sum()
    assert np.mean(saved) > 0.9 and kept > 0.97 * whole
    unknown = judge(Evidence.of_rows(np.ones(30), np.zeros(30, dtype=int), 2))
    assert guarded(unknown).tolist() == [False, False]
    with pytest.raises(SettingError, match=r"doubt is 0\.7"):
        guarded(unknown, 0.7)


@pytest.mark.slow
def test_what_a_guard_lets_through_is_within_noise() -> None:
    """The harm that is left is below two standard errors of the rows that decided, for all but 2 % of the clients."""
    for rows in (5, 20, 80):
        left, count = 0, 0
        for lone in (-0.2, -0.5, -1.0, -2.0):
            for seed in range(20):
                true, _, own = deployed(rows, 0.2, lone, seed)
                left += int((~own & (true < -2 / rows**0.5)).sum())
                count += 30
        assert left <= 0.02 * count, (rows, left, count)


def test_a_client_with_one_model_twice_is_not_called_because_of_the_others() -> None:
    gains = 2 + 3 * np.random.default_rng(0).normal(size=(80, 3))
    gains[4] = 0.0
    found = judge(Evidence.of_rows(gains.ravel(), np.repeat(np.arange(80), 3), 80))
    assert found.better[4] > 0.975, "the others alone would call it"
    assert found.called[4] == 0 and (np.delete(found.called, 4) == 1).sum() > 60

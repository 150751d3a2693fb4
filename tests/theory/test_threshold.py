"""Threshold clustering: convergence and error against closed forms, bad input, speed, and the price of bad points."""

import numpy as np
import pytest
import torch

from coterie._core.errors import SettingError
from coterie.theory import threshold
from coterie.theory.threshold import (
    Auto,
    Fixed,
    HalfGap,
    Size,
    Theory,
    byzantine_price,
    make_rule,
    threshold_cluster,
)
from coterie.theory.threshold_starts import seed_weights


def cloud(sizes, d, gap, seed=0, spread=1.0):
    """Gaussian clusters with E|x - mu|^2 = spread^2 whose means are `gap` apart on coordinate axes."""
    rng = np.random.default_rng(seed)
    truth = np.repeat(np.arange(len(sizes)), sizes)
    means = np.eye(len(sizes), d) * gap / np.sqrt(2)
    points = means[truth] + spread / np.sqrt(d) * rng.normal(size=(len(truth), d))
    return torch.tensor(points), torch.tensor(truth), torch.tensor(means)


def by_hand(points, v, tau):
    """One pass in plain loops: the mean over all N of the point if it is near, else of the centre itself."""
    total = np.zeros_like(v)
    for x in points:
        total += x if np.linalg.norm(x - v) <= tau else v
    return total / len(points)


def test_one_pass_is_the_damped_mean_shift():
    points, _, means = cloud((9, 9, 9, 9), 5, 6.0)
    starts = means + 0.3
    found = threshold_cluster(points, starts=starts, rule=Fixed(2.0), rounds=1)
    for k in range(4):
        np.testing.assert_allclose(
            found.centres[k], by_hand(points.numpy(), starts[k].numpy(), 2.0), atol=1e-12
        )
        near = (points - starts[k]).norm(dim=1) <= 2.0
        moved = starts[k] + near.double().mean() * (points[near].mean(0) - starts[k])
        np.testing.assert_allclose(found.centres[k], moved, atol=1e-12)


def test_many_passes_equal_the_loop_and_weights_give_the_centres():
    points, _, _ = cloud((6, 8, 5), 4, 5.0)
    found = threshold_cluster(points, 3, rule=Fixed(1.8), rounds=6, seed=3)
    v = (seed_weights(points, 3, seed=3) @ points).numpy()
    for _ in range(6):
        v = np.stack([by_hand(points.numpy(), one, 1.8) for one in v])
    np.testing.assert_allclose(found.centres, v, atol=1e-12)
    np.testing.assert_allclose(found.weights @ points, v, atol=1e-12)
    np.testing.assert_allclose(found.weights.sum(1), 1.0, atol=1e-12)


def test_a_stable_ball_shrinks_by_one_minus_its_share():
    points, truth, means = cloud((9, 9, 9, 9), 6, 50.0)
    target = torch.stack([points[truth == k].mean(0) for k in range(4)])
    before = (means - target).norm(dim=1)
    for passes in (1, 4, 8):
        centres = threshold_cluster(points, starts=means, rule=Fixed(10.0), rounds=passes).centres
        torch.testing.assert_close((centres - target).norm(dim=1), before * 0.75**passes)


def test_dividing_by_the_cluster_size_as_printed_explodes():
    """Erratum 1: 1/n in place of 1/N multiplies the centre by about N/n a pass."""
    points, _, means = cloud((9, 9, 9, 9), 5, 20.0)
    v = means[0].clone()
    for _ in range(10):
        near = (points - v).norm(dim=1) <= 5.0
        v = (points[near].sum(0) + (~near).sum() * v) / 9
    assert (v - means[0]).norm() > 1e6


def test_the_theory_threshold_finds_the_clusters_where_it_applies():
    rule = Theory(rho=1.0, gap=400.0, size=50, points=100)
    assert rule.applies and not Theory(1.0, 10.0, 50, 100).applies
    errors = []
    for seed in range(40):
        points, truth, means = cloud((50, 50), 8, 400.0, seed)
        found = threshold_cluster(points, 2, rule=rule, rounds=rule.rounds, lloyd=0, seed=seed)
        order = torch.cdist(found.centres, means).argmin(1)
        assert torch.equal(order[found.membership], truth)
        assert all(torch.equal(ball, truth == order[k]) for k, ball in enumerate(found.balls))
        errors += ((found.centres - means[order]) ** 2).sum(1).tolist()
    assert 0.8 < np.mean(errors) * 50 < 1.3


@pytest.mark.slow
def test_own_point_start_needs_many_passes():
    """After one pass the error is rho^2 [(1-f)^2 + f^2/n + 2f(1-f)/n], not rho^2/n."""
    n, f, once, often = 200, 0.1, [], []
    for seed in range(3):
        points, truth, means = cloud((n,) * 10, 12, 60.0, seed)
        own = points[::50]
        for errors, passes in ((once, 1), (often, 60)):
            v = threshold_cluster(points, starts=own, rule=Fixed(10.0), rounds=passes).centres
            errors += ((v - means[truth[::50]]) ** 2).sum(1).tolist()
    expected = (1 - f) ** 2 + f * f / n + 2 * f * (1 - f) / n
    assert np.mean(once) == pytest.approx(expected, rel=4 * np.std(once) / np.sqrt(len(once)))
    assert 0.0035 < np.mean(often) < 0.0075


def test_rules_on_distances_by_hand():
    distances = torch.tensor([[0.0, 0.9, 1.0, 1.1, 9.0, 10.0, 11.0, 12.0]], dtype=torch.float64)
    centre = torch.zeros(1, 2, dtype=torch.float64)
    assert Size(0.5).radius(distances, centre, 0).item() == 1.1
    assert Size(0.51).radius(distances, centre, 0).item() == 9.0
    assert Size(0.01).radius(distances, centre, 0).item() == 0.0
    assert Auto(0.5, 0.75).radius(distances, centre, 0).item() == pytest.approx((1.1 * 9.0) ** 0.5)
    two = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    assert HalfGap().radius(distances.expand(2, -1), two, 0).tolist() == [2.5, 2.5]
    assert HalfGap().radius(distances, centre, 0).item() == float("inf")


def slow_auto(distances, low, high):
    """The rule AUTO as its text says, with a loop over every split."""
    d = np.sort(distances)
    logs, n, s = np.log(np.maximum(d, d[2])), len(d), len(d)
    least = max(2, int(np.ceil(low * n)))
    while True:
        splits = []
        for k in range(least, s):
            a, b = logs[:k], logs[k:s]
            within = ((a - a.mean()) ** 2).sum() + ((b - b.mean()) ** 2).sum()
            splits.append((within, k))
        if not splits:
            break
        within, k = min(splits)
        total = ((logs[:s] - logs[:s].mean()) ** 2).sum()
        if not (s > high * n or 1 - within / total > min(0.998, 0.72 + 2.4 / s)):
            break
        s = k
    return np.inf if s == n else np.sqrt(d[s - 1] * d[s])


@pytest.mark.parametrize("seed", range(6))
def test_auto_equals_its_description(seed):
    points, _, _ = cloud((7, 9, 14), 3 + 4 * (seed % 3), 1.0 + 2 * seed, seed)
    distances = torch.cdist(points, points)
    for low, high in ((0.1, 0.6), (0.15, 0.35), (0.2, 1.0)):
        radius = Auto(low, high).radius(distances.sort(1).values, points, 0)
        np.testing.assert_allclose(
            radius, [slow_auto(row, low, high) for row in distances.numpy()], rtol=1e-9
        )


def test_auto_sees_one_cluster_as_one():
    split = 0
    for seed in range(20):
        points, _, _ = cloud((40,), 10, 0.0, seed)
        split += int(torch.isfinite(threshold_cluster(points, 1, rule=Auto(0.25, 1.0)).radius).sum())
    assert split <= 2


def test_the_result_is_a_function_of_the_seed():
    points, _, _ = cloud((20, 20, 20), 6, 3.0)
    one, two = (threshold_cluster(points, 3, rule="auto", seed=5) for _ in range(2))
    assert torch.equal(one.centres, two.centres) and torch.equal(one.membership, two.membership)


def test_leftovers_overlaps_and_far_points():
    points, _, means = cloud((10, 10), 4, 30.0)
    points = torch.cat([points, torch.full((1, 4), 500.0, dtype=torch.float64)])
    found = threshold_cluster(points, starts=means, rule=Fixed(5.0))
    assert found.leftover.tolist() == [False] * 20 + [True]
    assert found.diagnostics()["leftover"] == 1 and found.sizes.tolist() == [10, 10]
    both = threshold_cluster(points, starts=means, rule=Fixed(100.0), rounds=0)
    assert both.diagnostics()["shared"] == 20


def test_points_that_are_not_finite_belong_nowhere():
    points, _, means = cloud((10, 10), 4, 30.0)
    clean = threshold_cluster(points, starts=means, rule=Fixed(5.0))
    spoilt = torch.cat([points, torch.full((2, 4), float("nan"), dtype=torch.float64)])
    found = threshold_cluster(spoilt, starts=means, rule=Fixed(5.0))
    torch.testing.assert_close(found.centres, clean.centres)
    assert found.membership[-2:].tolist() == [-1, -1] and found.diagnostics()["left_out"] == 2
    assert not found.leftover[-2:].any() and not found.balls[:, -2:].any()


def test_bad_input_is_named():
    points, _, _ = cloud((3, 3), 4, 5.0)
    with pytest.raises(SettingError, match="k = 7 centres cannot be drawn from 6 points"):
        threshold_cluster(points, 7)
    with pytest.raises(SettingError, match="say how many clusters"):
        threshold_cluster(points)
    with pytest.raises(SettingError, match="non-empty matrix"):
        threshold_cluster(torch.zeros(0, 3), 1)
    with pytest.raises(SettingError, match="no point is finite"):
        threshold_cluster(torch.full((3, 2), float("nan")), 1)
    with pytest.raises(SettingError, match=r"starts must be \[K, 4\]"):
        threshold_cluster(points, starts=torch.zeros(2, 3))
    with pytest.raises(SettingError, match="no threshold rule 'best'"):
        make_rule("best", 2, 6)
    for wrong in (
        lambda: Size(0.0),
        lambda: Auto(0.5, 0.2),
        lambda: Fixed(-1.0),
        lambda: Theory(0.0, 1.0, 1, 2),
    ):
        with pytest.raises(SettingError):
            wrong()


@pytest.mark.parametrize("rule", ["auto", "size", "halfgap"])
def test_identical_points_one_point_and_empty_balls(rule):
    same = threshold_cluster(torch.ones(8, 3), 2, rule=rule)
    torch.testing.assert_close(same.centres, torch.ones(2, 3))
    assert not same.leftover.any()
    one = threshold_cluster(torch.tensor([[1.0, 2.0]]), 1, rule=rule)
    assert one.centres.tolist() == [[1.0, 2.0]] and one.membership.tolist() == [0]
    far = threshold_cluster(torch.eye(3), starts=torch.full((1, 3), 100.0), rule=Fixed(1.0))
    assert far.centres.tolist() == [[100.0] * 3] and far.leftover.all() and far.sizes.tolist() == [0]
    assert far.diagnostics()["empty_balls"] == 1


def test_passes_stop_when_centres_rest():
    """What is left of the way then is below a tenth of the standard error, and it is that of the passes left out."""
    points, truth, _ = cloud((9, 9, 9, 9), 6, 30.0)
    own = points[::9]
    ends = threshold_cluster(points, starts=own, rule=Fixed(8.0), rounds=400).centres
    early = threshold_cluster(points, starts=own, rule=Fixed(8.0), rounds=400, rest=0.1)
    left = (early.centres - ends).norm(dim=1)
    spread = torch.stack([(points[truth == k] - ends[k]).square().sum(1).mean().sqrt() for k in range(4)])
    assert (left <= 0.1 * spread / 3 * 1.05).all() and left.max() > 0.01 * spread.max() / 3
    again = threshold_cluster(points, starts=own, rule=Fixed(8.0), rounds=3, rest=0.1)
    torch.testing.assert_close(
        again.centres, threshold_cluster(points, starts=own, rule=Fixed(8.0), rounds=3).centres
    )


@pytest.mark.parametrize("bad", [1, 3, 6])
@pytest.mark.parametrize("where", [0.5, 0.9, 3.0, 1e6])
def test_bad_points_move_a_centre_by_no_more_than_their_price(bad, where):
    """Colluding points at `where` radii from the honest mean, those far away being ignored altogether."""
    points, truth, means = cloud((15, 15, 15), 6, 40.0)
    tau, honest = 6.0, points[truth == 0].mean(0)
    direction = torch.nn.functional.normalize(torch.arange(6.0, dtype=torch.float64), dim=0)
    spoilt = torch.cat([points, (honest + where * tau * direction).expand(bad, -1)])
    found = threshold_cluster(spoilt, starts=means, rule=Fixed(tau), rounds=200)
    shift = float((found.centres[0] - honest).norm())
    assert bool(found.balls[0, :15].all()) and shift <= byzantine_price(tau, 15, bad) + 1e-9
    if where < 1:
        assert shift == pytest.approx(bad / (15 + bad) * where * tau, rel=1e-6)
    if where > 1 + bad / 15:
        assert shift < 1e-9
    others = torch.stack([points[truth == k].mean(0) for k in (1, 2)])
    torch.testing.assert_close(found.centres[1:], others)


@pytest.mark.parametrize("rule", ["auto", "size", "halfgap"])
def test_few_points_in_many_dimensions_are_clustered_as_their_images_in_few(rule: str) -> None:
    """A rotation into 400 dimensions changes no distance, though there passes run on inner products."""
    draw = torch.Generator().manual_seed(3)
    points = torch.randn(12, 3, generator=draw, dtype=torch.float64)
    points[6:] += 8
    axes = torch.linalg.qr(torch.randn(400, 3, generator=draw, dtype=torch.float64)).Q
    thin = threshold_cluster(points, starts=points[[0, 6]] + 0.3, rule=rule)
    wide = threshold_cluster(points @ axes.T, starts=(points[[0, 6]] + 0.3) @ axes.T, rule=rule)
    assert threshold._coordinates(points @ axes.T, products=18).shape == (12, 12)
    assert torch.equal(wide.balls, thin.balls) and torch.equal(wide.membership, thin.membership)
    torch.testing.assert_close(wide.weights, thin.weights)
    torch.testing.assert_close(wide.centres, thin.centres @ axes.T)
    torch.testing.assert_close(wide.radius, thin.radius)

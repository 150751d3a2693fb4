"""Clusters from sums over rows, against least squares on the rows themselves."""

import numpy as np
import pytest
import torch

from coterie.theory.pooled_sums import dispersion, excess, pooled_clusters, shrunken
from coterie.theory.pooled_tree import apart, best_cut, credible_sums, joined

FOLDS = 5


def drawn(centres, sizes, rows, noise=0.5, inside=0.0, seed=0):
    """Rows of clients in clusters: x, y and fold of each, and the true cluster of each client."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    d = centres.shape[1]
    data = []
    for k in labels:
        theta = centres[k] + inside * rng.normal(size=d)
        count = int(rows if np.isscalar(rows) else rng.integers(*rows))
        x = rng.normal(size=(count, d))
        y = x @ theta + noise * rng.normal(size=count)
        data.append((x, y, np.arange(count) % max(1, min(FOLDS, count // 2))))
    return data, labels


def sums(data):
    d = data[0][0].shape[1]
    hessians, slopes = np.zeros((len(data), FOLDS, d, d)), np.zeros((len(data), FOLDS, d))
    for i, (x, y, fold) in enumerate(data):
        for f in range(FOLDS):
            part = x[fold == f]
            hessians[i, f], slopes[i, f] = part.T @ part, part.T @ y[fold == f]
    rows = torch.tensor([float(len(y)) for _, y, _ in data])
    return torch.tensor(hessians), torch.tensor(slopes), rows


def least_squares(data, members):
    x, y = (np.concatenate([data[i][part] for i in members]) for part in (0, 1))
    found = np.linalg.lstsq(x, y, rcond=None)[0]
    return 0.5 * float(((y - x @ found) ** 2).sum())


def spread_centres(count, d, gap, seed=0):
    points = np.random.default_rng(seed).normal(size=(count, d))
    distances = np.linalg.norm(points[:, None] - points, axis=-1)[np.triu_indices(count, 1)]
    return points * gap / distances.min()


def same(labels, truth):
    labels, truth = np.asarray(labels), np.asarray(truth)
    return bool(((labels[:, None] == labels) == (truth[:, None] == truth)).all())


def test_a_merge_costs_what_least_squares_on_all_rows_loses():
    data, _ = drawn(spread_centres(2, 3, 2.0), (3, 2), (6, 30))
    hessians, slopes, _ = sums(data)
    tree = joined(hessians.sum(1), slopes.sum(1), torch.zeros(3))
    for k, (i, j) in enumerate(tree.children.tolist()):
        whole, *halves = (tree.members[node].nonzero().flatten().tolist() for node in (5 + k, i, j))
        lost = least_squares(data, whole) - sum(least_squares(data, half) for half in halves)
        assert float(tree.costs[k]) == pytest.approx(lost, rel=1e-8)
        if k == 0:
            pairs = [
                least_squares(data, [a, b]) - least_squares(data, [a]) - least_squares(data, [b])
                for a in range(5)
                for b in range(a)
            ]
            assert lost == pytest.approx(min(pairs))


@pytest.mark.parametrize("rows", [6, 40])
def test_dispersion_is_the_variance_of_the_noise(rows):
    found = []
    for seed in range(30):
        data, labels = drawn(np.ones((1, 3)), (12,), rows, noise=0.5, seed=seed)
        hessians, slopes, _ = sums(data)
        for clusters in (torch.arange(12), torch.tensor(labels)):
            found.append(dispersion(hessians, slopes, clusters, torch.full((3,), 1e-9)))
    assert np.mean(found[0::2]) == pytest.approx(0.25, rel=0.12)
    assert np.mean(found[1::2]) == pytest.approx(0.25, rel=0.05)


@pytest.mark.quick("sizes0-30-5", "sizes3-30-5")
@pytest.mark.parametrize(
    ("sizes", "rows", "d"),
    [((6, 6), 30, 5), ((18, 9, 6, 3), 5, 3), ((12, 6), (5, 100), 5), ((4, 1, 1), 30, 5)],
)
def test_clusters_four_spreads_apart_are_found(sizes, rows, d):
    usual = np.exp(np.mean(np.log(rows)))
    right = 0
    for seed in range(10):
        centres = spread_centres(len(sizes), d, 6 * 0.5 * np.sqrt(d / usual), seed)
        data, truth = drawn(centres, sizes, rows, seed=seed)
        labels, models, *_ = pooled_clusters(*sums(data))
        right += same(labels, truth)
        if same(labels, truth):
            assert np.abs(models[labels].numpy() - centres[truth]).max() < 1.0
    assert right >= 9


@pytest.mark.quick("2-40-3-3", "12-10-4-1")
@pytest.mark.parametrize(("count", "rows", "d", "most"), [(12, 10, 4, 1), (24, 20, 6, 1), (2, 40, 3, 3)])
def test_one_cluster_is_rarely_split(count, rows, d, most):
    found = [
        int(pooled_clusters(*sums(drawn(np.ones((1, d)), (count,), rows, seed=seed)[0]))[0].max()) > 0
        for seed in range(12)
    ]
    assert sum(found) <= most


def test_clients_that_all_differ_stay_alone():
    """Differences of three standard errors: the nearest of many pairs look alike, and pooling them would harm."""
    alone = []
    for seed in range(6):
        data, _ = drawn(np.ones((1, 5)), (12,), 100, inside=3 * 0.05, seed=seed)
        alone.append(len(pooled_clusters(*sums(data))[0].unique()))
    assert np.mean(alone) >= 10


def test_units_of_columns_do_not_matter():
    data, truth = drawn(spread_centres(2, 3, 2.0), (4, 4), 30)
    scale = np.array([1.0, 1e3, 1e-3])
    scaled = [(x * scale, y, fold) for x, y, fold in data]
    assert same(pooled_clusters(*sums(data))[0], truth) and same(pooled_clusters(*sums(scaled))[0], truth)


def test_equal_rows_without_noise_are_one_cluster():
    x = np.random.default_rng(0).normal(size=(20, 3))
    data = [(x * (1 + k), x @ np.ones(3) * (1 + k), np.arange(20) % FOLDS) for k in range(4)]
    assert pooled_clusters(*sums(data))[0].tolist() == [0, 0, 0, 0]


def test_sums_that_no_rows_have_are_told_from_others():
    data, _ = drawn(np.ones((1, 3)), (8,), 20)
    hessians, slopes, rows = sums(data)
    hessians[0] *= -1  # a flipped sign
    hessians[1] *= 1e6  # other units, or a lie
    hessians[2, 0, 0, 1] += 5.0  # not symmetric
    rows[3] = 1e9  # claims rows that it has not
    good, kept, _ = credible_sums(hessians, slopes, rows)
    assert good.tolist() == [False] * 3 + [True] * 5
    assert torch.equal(kept[1:], hessians[4:])


def test_excess_is_the_ratio_of_variances():
    """Parameters vary with inside^2, fits with noise^2/rows: the ratio here is 4."""
    found = []
    for seed in range(20):
        data, labels = drawn(np.ones((1, 4)), (60,), 200, noise=1.0, inside=2 / np.sqrt(200), seed=seed)
        hessians, slopes, _ = sums(data)
        found.append(float(excess(hessians, slopes, torch.tensor(labels), torch.full((4,), 1e-9))))
    slack = 2 * np.sqrt(2 / (59 * 4))
    assert np.mean(found) + slack == pytest.approx(4, rel=0.1)
    data, labels = drawn(np.ones((1, 4)), (6,), 30)
    assert float(excess(*sums(data)[:2], torch.tensor(labels), torch.full((4,), 1e-9))) == 0.0


def test_a_larger_bar_joins_more_and_the_bar_is_that_of_chance():
    data, _ = drawn(spread_centres(4, 3, 1.0), (3, 3, 3, 3), 20)
    hessians, slopes, _ = sums(data)
    tree = joined(hessians.sum(1), slopes.sum(1), torch.full((3,), 1e-9))
    counts = [int(apart(tree, 0.25, 3, bar).max()) + 1 for bar in (0.0, 0.5, 1.0, 2.0, 1e9)]
    assert counts[0] == 12 and counts[-1] == 1 and counts == sorted(counts, reverse=True)
    draw = torch.Generator().manual_seed(0)
    cuts = []
    for _ in range(200):
        cloud = torch.randn(12, 5, generator=draw, dtype=torch.float64)
        cuts.append(
            2 * float(joined(torch.eye(5).double().expand(12, 5, 5), cloud, torch.zeros(5)).costs[-1]) / 5
        )
    assert 0.5 * best_cut(5.0, 12) < np.median(cuts) < best_cut(5.0, 12)


@pytest.mark.slow
def test_members_that_differ_are_one_cluster_with_models_of_their_own():
    """Members that differ as much as their fits err: pulled models beat one for each cluster, and training alone."""
    right, errors = 0, []
    for seed in range(10):
        centres = spread_centres(2, 4, 0.9, seed)
        data, truth = drawn(centres, (8, 8), 40, inside=0.08, seed=seed)
        hessians, slopes, rows = sums(data)
        labels, models, differ, own = pooled_clusters(hessians, slopes, rows, pulled=True)
        right += same(labels, truth)
        assert (own != 0).any(1).equal((differ > 0)[labels])
        shared, shared_models, *_, none = pooled_clusters(hessians, slopes, rows)
        assert not none.any()
        alone = torch.linalg.solve(hessians.sum(1), slopes.sum(1).unsqueeze(-1)).squeeze(-1)
        true = torch.tensor(_thetas(centres, truth, 40, 0.08, seed))
        found = (models[labels] + own, shared_models[shared], alone)
        errors.append([float((one - true).norm(dim=1).mean()) for one in found])
    pulled, one_each, by_themselves = np.mean(errors, 0)
    assert right >= 8 and pulled < 0.95 * min(one_each, by_themselves)


def test_own_models_are_the_posterior_means_of_a_normal_hierarchy():
    """Against ridge regression on the rows, one client at a time, around the cluster's least squares."""
    data, labels = drawn(np.ones((1, 3)), (4,), (8, 30), inside=0.5)
    hessians, slopes, _ = sums(data)
    e, none = 2.5, torch.zeros(3)
    found = shrunken(hessians, slopes, torch.tensor(labels), torch.tensor([e]), none)
    x, y = (np.concatenate([one[part] for one in data]) for part in (0, 1))
    centre, prior = np.linalg.lstsq(x, y, rcond=None)[0], x.T @ x / 4 / e
    for i, (x, y, _) in enumerate(data):
        by_hand = centre + np.linalg.solve(x.T @ x + prior, x.T @ (y - x @ centre))
        np.testing.assert_allclose(found[i], by_hand, rtol=1e-6)


def _thetas(centres, labels, rows, inside, seed):
    """Parameters of the clients that `drawn` draws."""
    rng, found = np.random.default_rng(seed), []
    for k in labels:
        found.append(centres[k] + inside * rng.normal(size=centres.shape[1]))
        rng.normal(size=(rows, centres.shape[1])), rng.normal(size=rows)
    return np.array(found)

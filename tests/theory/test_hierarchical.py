"""Objective and exact estimators for known clusters against dense algebra and simulation."""

import numpy as np
import pytest
import torch

from coterie._core.errors import SettingError
from coterie.data.generate import hierarchical_linear
from coterie.theory import hierarchical as exact
from coterie.theory import linear_estimators
from coterie.theory.cluster_penalty import Penalty, alpha_from_lambda
from coterie.theory.variance_components import Sums


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: a second thread costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


RNG = np.random.default_rng(3)
CLUSTERS = torch.tensor([0, 1, 1, 2, 2, 2, 0, 1, 2])
N, K, D = len(CLUSTERS), 3, 4


def normal(*shape):
    return torch.from_numpy(RNG.normal(size=shape))


def problem(rows=None):
    """Quadratic losses 1/2 t'At - b't; with few rows A is singular."""
    sizes = rows or [2, 1, 5, 9, 3, 4, 7, 2, 6]
    xs = [normal(m, D) for m in sizes]
    ys = [normal(m) for m in sizes]
    return Sums.of(xs, ys, CLUSTERS), xs, ys


def value(models, sums, penalty):
    losses = 0.5 * (models * exact.times(sums.xx, models)).sum() - (sums.xy * models).sum()
    return losses + penalty.value(models)


def dense(sums, penalty):
    """The minimiser through the full Hessian, nd x nd."""
    flat = torch.zeros(N * D, dtype=torch.float64)

    def whole(w):
        return value(w.view(N, D), sums, penalty)

    hessian = torch.autograd.functional.hessian(whole, flat)
    slope = torch.autograd.functional.jacobian(whole, flat)
    return -torch.linalg.solve(hessian, slope).view(N, D)


def two_level(sums, gamma, lambda_):
    """The minimiser of the multi-task form over models, cluster centres and the common centre together."""
    finite = lambda_.squeeze(-1).tolist()

    def whole(flat):
        t, w, common = flat.split([N * D, K * D, D])
        t, w = t.view(N, D), w.view(K, D)
        losses = 0.5 * (t * exact.times(sums.xx, t)).sum() - (sums.xy * t).sum()
        inner = 0.5 * (gamma * (t - w[CLUSTERS]).square()).sum()
        return losses + inner + 0.5 * sum(v * (w[j] - common).square().sum() for j, v in enumerate(finite))

    flat = torch.zeros((N + K + 1) * D, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(whole, flat)
    slope = torch.autograd.functional.jacobian(whole, flat)
    solution = -torch.linalg.lstsq(hessian, slope.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    return solution[: N * D].view(N, D), solution[N * D : -D].view(K, D), solution[-D:]


def penalties():
    gamma = 0.2 + normal(N).abs()
    return {
        "unequal": Penalty.of(CLUSTERS, gamma, alpha=[0.3, 0.9, 0.05]),
        "some zero": Penalty.of(CLUSTERS, gamma, alpha=[0.0, 0.5, 0.0]),
        "zero": Penalty.of(CLUSTERS, gamma, alpha=0.0),
        "one": Penalty.of(CLUSTERS, gamma, alpha=1.0),
        "some one": Penalty.of(CLUSTERS, gamma, alpha=[1.0, 0.2, 1.0]),
        "lambda": Penalty.of(CLUSTERS, 0.7, lambda_=[2.0, 0.1, 5.0]),
    }


@pytest.mark.parametrize("name", penalties())
def test_gradient_equals_differences(name):
    penalty, models, step = penalties()[name], normal(N, D), 1e-5
    slope = penalty.grad(models)
    for _ in range(12):
        i, c = int(RNG.integers(N)), int(RNG.integers(D))
        change = torch.zeros_like(models)
        change[i, c] = step
        central = (penalty.value(models + change) - penalty.value(models - change)) / (2 * step)
        assert abs(float(central - slope[i, c])) < 1e-7


@pytest.mark.parametrize("name", penalties())
def test_block_elimination_is_the_dense_minimiser(name):
    """Also for alpha = 0 (independent clusters) and alpha = 1 (a single cluster)."""
    sums, _, _ = problem()
    penalty = penalties()[name]
    found = exact.minimiser(sums.xx, sums.xy, penalty)
    assert (found.models - dense(sums, penalty)).abs().max() < 1e-9
    slope = exact.times(sums.xx, found.models) - sums.xy + penalty.grad(found.models)
    assert slope.abs().max() < 1e-10


def test_the_two_forms_have_the_same_minimiser_and_centres():
    """At the optimum common = m and w_j = alpha_j m + (1 - alpha_j) m_j; the map is its own inverse."""
    sums, _, _ = problem()
    for name in ("unequal", "some zero", "zero", "lambda"):
        penalty = penalties()[name]
        found = exact.minimiser(sums.xx, sums.xy, penalty)
        models, centres, common = two_level(sums, penalty.gamma, penalty.lambda_)
        assert (found.models - models).abs().max() < 1e-9
        assert (found.centres - centres).abs().max() < 1e-9
        inside, mean = penalty.means(found.models)
        mixed = penalty.alpha * mean + (1 - penalty.alpha) * inside
        assert (found.centres - mixed).abs().max() < 1e-9
        if name != "zero":
            assert (found.common - common).abs().max() < 1e-9 and (mean - common).abs().max() < 1e-9
        again = alpha_from_lambda(penalty.lambda_, penalty.weights)
        assert (again - penalty.alpha).abs().max() < 1e-15
    assert Penalty.of(CLUSTERS, 1.0, lambda_=float("inf")).alpha.eq(1).all()
    assert Penalty.of(CLUSTERS, 1.0, alpha=1.0).lambda_.isinf().all()


def test_the_common_mean_weighs_clusters_by_their_clients():
    """Weights alpha_j G_j; alpha_j alone is another point, far away."""
    gamma = torch.tensor([0.1, 1.0, 5.0])[CLUSTERS]
    penalty = Penalty.of(CLUSTERS, gamma, alpha=[0.3, 0.9, 0.05])
    models = normal(N, D) + 3 * CLUSTERS.unsqueeze(1)
    inside, common = penalty.means(models)
    by_hand = sum(penalty.alpha[CLUSTERS[i]] * penalty.gamma[i] * models[i] for i in range(N)) / sum(
        penalty.alpha[CLUSTERS[i]] * penalty.gamma[i] for i in range(N)
    )
    torch.testing.assert_close(common, by_hand)
    printed = (penalty.alpha * inside).sum(0) / penalty.alpha.sum()
    assert (printed - common).norm() > 0.5


def test_elimination_per_coordinate():
    """One variance per coordinate is the same problem in stretched coordinates; zero ties a coordinate."""
    sums, _, _ = problem()
    spread = torch.tensor([0.5, 2.0, 1e-3, 4.0], dtype=torch.float64)
    found = exact.minimise(sums.xx, sums.xy, CLUSTERS, spread.expand(N, D), 3 * spread.expand(K, D))
    root = spread.sqrt()
    stretched = exact.minimise(
        sums.xx * root * root.unsqueeze(1), sums.xy * root, CLUSTERS,
        torch.ones(N, 1, dtype=torch.float64), torch.full((K, 1), 3.0, dtype=torch.float64),
    )  # fmt: skip
    torch.testing.assert_close(found.models, stretched.models * root, atol=1e-9, rtol=1e-9)
    tied = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    found = exact.minimise(sums.xx, sums.xy, CLUSTERS, tied.expand(N, D), tied.expand(K, D))
    assert (found.models[:, :3] - found.common[:3]).abs().max() < 1e-12


def test_local_single_and_one_centre():
    sums, xs, ys = problem()
    for t, x, y in zip(linear_estimators.local_least_squares(sums.xx, sums.xy), xs, ys, strict=True):
        torch.testing.assert_close(t, torch.linalg.pinv(x) @ y, atol=1e-8, rtol=1e-8)
    x, y = torch.cat(xs), torch.cat(ys)
    torch.testing.assert_close(
        linear_estimators.single_least_squares(sums.xx, sums.xy), torch.linalg.pinv(x) @ y
    )
    lam, identity = 0.6, torch.eye(D, dtype=torch.float64)
    inverse = torch.linalg.inv(sums.xx + lam * identity)
    bar = torch.linalg.solve(identity - lam * inverse.mean(0), exact.times(inverse, sums.xy).mean(0))
    printed = exact.times(inverse, sums.xy + lam * bar)
    torch.testing.assert_close(linear_estimators.one_centre(sums.xx, sums.xy, lam), printed)
    penalty = Penalty.of(CLUSTERS, lam, alpha=1.0)
    torch.testing.assert_close(exact.minimiser(sums.xx, sums.xy, penalty).models, printed)
    alone = Penalty.of(torch.zeros(N, dtype=torch.long), lam, alpha=0.0)
    torch.testing.assert_close(exact.minimiser(sums.xx, sums.xy, alone).models, printed)


def test_cross_validated_pull_is_the_best_of_a_brute_force_grid():
    xs, ys = [normal(8, 3) for _ in range(12)], []
    centre = normal(3)
    ys = [x @ (centre + normal(3)) + normal(8) for x in xs]
    pull = linear_estimators.cross_validated_pull(xs, ys, folds=4, seed=5)

    parts = [linear_estimators.fold_sums(x, y, 4, 5 + i) for i, (x, y) in enumerate(zip(xs, ys, strict=True))]

    def error(lam):
        total = 0.0
        for fold in range(4):
            a = torch.stack([part[0].sum(0) - part[0][fold] for part in parts])
            b = torch.stack([part[1].sum(0) - part[1][fold] for part in parts])
            models = linear_estimators.one_centre(a, b, lam)
            total += sum(
                float(t @ part[0][fold] @ t - 2 * part[1][fold] @ t)
                for t, part in zip(models, parts, strict=True)
            )
        return total

    assert error(pull) <= min(error(lam) for lam in np.geomspace(0.05, 50, 25)) + 1e-3
    sums = linear_estimators.fold_sums(xs[0], ys[0], 4, 5)
    torch.testing.assert_close(sums[0].sum(0), xs[0].mT @ xs[0])


def marginal(i, xs, ys, noise, within, between):
    """GLS of t_i on all rows, the others' parameters integrated out given t_i (the paper's Proposition 5.3)."""
    own, other = CLUSTERS == CLUSTERS[i], CLUSTERS != CLUSTERS[i]
    x, y = torch.cat(xs), torch.cat(ys)
    owner = torch.repeat_interleave(torch.arange(N), torch.tensor([len(part) for part in ys]))
    covariance = noise * torch.eye(len(y), dtype=torch.float64)
    for a in range(N):
        for b in range(N):
            if i in (a, b):
                continue
            same = float(CLUSTERS[a] == CLUSTERS[b])
            k = within * (1 + float(a == b)) + between * float(other[a] & other[b]) * (1 + same)
            covariance[
                torch.meshgrid((owner == a).nonzero()[:, 0], (owner == b).nonzero()[:, 0], indexing="ij")
            ] += k * xs[a] @ xs[b].T
    assert own[i]
    weighted = torch.linalg.solve(covariance, torch.cat([x, y.unsqueeze(1)], 1))
    return torch.linalg.solve(x.T @ weighted[:, :-1], x.T @ weighted[:, -1])


@pytest.mark.parametrize("rows", [[2, 1, 5, 9, 3, 4, 7, 2, 6], [1] * N, [6] * N])
def test_marginal_estimator_is_the_minimiser(rows):
    """For every design, rank deficient or not; so it is a test and not a product."""
    sums, xs, ys = problem(rows)
    noise, within, between = 0.7, 1.3, 2.1
    ones = torch.ones(N, 1, dtype=torch.float64)
    ours = exact.minimise(
        sums.xx / noise,
        sums.xy / noise,
        CLUSTERS,
        within * ones,
        between * torch.ones(K, 1, dtype=torch.float64),
    )
    for i in range(N):
        assert (ours.models[i] - marginal(i, xs, ys, noise, within, between)).abs().max() < 1e-8


def test_scalar_blue_is_the_minimiser():
    """X'X = beta I, unequal beta, noise and within-cluster variances; clusters of one client included."""
    clusters = torch.tensor([0, 1, 1, 2, 2, 2, 3, 1, 2])
    precision, local = 0.1 + normal(N, 1).abs(), normal(N, D)
    within, between = 0.1 + normal(4, 1).abs(), 1.7
    blue = linear_estimators.scalar_blue(local, precision, clusters, within, between)
    identity = torch.eye(D, dtype=torch.float64)
    ours = exact.minimise(
        precision.unsqueeze(-1) * identity, precision * local, clusters, within[clusters],
        torch.full((4, 1), between, dtype=torch.float64),
    )  # fmt: skip
    torch.testing.assert_close(blue, ours.models, atol=1e-12, rtol=1e-12)
    single = linear_estimators.scalar_blue(local[:1], precision[:1], clusters[:1], within[:1], between)
    torch.testing.assert_close(single, local[:1])


def test_point_model_and_james_stein():
    """Risk of the BLUE 3.375, swapped weights 3.585, gain of the positive part .25 / .19 / .010."""
    n, d, runs = 8, 6, 60_000
    generator = torch.Generator().manual_seed(1)
    own, noise = (torch.randn(runs, n, d, generator=generator, dtype=torch.float64) for _ in range(2))
    for coordinate, gain, tolerance in ((0.0, 0.25, 0.012), (0.3, 0.19, 0.012), (2.0, 0.010, 0.004)):
        truth = coordinate + own
        y = truth + noise
        others = (y.sum(1, keepdim=True) - y) / (n - 1)
        blue = (n + 1) / (2 * n) * y + (n - 1) / (2 * n) * others
        swapped = (n - 1) / (2 * n) * y + (n + 1) / (2 * n) * others
        shrunk = linear_estimators.james_stein(y)
        risk = [float((t - truth).square().sum(-1).mean()) for t in (blue, swapped, shrunk)]
        assert abs(risk[0] - 3.375) < 0.02 and abs(risk[1] - 3.585) < 0.02
        assert abs(risk[0] - risk[2] - gain) < tolerance
    scalar = linear_estimators.scalar_blue(
        y[0], torch.ones(n, 1, dtype=torch.float64), torch.zeros(n, dtype=torch.long),
        torch.ones(1, 1, dtype=torch.float64), 1.0,
    )  # fmt: skip
    torch.testing.assert_close(scalar, blue[0])
    plain = linear_estimators.james_stein(y[:5], positive=False)
    assert torch.isfinite(plain).all()
    with pytest.raises(SettingError, match="3 coordinates"):
        linear_estimators.james_stein(y[0, :, :2])


def estimates(m, seed):
    data = hierarchical_linear(rows=m, seed=seed)
    sums = Sums.of(data.xs, data.ys, data.clusters)
    ones = Penalty.of(data.clusters, 1.0, lambda_=1.0)
    models = {
        "local": linear_estimators.local_least_squares(sums.xx, sums.xy),
        "single": linear_estimators.single_least_squares(sums.xx, sums.xy).expand(len(data), -1),
        "ours": exact.minimiser(sums.xx, sums.xy, ones).models,
    }
    return data, sums, {name: (t - data.truth).norm(dim=1) for name, t in models.items()}


@pytest.mark.parametrize(
    ("m", "expected"),
    [
        (10, {"local": (4.49, 0.35), "single": (6.16, 0.45), "one": (4.44, 0.32), "ours": (3.40, 0.15)}),
        (100, {"local": (0.496, 0.02), "single": (6.16, 0.5), "one": (0.494, 0.02), "ours": (0.493, 0.02)}),
    ],
)
def test_distances_of_the_table(m, expected):
    """Published distances on one data set; the tolerance is four standard deviations between data sets."""
    data, sums, distances = estimates(m, seed=11)
    pull = linear_estimators.cross_validated_pull(data.xs, data.ys)
    distances["one"] = (linear_estimators.one_centre(sums.xx, sums.xy, pull) - data.truth).norm(dim=1)
    for name, (centre, tolerance) in expected.items():
        assert abs(float(distances[name].mean()) - centre) < tolerance, name
    assert 0.1 < pull < 1.3


@pytest.mark.parametrize(
    ("m", "ours", "local"), [(1, 5.54, 5.92), (5, 4.26, 5.45), (25, 1.55, 2.09), (50, 0.790, 0.811)]
)
def test_distances_over_m(m, ours, local):
    """The published figure on one data set: ours beats local and single in mean squared error."""
    _, _, distances = estimates(m, seed=12)
    assert abs(float(distances["ours"].mean()) / ours - 1) < 0.05
    assert abs(float(distances["local"].mean()) / local - 1) < 0.06
    errors = {name: float(value.square().mean()) for name, value in distances.items()}
    assert errors["ours"] < min(errors["local"], errors["single"])


@pytest.mark.slow
@pytest.mark.parametrize("m", [1, 5, 10, 25, 50, 100, 200])
def test_ours_beats_both_on_every_data_set(m):
    """Ours wins on 8 data sets of 8."""
    gains = []
    for seed in range(8):
        errors = {name: float(value.square().mean()) for name, value in estimates(m, seed)[2].items()}
        assert errors["ours"] < min(errors["local"], errors["single"])
        gains.append(1 - errors["ours"] / errors["local"])
    expected = {1: 14, 5: 39, 10: 42, 25: 49, 50: 5.6, 100: 1.5, 200: 0.6}[m]
    assert abs(100 * np.mean(gains) / expected - 1) < 0.2


def test_expected_squared_distances():
    """2d(1-m/d) + m/(d-m-1) below d rows, d/(m-d-1) above; about 39 for one model."""
    for m, expected in ((10, 21.11), (100, 0.2532)):
        local, single = [], []
        for seed in range(3):
            _, _, distances = estimates(m, seed)
            local.append(float(distances["local"].square().mean()))
            single.append(float(distances["single"].square().mean()))
        assert abs(np.mean(local) / expected - 1) < 0.06
        assert abs(np.mean(single) / 39 - 1) < 0.1


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"gamma": -1.0, "lambda_": 1.0}, "gamma"),
        ({"gamma": 0.0, "lambda_": 1.0}, "gamma"),
        ({"gamma": 1.0, "lambda_": -2.0}, "negative"),
        ({"gamma": 1.0, "lambda_": float("nan")}, "negative"),
        ({"gamma": 1.0, "alpha": 1.5}, "between 0 and 1"),
        ({"gamma": 1.0}, "either"),
        ({"gamma": [1.0, 2.0], "alpha": 0.5}, "one for each of 9"),
    ],
)
def test_bad_pulls(settings, match):
    with pytest.raises(SettingError, match=match):
        Penalty.of(CLUSTERS, settings.pop("gamma"), **settings)


def test_bad_clusters():
    with pytest.raises(SettingError, match="client 1 has no cluster"):
        Penalty.of([0, -1, 1], 1.0, alpha=0.5)
    with pytest.raises(SettingError, match="cluster 1 has no clients"):
        Penalty.of([0, 2, 2], 1.0, alpha=0.5)
    with pytest.raises(SettingError, match="prox = 0"):
        linear_estimators.one_centre(torch.eye(2).expand(3, 2, 2), torch.ones(3, 2), 0.0)


def test_a_matrix_is_decomposed_once_for_its_inverse(monkeypatch):
    """Solving for every column of the identity would decompose it as often as it has columns."""
    plain, seen = torch.linalg.eigh, []
    monkeypatch.setattr(torch.linalg, "eigh", lambda a: seen.append(tuple(a.shape)) or plain(a))
    root = normal(3, 6, 4)
    for a in (root @ root.mT, root.mT @ root):  # of rank 4, and of full rank
        assert torch.allclose(exact.pseudo_inverse(a), torch.linalg.pinv(a, hermitian=True), atol=1e-9)
    assert seen == [(3, 6, 6), (3, 4, 4)]

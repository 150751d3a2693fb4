"""Variances of the hierarchical linear model: the likelihood against the dense normal density, and estimates."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from coterie._core.errors import DataError, SettingError
from coterie.data.generate import hierarchical_linear
from coterie.theory.deviance_search import lowest
from coterie.theory.mixed_likelihood import deviance, maximum_likelihood
from coterie.theory.robust import on_another_scale
from coterie.theory.variance_components import (
    Sums,
    moments,
    pattern,
)


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: a second thread costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


RNG = np.random.default_rng(8)
CLUSTERS = torch.tensor([0, 1, 1, 2, 2, 0])


def normal(*shape):
    return torch.from_numpy(RNG.normal(size=shape))


def small():
    xs = [normal(m, 3) for m in (2, 5, 1, 7, 4, 6)]
    ys = [normal(len(x)) + x.sum(1) for x in xs]
    return xs, ys


def dense_covariance(xs, noise, within, between):
    x = torch.block_diag(*xs)
    n, d = len(xs), xs[0].shape[1]
    prior = torch.zeros(n * d, n * d, dtype=torch.float64)
    for a in range(n):
        for b in range(n):
            if CLUSTERS[a] == CLUSTERS[b]:
                block = torch.diag(between + (within[CLUSTERS[a]] if a == b else 0 * between))
                prior[a * d : (a + 1) * d, b * d : (b + 1) * d] = block
    return x @ prior @ x.T + noise * torch.eye(len(x), dtype=torch.float64)


@pytest.mark.parametrize("zero", [False, True])
def test_deviance_is_the_normal_density(zero):
    xs, ys = small()
    noise, within, between = 0.6, 0.1 + normal(3, 3).abs(), 0.1 + normal(3).abs()
    if zero:
        within[:, 1], between[0] = 0.0, 0.0
    covariance = dense_covariance(xs, noise, within, between)
    x, y = torch.cat(xs), torch.cat(ys)
    weighted = torch.linalg.solve(covariance, x)
    centre = torch.linalg.solve(x.T @ weighted, weighted.T @ y)
    expected = -2 * multivariate_normal(mean=(x @ centre).numpy(), cov=covariance.numpy()).logpdf(y.numpy())
    sums = Sums.of(xs, ys, CLUSTERS)
    found = deviance(sums, torch.tensor(noise, dtype=torch.float64), within, between)
    assert abs(float(found) - expected) < 1e-8
    restricted = deviance(sums, torch.tensor(noise, dtype=torch.float64), within, between, restricted=True)
    assert abs(float(restricted - found) - float(torch.logdet(x.T @ weighted))) < 1e-8


def test_maximum_likelihood_cannot_be_improved():
    data = hierarchical_linear(
        clusters=6, clients=8, features=3, rows=7, within=0.7, between=1.5, noise=0.5, seed=2
    )
    sums = Sums.of(data.xs, data.ys, data.clusters)
    for effects, per_cluster in (("same", False), ("each", False), ("same", True)):
        found = maximum_likelihood(sums, effects, per_cluster=per_cluster)
        noise = torch.tensor(found.noise, dtype=torch.float64)
        best = float(deviance(sums, noise, found.within, found.between))
        for factor in (0.9, 1.1):
            assert float(deviance(sums, factor * noise, found.within, found.between)) > best
            assert float(deviance(sums, noise, found.within, factor * found.between)) > best
            for j in range(6 if per_cluster else 1):
                within = found.within.clone()
                within[j if per_cluster else slice(None)] *= factor
                assert float(deviance(sums, noise, within, found.between)) > best


@pytest.mark.parametrize("method", [maximum_likelihood, moments])
def test_estimates_are_near_the_truth(method):
    """Estimated on many clients; unequal rows, so that the method of moments has to weigh them."""
    rows = [3 + (7 * i) % 25 for i in range(600)]
    data = hierarchical_linear(
        clusters=60, clients=10, features=4, rows=rows, within=0.5, between=1.5, noise=2.0, seed=4
    )
    found = method(Sums.of(data.xs, data.ys, data.clusters))
    assert abs(found.noise / 4.0 - 1) < 0.05
    assert abs(float(found.within[0, 0]) / 0.25 - 1) < 0.2
    assert abs(float(found.between[0]) / 2.25 - 1) < 0.35


@pytest.mark.parametrize("method", [maximum_likelihood, moments])
def test_per_cluster_variances(method):
    """s_j^2 = 0.09 in the first cluster, 4 in the second."""
    generator = torch.Generator().manual_seed(0)
    clusters = torch.repeat_interleave(torch.arange(2), 150)
    spread = torch.tensor([0.3, 2.0], dtype=torch.float64)[clusters].unsqueeze(1)
    truth = 1 + spread * torch.randn(300, 2, generator=generator, dtype=torch.float64)
    xs = [torch.randn(8, 2, generator=generator, dtype=torch.float64) for _ in range(300)]
    ys = [
        x @ t + torch.randn(8, generator=generator, dtype=torch.float64)
        for x, t in zip(xs, truth, strict=True)
    ]
    found = method(Sums.of(xs, ys, clusters), per_cluster=True)
    assert abs(float(found.within[0, 0]) - 0.09) < 0.06 and abs(float(found.within[1, 0]) / 4 - 1) < 0.25


def test_moments_are_unbiased():
    """The mean over many small data sets is the truth (before clipping matters)."""
    found = []
    for seed in range(150):
        data = hierarchical_linear(clusters=4, clients=3, features=2, rows=6, between=2.0, seed=seed)
        estimate = moments(Sums.of(data.xs, data.ys, data.clusters))
        found.append([estimate.noise, float(estimate.within[0, 0]), float(estimate.between[0])])
    mean, error = np.mean(found, 0), np.std(found, 0) / math.sqrt(150)
    assert (abs(mean - [1.0, 1.0, 4.0]) < 4 * error).all(), mean


def test_models_are_the_best_linear_predictors():
    """E[t_i | y] with the common centre at its generalised least squares value, by dense algebra."""
    xs, ys = small()
    sums = Sums.of(xs, ys, CLUSTERS)
    found = maximum_likelihood(sums, noise=0.5)
    within, between = found.within, found.between
    covariance = dense_covariance(xs, 0.5, within, between)
    x, y = torch.cat(xs), torch.cat(ys)
    weighted = torch.linalg.solve(covariance, x)
    centre = torch.linalg.solve(x.T @ weighted, weighted.T @ y)
    residual = torch.linalg.solve(covariance, y - x @ centre)
    parts = residual.split([len(part) for part in ys])
    for i, model in enumerate(found.models(sums)):
        expected = centre.clone()
        for a, part in enumerate(parts):
            if CLUSTERS[a] == CLUSTERS[i]:
                expected += (between + (within[CLUSTERS[i]] if a == i else 0)) * (xs[a].T @ part)
        assert (model - expected).abs().max() < 1e-8


def test_only_the_intercept_varies():
    assert pattern("intercept", 3).tolist() == [-1, -1, 0]
    data = hierarchical_linear(clusters=5, clients=6, features=2, rows=9, seed=1)
    xs = [torch.cat([x, torch.ones(9, 1, dtype=torch.float64)], 1) for x in data.xs]
    found = maximum_likelihood(Sums.of(xs, data.ys, data.clusters), "intercept")
    assert found.within[:, :2].eq(0).all() and found.between[:2].eq(0).all()
    models = found.models(Sums.of(xs, data.ys, data.clusters))
    assert (models[:, :2] - models[0, :2]).abs().max() < 1e-12
    assert moments(Sums.of(xs, data.ys, data.clusters), "intercept").within[:, :2].eq(0).all()


def test_no_difference_between_clients_gives_zero_not_nan():
    generator = torch.Generator().manual_seed(3)
    xs = [torch.randn(9, 2, generator=generator, dtype=torch.float64) for _ in range(6)]
    ys = [x.sum(1) for x in xs]
    ys = [y + 0.1 * torch.sin(37 * y) for y in ys]
    found = maximum_likelihood(Sums.of(xs, ys, CLUSTERS))
    models = found.models(Sums.of(xs, ys, CLUSTERS))
    assert torch.isfinite(models).all() and (models - models[0]).abs().max() < 1e-2


def test_clusters_nearer_than_chance_have_no_variance_between_them():
    """The moment is negative here: the clusters' means agree, and their clients do not."""
    effects = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    xs = [torch.ones(40, 1, dtype=torch.float64) for _ in effects]
    ys = [e + 0.1 * torch.randn(40, generator=generator, dtype=torch.float64) for e in effects]
    found = moments(Sums.of(xs, ys, CLUSTERS))
    assert found.between.item() == 0.0 and found.within.min().item() > 1.0


def test_what_cannot_be_estimated_is_an_error():
    data = hierarchical_linear(clusters=2, clients=3, features=5, rows=4)
    sums = Sums.of(data.xs, data.ys, data.clusters)
    with pytest.raises(DataError, match="more rows than parameters"):
        moments(sums)
    assert moments(sums, noise=1.0).noise == 1.0
    with pytest.raises(SettingError, match="method of moments"):
        moments(sums, "each")
    with pytest.raises(SettingError, match="effects"):
        maximum_likelihood(sums, "slopes")


def test_a_search_turns_back_where_matrices_are_singular():
    """A trial step that goes too far costs nothing but the step."""

    def deviance(point):
        if float(point.detach()[0]) > 4:
            raise torch.linalg.LinAlgError("singular")
        return ((point - 3) ** 2).sum()

    point, _ = lowest(deviance, torch.tensor([-6.0]).double(), None, [(-9.0, 9.0)])
    assert abs(float(point[0]) - 3) < 1e-3


def test_where_many_clients_are_on_another_scale_none_is() -> None:
    """Features that only some clients have say much there, and nothing elsewhere; that is no error of units."""
    for odd, named in ((0, 0), (2, 2), (3, 0), (4, 0)):
        squares = torch.full((8, 2), 10.0)
        squares[:odd, 0] = 1e7
        assert int(on_another_scale(squares, torch.full((8, 1), 20.0)).sum()) == named

"""Finite mixtures with random effects: dense densities, a brute-force maximum, posterior means, numbers of clusters."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from coterie import Federation, fit, models
from coterie._core.errors import SettingError
from coterie.algorithms import make
from coterie.theory.mixture import best_mixture, client_likelihoods, mixture
from coterie.theory.variance_components import Sums, pattern

CENTRES = np.array([[2.0, -1.0], [-2.0, 1.0], [1.0, 3.0]])


def world(seed, clusters=2, clients=14, rows=5):
    """Rows of clients in unknown clusters; slope and intercept vary inside them by 0.5."""
    rng = np.random.default_rng(seed)
    label = np.arange(clients) % clusters
    truth = CENTRES[label] + 0.5 * rng.normal(size=(clients, 2))
    xs = [np.c_[rng.normal(size=rows), np.ones(rows)] for _ in label]
    ys = [x @ t + rng.normal(size=rows) for x, t in zip(xs, truth, strict=True)]
    return xs, ys, label


def summed(xs, ys):
    return Sums.of(
        [torch.tensor(x) for x in xs], [torch.tensor(y) for y in ys], torch.zeros(len(xs), dtype=torch.long)
    )


def dense(xs, ys, centres, noise, spread):
    """Log densities of whole clients, [n, K], from covariances of their rows."""
    return np.array(
        [
            [
                multivariate_normal.logpdf(y, x @ w, x @ np.diag(spread) @ x.T + noise * np.eye(len(y)))
                for w in centres
            ]
            for x, y in zip(xs, ys, strict=True)
        ]
    )


@pytest.mark.parametrize("rows", [1, 5])
def test_likelihoods_are_those_of_dense_covariances(rows):
    xs, ys, _ = world(0, rows=rows)
    found = client_likelihoods(
        summed(xs, ys), torch.tensor(CENTRES), torch.tensor(0.7).double(), torch.tensor([0.4, 0.0]).double()
    )
    np.testing.assert_allclose(found.numpy(), dense(xs, ys, CENTRES, 0.7, [0.4, 0.0]), atol=1e-9)


def test_the_fit_is_the_maximum_that_brute_force_finds():
    """Every number is free in a search over dense densities, from the truth and from the fit."""
    xs, ys, _ = world(1)
    found = mixture(summed(xs, ys), pattern("same", 2), 2)

    def lost(point):
        centres, (noise, spread), logit = point[:4].reshape(2, 2), np.exp(point[4:6]), point[6]
        shares = -np.logaddexp(0.0, np.array([-logit, logit]))
        return -logsumexp(shares + dense(xs, ys, centres, noise, [spread, spread]), axis=1).sum()

    order = np.argsort(-found.centres[:, 0].numpy())
    shares = found.shares.numpy()[order]
    own = np.r_[
        found.centres.numpy()[order].ravel(),
        np.log([found.noise, float(found.spread[0])]),
        np.log(shares[0] / shares[1]),
    ]
    assert found.likelihood == pytest.approx(-lost(own), abs=1e-6)
    best = min(
        (minimize(lost, start, method="BFGS") for start in (np.r_[CENTRES[:2].ravel(), 0.0, -1.4, 0.0], own)),
        key=lambda one: one.fun,
    )
    assert found.likelihood == pytest.approx(-best.fun, abs=1e-4)
    np.testing.assert_allclose(own, best.x, atol=5e-3)


@pytest.mark.quick("2")
@pytest.mark.parametrize("clusters", [1, 2, 3])
def test_the_evidence_finds_the_number_of_clusters(clusters):
    xs, ys, label = world(1000 + clusters, clusters, clients=24, rows=8)
    found = best_mixture(summed(xs, ys), pattern("same", 2))
    assert len(found.shares) == clusters
    mine = found.membership.argmax(1).numpy()
    assert len({(a, b) for a, b in zip(label, mine, strict=True)}) == clusters


def test_clients_get_their_posterior_means():
    """E[t | y] from the joint normal density of parameters and rows in each cluster, with the fitted numbers."""
    xs, ys, _ = world(3, clients=16)
    fed = Federation.from_arrays([x[:, :1] for x in xs], ys, models.linear(intercept=True))
    method = make("hierarchical", grouping="mixture", effects="same", clusters_count=2)
    run = fit(fed, method, rounds=1, evaluate_every=0)
    s = run.state
    noise, spread, centres = s.noise, s.within[0].numpy(), s.centres.numpy()
    chances = np.log(s.shares.numpy()) + dense(xs, ys, centres, noise, spread)
    chances = np.exp(chances - logsumexp(chances, axis=1, keepdims=True))
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        gain = np.diag(spread) @ x.T @ np.linalg.inv(x @ np.diag(spread) @ x.T + noise * np.eye(len(y)))
        means = [w + gain @ (y - x @ w) for w in centres]
        np.testing.assert_allclose(run.personal[i].numpy(), chances[i] @ means, atol=2e-4)
    seen = run.algorithm.observe(run.fed, s)
    assert seen["cluster"].shape == seen["membership"].shape == (16,)


@pytest.mark.slow
def test_classes_in_unknown_clusters():
    """Two clusters with opposite slopes: memberships are right, and newcomers join the right one."""
    rng = np.random.default_rng(4)
    slope = np.where(np.arange(16) % 2 == 0, 2.0, -2.0)
    xs = [rng.normal(size=(40, 1)) for _ in slope]
    ys = [
        (rng.uniform(size=40) < 1 / (1 + np.exp(-x[:, 0] * w))).astype(int)
        for x, w in zip(xs, slope, strict=True)
    ]
    fed = Federation.from_arrays(xs[:12], ys[:12], models.logistic(intercept=True))
    run = fit(fed, make("hierarchical", grouping="mixture"), rounds=12, evaluate_every=0)
    assert len(run.state.shares) == 2 and run.state.done
    assert (np.sign(run.personal[:, 0].numpy()) == np.sign(slope[:12])).all()
    new = Federation.from_arrays(xs[12:], ys[12:], models.logistic(intercept=True))
    joined = run.algorithm.adapt(new, run.state, run.personal, 1)
    assert (np.sign(joined[:, 0].numpy()) == np.sign(slope[12:])).all()


def logistic_world(seed, clients, rows=10, variance=1.0):
    """Clients in two clusters with opposite slopes, whose intercepts vary inside them."""
    rng = np.random.default_rng([seed, 25])
    slope, own = np.where(np.arange(clients) % 2 == 0, 3.0, -3.0), variance**0.5 * rng.normal(size=clients)
    xs = [rng.normal(size=(rows, 1)) for _ in slope]
    zs = [w * x[:, 0] + a for x, w, a in zip(xs, slope, own, strict=True)]
    return xs, [(rng.uniform(size=rows) < 1 / (1 + np.exp(-z))).astype(int) for z in zs]


def logistic_mixture(xs, ys):
    fed = Federation.from_arrays(xs, ys, models.logistic(intercept=True))
    method = make("hierarchical", grouping="mixture", effects="intercept", clusters_count=2)
    return fit(fed, method, rounds=40, evaluate_every=0)


@pytest.mark.slow
def test_classes_are_those_of_brute_force_integration():
    """The likelihood on a fixed grid of effects, maximised over shares, both centres and the variance."""
    xs, ys = logistic_world(0, clients=30)
    run = logistic_mixture(xs, ys)
    s = run.state
    assert s.done
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    x, sign = np.stack(xs)[..., 0], 2 * np.stack(ys) - 1

    def clients(v):
        """Log share and log likelihood of each client in each cluster."""
        found = []
        for slope, level, share in ((v[0], v[1], v[5]), (v[2], v[3], -v[5])):
            z = slope * x[:, None] + level + v[4] * nodes[:, None]
            inside = logsumexp(
                -np.logaddexp(0, -sign[:, None] * z).sum(-1), b=weights / weights.sum(), axis=1
            )
            found.append(inside - np.logaddexp(0, -share))
        return np.stack(found, 1)

    logit = float((s.shares[0] / s.shares[1]).log())
    found = np.array([*s.centres.flatten().tolist(), abs(float(s.psi)), logit])
    best = minimize(lambda v: -logsumexp(clients(v), axis=1).sum(), found, options={"gtol": 1e-7})
    assert s.height == pytest.approx(-best.fun, abs=1e-4)
    assert (np.abs(found - best.x) / np.sqrt(np.diag(best.hess_inv))).max() < 5e-3
    chances = clients(best.x)
    chances = np.exp(chances - logsumexp(chances, axis=1, keepdims=True))
    np.testing.assert_allclose(s.membership.numpy(), chances, atol=1e-3)


@pytest.mark.slow
def test_variances_of_classes_inside_unknown_clusters_are_unbiased():
    """True variance 1, 100 clients with 10 rows in two clusters: the mean over worlds is within 10 %."""
    found = [float(logistic_mixture(*logistic_world(100 + k, 100)).state.within[0, -1]) for k in range(12)]
    assert abs(np.mean(found) - 1) < 0.1 + 2 * np.std(found) / len(found) ** 0.5, found


def test_settings_that_do_not_fit_a_mixture():
    xs, ys, _ = world(0)
    fed = Federation.from_arrays(xs, ys, models.linear())
    with pytest.raises(SettingError, match="noise = 'client' is not offered with grouping = 'mixture'"):
        fit(fed, make("hierarchical", grouping="mixture", noise="client"), rounds=1)
    run = fit(fed, make("hierarchical", grouping="mixture", clusters_count=1), rounds=1, evaluate_every=0)
    with pytest.raises(SettingError, match="not offered with grouping = 'mixture'"):
        run.variances(0.9)

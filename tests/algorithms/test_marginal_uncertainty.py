"""Intervals and tests of classes: correlated effects against brute force, clusters against models of one level."""

import numpy as np
import pytest
import torch
from scipy.special import expit, logsumexp
from scipy.stats import norm

from coterie import Federation, fit, models
from coterie.algorithms import make
from coterie.theory.uncertainty import boundary_chance


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def world(seed=0, clusters=10, clients=4, rows=12, between=1.0):
    """Classes of clients in clusters: slopes and intercepts vary between clients, intercepts between clusters too."""
    rng = np.random.default_rng(seed)
    label = np.repeat(np.arange(clusters), clients)
    own = rng.normal(size=(len(label), 2)) @ np.array([[0.8, 0.4], [0.0, 0.6]])
    own[:, 1] += between * rng.normal(size=clusters)[label]
    xs = [rng.normal(size=(rows, 1)) for _ in label]
    zs = [x[:, 0] * (1 + a[0]) + a[1] for x, a in zip(xs, own, strict=True)]
    return xs, [(rng.uniform(size=rows) < expit(z)).astype(int) for z in zs], label.tolist()


def trained(xs, ys, clusters=None, **settings):
    fed = Federation.from_arrays(xs, ys, models.logistic(intercept=True), clusters=clusters)
    run = fit(fed, make("hierarchical", choose="ml", **settings), rounds=40, evaluate_every=0)
    assert run.state.done
    return run


@pytest.mark.slow
def test_correlated_effects_have_the_intervals_of_brute_force_integration():
    """Second derivatives of the likelihood on a fixed grid; variances in logarithms, the correlation in its arctanh."""
    xs, ys, _ = world(between=0.0)
    run = trained(xs, ys, grouping="one", effects="each", covariance="full")
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    grid = np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2)
    mass = np.outer(weights, weights).reshape(-1) / weights.sum() ** 2
    x, sign = np.stack(xs)[..., 0], 2 * np.stack(ys) - 1

    def likelihood(v):
        """Of both common coefficients, logarithms of both variances, and the arctanh of the correlation."""
        first, second = np.exp(v[2] / 2), np.exp(v[3] / 2)
        root = np.array([[first, 0.0], [np.tanh(v[4]) * second, np.sqrt(1 - np.tanh(v[4]) ** 2) * second]])
        t = v[:2] + grid @ root.T
        z = t[:, 0, None] * x[:, None] + t[:, 1, None]
        return logsumexp(-np.logaddexp(0, -sign[:, None] * z).sum(-1), b=mass, axis=1).sum()

    found = run.variances(0.9)
    assert found["variance"].to_list() == ["client 0", "client 1", "correlation 0, 1"]
    first, second, both = found["estimate"]
    point = np.array([*run.state.x.tolist(), np.log(first), np.log(second), np.arctanh(both)])
    moves = 0.02 * np.eye(5)
    bent = [
        [sum(i * j * likelihood(point + i * a + j * b) for i in (1, -1) for j in (1, -1)) for b in moves]
        for a in moves
    ]
    error = np.sqrt(np.diag(np.linalg.inv(-np.array(bent) / (4 * 0.02**2))))[2:]
    width = norm.ppf(0.95) * error
    lower, upper = ([*np.exp(point[2:4] + s * width[:2]), np.tanh(point[4] + s * width[2])] for s in (-1, 1))
    np.testing.assert_allclose(found["lower"], lower, rtol=0.03, atol=0.02)
    np.testing.assert_allclose(found["upper"], upper, rtol=0.03, atol=0.02)
    pooled = models.logistic(intercept=True).fit_to(
        torch.tensor(np.concatenate(xs)), torch.tensor([0, 1] * 240)
    )
    rows = pooled.prepare(torch.tensor(np.concatenate(xs))), torch.tensor(np.concatenate(ys))
    weights = torch.ones(len(rows[1]), dtype=torch.float64)
    w = pooled.solve(torch.zeros(2, dtype=torch.float64), *rows, weights, 1e-9)
    apart = 2 * (likelihood(point) + float(pooled.loss(w, *rows, weights)))
    assert run.tests()["clients differ"] == pytest.approx(boundary_chance(apart, 3), rel=0.05)
    effects = run.effects(0.9)
    assert (effects["lower"] < effects["estimate"]).all() and effects["shrinkage"].is_between(0, 1).all()
    assert np.abs(effects["estimate"].to_numpy().reshape(-1, 2) - run.personal.numpy()).max() < 1e-3


@pytest.mark.slow
def test_classes_in_clusters_have_intervals_and_tests():
    """Without clusters the model has one level; without clients those of a cluster are one client."""
    xs, ys, label = world(3, clusters=14, clients=5)
    run = trained(xs, ys, label, effects="intercept")
    one = trained(xs, ys, grouping="one", effects="intercept")
    merged = [
        np.concatenate([v for v, at in zip(part, label, strict=True) if at == k])
        for part in (xs, ys)
        for k in range(14)
    ]
    whole = trained(merged[:14], merged[14:], grouping="one", effects="intercept")
    before, found = run.personal.clone(), run.tests()
    assert found["clusters differ"] == pytest.approx(
        boundary_chance(2 * (run.state.height - one.state.height), 1), rel=1e-2
    )
    expected = boundary_chance(2 * (run.state.height - whole.state.height), 1)
    assert np.log(found["clients differ"]) == pytest.approx(np.log(expected), rel=0.1), (
        "Laplace at the clusters' level"
    )
    assert torch.equal(run.personal, before)
    found = run.variances(0.9)
    assert found["variance"].to_list() == ["client 0", "cluster 0"]
    assert ((found["lower"] < found["estimate"]) & (found["estimate"] < found["upper"])).all()
    assert found["estimate"][1] == pytest.approx(float(run.state.between.max()), rel=0.02)


@pytest.mark.slow
def test_clusters_with_variances_of_their_own_have_intervals():
    xs, ys, _ = world(4, clusters=2, clients=30, between=0.0)
    run = trained(xs, ys, [0] * 30 + [1] * 30, effects="intercept", variances="cluster")
    found = run.variances(0.9)
    assert found["variance"].to_list() == ["cluster 0: client 0", "cluster 1: client 0", "cluster 0"]
    assert ((found["lower"][:2] < found["estimate"][:2]) & (found["estimate"][:2] < found["upper"][:2])).all()
    assert set(run.tests()) == {"clients differ", "clusters differ"}

"""Uncertainty of correlated effects, variances of clusters and several noises, against dense likelihoods."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from coterie import Federation, fit, models
from coterie.algorithms import make


@pytest.fixture(scope="module")
def rows():
    """Correlated intercepts and slopes; the noise of the second half is three times that of the first."""
    rng = np.random.default_rng(1)
    effects = rng.multivariate_normal([0.5, 2.0], [[0.5, 0.2], [0.2, 0.8]], size=20)
    xs = [rng.normal(size=(8, 1)) for _ in effects]
    noise = np.repeat([0.5, 1.5], 10)
    ys = [x[:, 0] * t[0] + t[1] + s * rng.normal(size=8) for x, t, s in zip(xs, effects, noise, strict=True)]
    return xs, ys


def trained(rows, clusters=None, **settings):
    fed = Federation.from_arrays(*rows, models.linear(intercept=True), clusters=clusters)
    grouping = "one" if clusters is None else "known"
    return fit(
        fed, make("hierarchical", grouping=grouping, effects="each", **settings), rounds=1, evaluate_every=0
    )


def dense_deviance(rows, noise, covariance):
    """-2 log likelihood from covariances of rows, the common coefficients at their best."""
    xs = [np.c_[x, np.ones(len(x))] for x in rows[0]]
    noise = np.broadcast_to(noise, len(xs))
    inverses = [
        np.linalg.inv(x @ covariance @ x.T + s * np.eye(len(x))) for x, s in zip(xs, noise, strict=True)
    ]
    both = list(zip(xs, inverses, rows[1], strict=True))
    common = np.linalg.solve(sum(x.T @ v @ x for x, v, _ in both), sum(x.T @ v @ y for x, v, y in both))
    return sum((y - x @ common) @ v @ (y - x @ common) - np.linalg.slogdet(v)[1] for x, v, y in both)


def test_variances_and_correlation_have_the_errors_of_a_dense_likelihood(rows):
    """Second derivatives by differences, in logarithms and the inverse hyperbolic tangent of the correlation."""
    found = trained(rows, covariance="full").variances(0.9)
    names = found["variance"].to_list()
    assert names == ["noise", "client 0", "client 1", "correlation 0, 1"]
    middle = found["estimate"].to_numpy()
    point = np.r_[np.log(middle[:3]), np.arctanh(middle[3])]

    def deviance(point):
        sd, r = np.exp(0.5 * point[1:3]), np.tanh(point[3])
        return dense_deviance(rows, np.exp(point[0]), np.outer(sd, sd) * np.array([[1.0, r], [r, 1.0]]))

    step, unit = 1e-3, 1e-3 * np.eye(4)
    slopes = [(deviance(point + u) - deviance(point - u)) / (2 * step) for u in unit]
    np.testing.assert_allclose(slopes, 0, atol=1e-2)
    bent = np.array(
        [
            [
                deviance(point + u + v)
                - deviance(point + u - v)
                - deviance(point - u + v)
                + deviance(point - u - v)
                for u in unit
            ]
            for v in unit
        ]
    ) / (4 * step**2)
    error = norm.ppf(0.95) * np.sqrt(np.diag(np.linalg.inv(0.5 * bent)))
    ends = point + np.array([-1, 1])[:, None] * error
    wanted = np.concatenate([np.exp(ends[:, :3]), np.tanh(ends[:, 3:])], 1)
    np.testing.assert_allclose(found["lower"].to_numpy(), wanted[0], rtol=0.01, atol=1e-3)
    np.testing.assert_allclose(found["upper"].to_numpy(), wanted[1], rtol=0.01, atol=1e-3)


@pytest.mark.slow
def test_noises_of_clusters_have_intervals_and_widen_predictions(rows):
    run = trained(rows, clusters=[0] * 10 + [1] * 10, noise="cluster")
    found = {row["variance"]: row for row in run.variances(0.9).to_dicts()}
    assert found["noise 0"]["lower"] < 0.25 < found["noise 0"]["upper"]
    assert found["noise 1"]["lower"] < 2.25 < found["noise 1"]["upper"]
    known = run.intervals(0.9)
    calm, loud = (known.rows(run.fed.names[k], torch.zeros(1, 1)).diff().item() for k in (0, 19))
    assert loud > 2 * calm
    assert len(run.effects(0.9)) == 40


@pytest.mark.slow
def test_restricted_fits_report_their_own_estimates(rows):
    run = trained(rows, choose="reml")
    found = run.variances(0.9)["estimate"].to_list()
    np.testing.assert_allclose(found, [run.state.noise, *run.state.within[0].tolist()], rtol=1e-3)


@pytest.mark.slow
def test_a_stranger_does_not_widen_intervals(rows):
    """One client's targets times 1000: variances are those of the others."""
    clean = trained(rows).variances(0.9)["estimate"].to_list()
    xs, ys = rows
    odd = trained((xs, [*ys[:-1], 1000 * ys[-1]]))
    assert odd.state.trust[-1].item() == 0
    found = odd.variances(0.9)["estimate"].to_list()
    np.testing.assert_allclose(found, clean, rtol=0.6)
    np.testing.assert_allclose(found, [odd.state.noise, *odd.state.within[0].tolist()], rtol=1e-3)

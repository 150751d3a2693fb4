"""Algorithms against closed forms for least squares and brute-force loops."""

import numpy as np
import pytest
import torch

from coterie import Federation, fit, models
from coterie.algorithms import Ditto, make

D, SIZES = 4, (3, 8, 20, 33, 50)
RNG = np.random.default_rng(0)
XS = [RNG.normal(size=(n, D)) for n in SIZES]
YS = [x @ (1 + RNG.normal(size=D)) + 0.3 * RNG.normal(size=len(x)) for x in XS]
SHARE = np.array(SIZES) / sum(SIZES)


def world(**options):
    return Federation.from_arrays(XS, YS, model=models.linear(), clusters=[0, 0, 1, 1, 1], **options)


def spectrum(x):
    """S = X'X/n and X'y/n of each client through numpy, independent of the engine."""
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    return values, vectors


def filtered(x, function):
    values, vectors = spectrum(x)
    return vectors @ np.diag(function(values)) @ vectors.T


def fedavg_limit(lr, steps, share=SHARE):
    """theta_0 = (sum p g(S))^-1 sum p h(S) X'y/n with g(s) = 1-(1-lr s)^steps, h = g/s."""
    left = sum(p * filtered(x, lambda s: 1 - (1 - lr * s) ** steps) for p, x in zip(share, XS, strict=True))
    right = sum(
        p * filtered(x, lambda s: (1 - (1 - lr * s) ** steps) / np.maximum(s, 1e-300)) @ (x.T @ y / len(x))
        for p, x, y in zip(share, XS, YS, strict=True)
    )
    return np.linalg.solve(left, right)


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_fedavg_reaches_its_fixed_point(steps, weighting):
    share = SHARE if weighting == "size" else np.full(len(SIZES), 1 / len(SIZES))
    run = fit(world(), make("fedavg", lr=0.1, steps=steps, batch=0, weighting=weighting), rounds=600)
    np.testing.assert_allclose(run.state.x, fedavg_limit(0.1, steps, share), atol=1e-10)
    assert torch.equal(run.personal, run.state.x.expand(len(SIZES), -1))


def test_fedavg_with_one_step_is_gradient_descent():
    run = fit(world(), make("fedavg", lr=0.1, steps=1, server_lr=0.7, batch=0), rounds=9)
    w = np.zeros(D)
    for _ in range(9):
        grads = [x.T @ (x @ w - y) / len(x) for x, y in zip(XS, YS, strict=True)]
        w = w - 0.7 * 0.1 * sum(p * g for p, g in zip(SHARE, grads, strict=True))
    np.testing.assert_allclose(run.state.x, w, atol=1e-13)


def test_local_reaches_the_minimum_norm_solution():
    run = fit(world(), make("local", lr=0.1, steps=50, batch=0), rounds=800)
    for w, x, y in zip(run.personal, XS, YS, strict=True):
        np.testing.assert_allclose(w, np.linalg.pinv(x) @ y, atol=1e-7)
    assert run.fed.ledger.total("bytes_up") == run.fed.ledger.total("bytes_down") == 0


def test_fine_tuned_filters_the_residual():
    """theta_i = theta_0 + f(S)/s X'(y - X theta_0)/n with f(s) = 1-(1-a s)^P."""
    run = fit(
        world(), make("fine-tuned", lr=0.1, steps=1, batch=0, tuning_lr=0.2, tuning_steps=6), rounds=600
    )
    centre = fedavg_limit(0.1, 1)
    for w, x, y in zip(run.personal, XS, YS, strict=True):
        step = filtered(x, lambda s: (1 - (1 - 0.2 * s) ** 6) / np.maximum(s, 1e-300))
        np.testing.assert_allclose(w, centre + step @ (x.T @ (y - x @ centre) / len(x)), atol=1e-9)


@pytest.mark.quick("0.5")
@pytest.mark.parametrize("lam", [0.0, 0.5, 3.0])
def test_ditto_reaches_the_proximal_point_of_fedavg(lam):
    run = fit(world(), make("ditto", lr=0.1, lam=lam, steps=3, batch=0), rounds=1500)
    centre = fedavg_limit(0.1, 3)
    np.testing.assert_allclose(run.state.x, centre, atol=1e-9)
    for w, x, y in list(zip(run.personal, XS, YS, strict=True))[1:]:
        hessian = x.T @ x / len(x) + lam * np.eye(D)
        np.testing.assert_allclose(w, np.linalg.solve(hessian, x.T @ y / len(x) + lam * centre), atol=1e-7)


@pytest.mark.parametrize("batch", [0, 4])
def test_ditto_draws_its_two_descents_apart(batch):
    """Without pull both start at x; they part if and only if minibatches are drawn."""
    run = fit(world(), make("ditto", lr=0.01, lam=0.0, batch=batch), rounds=1)
    personal = (torch.tensor(SHARE).unsqueeze(-1) * run.personal).sum(0)
    apart = float((personal - run.state.x).norm() / run.state.x.norm())
    assert apart > 1e-3 if batch else apart < 1e-12


class SharedDescent(Ditto):
    """Ditto without its personal descent."""

    def train(self, client, x):
        return client.sgd(x, self.lr, self.steps)


def test_personal_descent_of_ditto_takes_no_minibatch_from_the_shared_one():
    both, shared = (fit(world(), kind(lr=0.01, batch=4), rounds=3) for kind in (Ditto, SharedDescent))
    torch.testing.assert_close(both.state.x, shared.state.x, rtol=1e-12, atol=0)


def test_ditto_without_pull_is_local_and_oracle_on_one_cluster_is_fedavg():
    local = fit(world(), make("local", lr=0.1, batch=0), rounds=5)
    ditto = fit(world(), make("ditto", lr=0.1, lam=0.0, batch=0), rounds=5)
    assert torch.equal(local.personal, ditto.personal)
    alone = Federation.from_arrays(XS, YS, model=models.linear(), clusters=range(5))
    torch.testing.assert_close(fit(alone, make("oracle", lr=0.1, batch=0), rounds=5).personal, local.personal)
    together = Federation.from_arrays(XS, YS, model=models.linear(), clusters=[0] * 5)
    one = fit(together, make("oracle", lr=0.1, batch=0), rounds=5)
    torch.testing.assert_close(one.personal, fit(world(), make("fedavg", lr=0.1, batch=0), rounds=5).personal)


def test_oracle_averages_inside_clusters_only():
    run = fit(world(), make("oracle", lr=0.1, steps=1, batch=0), rounds=4000)
    x, y = np.concatenate(XS[:2]), np.concatenate(YS[:2])
    np.testing.assert_allclose(run.personal[0], np.linalg.lstsq(x, y, rcond=None)[0], atol=1e-8)
    assert torch.equal(run.personal[0], run.personal[1]) and not torch.equal(run.personal[1], run.personal[2])
    np.testing.assert_allclose(run.common(), (11 * run.personal[0] + 103 * run.personal[2]) / 114, atol=1e-12)


@pytest.mark.parametrize("runtime", ["stacked", "loop", "nodes"])
def test_ledger_of_fedavg_is_n_t_d(runtime):
    from coterie.deploy.loopback import LoopbackRuntime

    fed = world(loop=runtime == "loop")
    fed = LoopbackRuntime.split(fed, 2) if runtime == "nodes" else fed
    run = fit(fed, make("fedavg"), rounds=6)
    assert run.fed.ledger.total("floats_down") == run.fed.ledger.total("floats_up") == 5 * 6 * D
    assert run.fed.ledger.total("bytes_up") == 8 * 5 * 6 * D


def test_stochastic_gradients_are_unbiased_and_fresh():
    """The mean of many minibatch steps is the full gradient step; two calls do not repeat a batch."""
    fed = Federation.from_arrays(
        [RNG.normal(size=(40, 2))] * 2000, [RNG.normal(size=40)] * 2000, models.linear()
    )
    run = fit(fed, make("local", lr=1.0, steps=1, batch=8), rounds=1)
    full = fit(fed, make("local", lr=1.0, steps=1, batch=0), rounds=1)
    spread = run.personal.std(0)
    assert (spread > 0.05).all()
    gap = (run.personal.mean(0) - full.personal[0]).abs()
    assert (gap < 4 * spread / 2000**0.5).all()


def test_sampling_visits_the_asked_share():
    run = fit(world(), make("fedavg", participation=0.4), rounds=10)
    assert run.fed.ledger.total("messages_up") == 20

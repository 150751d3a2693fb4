"""FedProx, SCAFFOLD, FedAdam, FedYogi, FedDyn and FedNova against plain numpy loops, special cases and fixed points."""

import numpy as np
import pytest
import torch

from coterie import Federation, fit, models
from coterie.algorithms import make
from coterie.models.fast import dual_sgd

BATCH, STEPS, LR, ROUNDS = 4, 3, 0.05, 5
EXACT = {"rtol": 0, "atol": 1e-12}


def descend(ref, t, client, w, change, steps=STEPS, call=0):
    """Local steps on the minibatches of round t; `change` is added to every gradient."""
    y = w
    for step in range(1, steps + 1):
        rows = ref.rows("train", t, call, client, step, BATCH)
        y = y - LR * (ref.grad(client, y, rows) + change(y))
    return y


def test_fedprox_is_a_plain_loop_and_fedavg_without_pull(reference):
    ref = reference()
    run = fit(ref.fed, make("fedprox", lr=LR, mu=0.7, steps=STEPS, batch=BATCH), ROUNDS, evaluate_every=0)
    x = np.zeros(3)
    for t in range(1, ROUNDS + 1):
        x = sum(p * descend(ref, t, k, x, lambda y, x=x: 0.7 * (y - x)) for k, p in enumerate(ref.share))
    np.testing.assert_allclose(run.state.x, x, **EXACT)
    without = fit(ref.fed, make("fedprox", mu=0.0), ROUNDS, evaluate_every=0)
    assert torch.equal(without.state.x, fit(ref.fed, make("fedavg"), ROUNDS, evaluate_every=0).state.x)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_scaffold_is_a_plain_loop(reference, weighting, participation):
    ref = reference()
    n = len(ref.xs)
    share = ref.share if weighting == "size" else np.full(n, 1 / n)
    settings = {"lr": LR, "steps": STEPS, "batch": BATCH, "server_lr": 0.8}
    method = make("scaffold", **settings, weighting=weighting, participation=participation)
    run = fit(ref.fed, method, ROUNDS, evaluate_every=0)
    x, c, own, begun = np.zeros(3), np.zeros(3), np.zeros((n, 3)), set()
    for t in range(1, ROUNDS + 1):
        ids = ref.fed.sample(t, participation)
        ids = range(n) if ids is None else ids.tolist()
        call = int(not begun.issuperset(ids))  # a call for those who begin comes first
        begun |= set(ids)
        ends = {k: descend(ref, t, k, x, lambda y, c=c - own[k]: c, call=call) for k in ids}
        new = {k: own[k] - c + (x - end) / (STEPS * LR) for k, end in ends.items()}
        total = sum(share[k] for k in ids)
        x = x + 0.8 * sum(share[k] * (end - x) for k, end in ends.items()) / total
        c = c + sum(share[k] * (new[k] - own[k]) for k in ids)
        for k in ids:
            own[k] = new[k]
    np.testing.assert_allclose(run.state.x, x, **EXACT)
    np.testing.assert_allclose(run.state.c, c, **EXACT)
    np.testing.assert_allclose(run.state.c, share @ own, **EXACT)  # c is the mean of all c_i


def test_scaffold_with_one_step_is_gradient_descent(reference):
    ref = reference()
    run = fit(ref.fed, make("scaffold", lr=0.1, steps=1, batch=0), 9, evaluate_every=0)
    w = np.zeros(3)
    for _ in range(9):
        w = w - 0.1 * sum(p * ref.grad(k, w) for k, p in enumerate(ref.share))
    np.testing.assert_allclose(run.state.x, w, atol=1e-13)


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_the_fixed_point_is_the_optimum_of_the_average(reference, name, weighting):
    """FedAvg's is not: that is what these methods are for."""
    ref = reference()
    share = None if weighting == "size" else np.full(len(ref.xs), 1 / len(ref.xs))
    run = fit(ref.fed, make(name, lr=0.15, batch=0, weighting=weighting), 500, evaluate_every=0)
    np.testing.assert_allclose(run.state.x, ref.optimum(share), atol=1e-10)
    plain = fit(ref.fed, make("fedavg", lr=0.15, batch=0, weighting=weighting), 500, evaluate_every=0)
    assert np.abs(plain.state.x.numpy() - ref.optimum(share)).max() > 1e-3


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_feddyn_is_a_plain_loop(reference, participation):
    ref, alpha, n = reference(), 0.3, 4
    method = make("feddyn", lr=LR, alpha=alpha, steps=STEPS, batch=BATCH, participation=participation)
    run = fit(ref.fed, method, ROUNDS, evaluate_every=0)
    x, h, g, begun = np.zeros(3), np.zeros(3), np.zeros((n, 3)), set()
    for t in range(1, ROUNDS + 1):
        ids = ref.fed.sample(t, participation)
        ids = range(n) if ids is None else ids.tolist()
        call = int(not begun.issuperset(ids))
        begun |= set(ids)
        ends = {
            k: descend(ref, t, k, x, lambda y, x=x, own=g[k]: alpha * (y - x) - own, call=call) for k in ids
        }
        average = sum(ref.share[k] * end for k, end in ends.items()) / sum(ref.share[k] for k in ids)
        for k, end in ends.items():
            g[k] -= alpha * (end - x)
        h = h - alpha * sum(ref.share[k] * (end - x) for k, end in ends.items())
        x = average - h / alpha
    np.testing.assert_allclose(run.state.x, x, **EXACT)
    np.testing.assert_allclose(run.state.h, ref.share @ g, **EXACT)


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_servers_that_adapt_are_plain_loops(reference, name):
    ref = reference()
    settings = {"lr": LR, "steps": STEPS, "batch": BATCH}
    method = make(name, **settings, server_lr=0.2, beta1=0.7, beta2=0.8, tau=0.01)
    run = fit(ref.fed, method, 12, evaluate_every=0)
    x, m, v = np.zeros(3), np.zeros(3), np.full(3, 1e-4)
    for t in range(1, 13):
        delta = sum(p * descend(ref, t, k, x, lambda y: 0.0) for k, p in enumerate(ref.share)) - x
        m, square = 0.7 * m + 0.3 * delta, delta**2
        v = 0.8 * v + 0.2 * square if name == "fedadam" else v - 0.2 * square * np.sign(v - square)
        x = x + 0.2 * m / (np.sqrt(v) + 0.01)
    np.testing.assert_allclose(run.state.x, x, **EXACT)


def test_fednova_is_a_plain_loop(reference):
    ref = reference()
    run = fit(ref.fed, make("fednova", lr=LR, epochs=2, batch=BATCH), ROUNDS, evaluate_every=0)
    tau = 2 * np.ceil([len(x) / BATCH for x in ref.xs])
    x = np.zeros(3)
    for t in range(1, ROUNDS + 1):
        ends = [descend(ref, t, k, x, lambda y: 0.0, steps=int(count)) for k, count in enumerate(tau)]
        directions = [(x - end) / (count * LR) for end, count in zip(ends, tau, strict=True)]
        x = x - LR * (ref.share @ tau) * sum(p * g for p, g in zip(ref.share, directions, strict=True))
    np.testing.assert_allclose(run.state.x, x, **EXACT)


def test_fednova_with_as_many_steps_for_all_is_fedavg(reference):
    ref = reference((8, 8, 8))
    nova = fit(ref.fed, make("fednova", epochs=2, batch=4), ROUNDS, evaluate_every=0)
    average = fit(ref.fed, make("fedavg", steps=4, batch=4), ROUNDS, evaluate_every=0)
    np.testing.assert_allclose(nova.state.x, average.state.x, **EXACT)


def images() -> Federation:
    draw = torch.Generator().manual_seed(0)
    sizes = [12, 9, 15, 12]
    xs = [torch.randn(n, 6, 6, generator=draw) for n in sizes]
    ys = [torch.randint(0, 3, (n,), generator=draw) for n in sizes]
    return Federation.from_arrays(xs, ys, models.cnn(channels=(2,), hidden=4, classes=3, stacked=False))


def table() -> Federation:
    draw = torch.Generator().manual_seed(0)
    sizes = [12, 9, 15, 12]
    xs = [torch.randn(n, 40, generator=draw) for n in sizes]
    ys = [torch.randint(0, 3, (n,), generator=draw) for n in sizes]
    return Federation.from_arrays(xs, ys, models.softmax(classes=3, l2=0.01))


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fednova"])
@pytest.mark.parametrize(
    ("made", "path"),
    [
        (table, "dual-sgd"),
        (images, "parallel-clients"),
    ],
)
def test_fast_paths_take_linear_terms_and_counts_of_steps(name, made, path, monkeypatch):
    monkeypatch.setattr(dual_sgd, "FEWEST_PRODUCTS", 1)
    method = make(name, batch=5)
    quick = fit(made(), method, 4, evaluate_every=0)
    assert quick.fed.runtime.paths_used()[path]
    monkeypatch.setenv("COTERIE_FAST", "none")
    slow = fit(made(), method, 4, evaluate_every=0)
    torch.testing.assert_close(quick.state.x, slow.state.x, rtol=1e-4, atol=1e-5)

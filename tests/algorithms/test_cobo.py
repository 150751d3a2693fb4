"""CoBo: the facts of its theory, each against a closed form, a plain loop or a published count."""

import dataclasses
import itertools
import math
import warnings

import pytest
import torch

from coterie import Federation, check_algorithm, fit, models
from coterie.algorithms import make
from coterie.algorithms.cobo import PRINTED
from coterie.algorithms.cobo import CoBo as AnyCoBo
from coterie.experiments.cobo_quadratic import (
    block_weights,
    bound_ratios,
    bowls,
    centres,
    curvatures,
    inside,
    squared_distances,
    trajectory,
)
from coterie.theory.collaboration import (
    degrees,
    pulled,
    refreshes_until_cut,
    stationary_consensus,
    theorem_one,
)
from coterie.theory.simplex import onto_simplex


def CoBo(*values, **settings):
    """CoBo as printed, unless settings say otherwise; weights are the fourth and fifth value."""
    names = ("lr", "rho", "gamma", "domain", "sampling")
    given = {**dict(zip(names, values, strict=False)), **settings}
    own = {"own": "zero"} if given.get("domain") == "simplex" else {}
    return AnyCoBo(**{**PRINTED, "gamma": 0.01, **own, **given})


def after(fed, algorithm, rounds, weights=None):
    *_, last = trajectory(fed, algorithm, rounds, weights)
    return last


def error(fed, models):
    return float((models - centres(fed)).square().sum(-1).mean())


def plain(fed, lr, rho, gamma, rounds, domain):
    """CoBo on exact gradients, with loops, as one would write it from the paper (all pairs, no guard)."""
    a, mu, n = curvatures(fed), centres(fed), fed.n
    x = [fed.initial_model() for _ in range(n)]
    w = [[(1.0 if domain == "box" else 1 / (n - 1)) * (i != j) for j in range(n)] for i in range(n)]
    for _ in range(rounds):
        for i, j in itertools.combinations(range(n), 2):
            z = (x[i] + x[j]) / 2
            product = float((a[i] * (z - mu[i])) @ (a[j] * (z - mu[j])))
            for k, m in ((i, j), (j, i)):
                w[k][m] += gamma * product
                if domain == "box":
                    w[k][m] = min(1.0, max(0.0, w[k][m]))
        if domain == "simplex":
            w = [brute_projection(row) for row in w]
        x = [
            x[i] - lr * (a[i] * (x[i] - mu[i]) + rho * sum(w[i][k] * (x[i] - x[k]) for k in range(n)))
            for i in range(n)
        ]
    return torch.stack(x), torch.tensor(w, dtype=torch.float64)


def brute_projection(row):
    """The only support of which the projection is consistent with itself."""
    for size in range(len(row), 0, -1):
        support = sorted(range(len(row)), key=lambda k: -row[k])[:size]
        level = (sum(row[k] for k in support) - 1) / size
        if all(row[k] > level for k in support):
            return [max(0.0, value - level) for value in row]
    raise AssertionError("no support fits")


@pytest.mark.parametrize("domain", ["box", "simplex"])
def test_q1_equals_a_plain_loop(domain):
    fed = bowls((3, 3, 2), d=4)
    lr, rho, gamma = 0.05, 0.3, 0.02
    fast = after(fed, CoBo(lr, rho, gamma, domain, "all", guard=0.0, batch=0), 30)
    x, w = plain(fed, lr, rho, gamma, 30, domain)
    torch.testing.assert_close(fast.models, x, rtol=0, atol=1e-13)
    torch.testing.assert_close(fast.weights, w, rtol=0, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [pytest.param("all", marks=pytest.mark.slow), "constant"])
def test_q2_without_noise_the_clusters_are_found_exactly(sampling):
    fed = bowls((4, 4, 4, 4))
    last = after(fed, CoBo(0.05, 0.5, 0.05, sampling=sampling, batch=0), 2500)
    assert torch.equal(last.weights, block_weights(fed))
    assert inside(fed, squared_distances(last.models)) < 1e-28
    assert (curvatures(fed) * (last.models - centres(fed))).square().sum(-1).max() < 1e-27
    assert error(fed, last.models) < 1e-27


@pytest.mark.parametrize(
    ("gamma", "a", "apart", "count"), [(0.01, 1.0, 3.0, 45), (0.05, 0.7, 1.225, 109), (0.05, 1.0, 5.5, 3)]
)
def test_q3_a_pair_at_its_own_optima_is_cut_after_so_many_looks(gamma, a, apart, count):
    fed = bowls((1, 1), curvature=(a, a))
    mu = torch.zeros(2, fed.d, dtype=torch.float64)
    mu[1, 0] = apart
    fed = Federation.from_arrays(
        [torch.cat([a * row, row.new_tensor([a])]).unsqueeze(0) for row in mu],
        torch.zeros(2, 1).double(),
        fed.model,
    )
    algorithm = CoBo(0.1, 0.0, gamma, sampling="all", batch=0)
    fed.enter_round(0, None)
    state = algorithm.start(fed).replace(models=mu)
    looks = 0
    while state.weights[0, 1] > 0:
        looks += 1
        fed.enter_round(looks, state)
        state = algorithm.at_midpoints(fed, state, looks, None)
    assert looks == count == refreshes_until_cut(gamma, a, apart)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lr", "rho", "noise", "value"),
    [(0.1, 0.5, 2.0, 0.15686), pytest.param(0.05, 0.4, 1.0, 0.02057, marks=pytest.mark.slow)],
)
def test_q4_consensus_with_noise_is_the_closed_form(lr, rho, noise, value):
    exact = stationary_consensus(lr, 1.0, 4 * rho, noise**2)
    assert exact == pytest.approx(value, abs=5e-6)
    fed = bowls((4,) * 16, curvature=(1.0, 1.0), noise=noise)
    states = trajectory(fed, CoBo(lr, rho, 0.0, rate=1e-9, batch=1), 2000, block_weights(fed))
    found = [inside(fed, squared_distances(state.models)) for t, state in enumerate(states) if t > 200]
    assert float(torch.stack(found).mean()) * 4 / 3 == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("n", [8, 80])
def test_q5_the_step_is_stable_up_to_two(n):
    """W frozen at ones, lambda_max = n: lr (a + rho n) below 2 contracts what is not common, above 2 it grows."""
    fed = bowls((1,) * n, d=3, curvature=(1.0, 1.0))

    def spread(edge):
        lr = 0.05
        algorithm = CoBo(lr, (edge / lr - 1) / n, 0.0, rate=1e-9, guard=0.0, batch=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            states = [state.models for state in trajectory(fed, algorithm, 400)]
        target = states[200] - states[199]
        return float((states[400] - states[399]).norm() / target.norm())

    assert spread(1.97) < 1 < spread(2.03)


@pytest.mark.slow
@pytest.mark.parametrize("edge", [pytest.param(5.0, marks=pytest.mark.slow), 100.0])
def test_q6_the_guard_keeps_any_pull_stable(edge):
    fed = bowls((4, 4, 4, 4), noise=0.3)
    lr = 0.05
    rho = edge / (lr * fed.n)
    last = after(fed, CoBo(lr, rho, 0.05, sampling="all", batch=1), 800)
    assert error(fed, last.models) < 0.0025
    wild = after(fed, quiet(lr=lr, rho=rho, gamma=0.05, sampling="all", guard=0.0, batch=1), 15)
    assert not error(fed, wild.models) < 10 * error(fed, last.models)


def quiet(**settings):
    class Quiet(AnyCoBo):
        def _steps(self, fed):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return super()._steps(fed)

    return dataclasses.dataclass(frozen=True)(Quiet)(**{**PRINTED, **settings})


@pytest.mark.slow
def test_q7_rows_on_the_simplex_keep_their_sum_and_their_mass_inside():
    fed = bowls((4, 4, 4, 4), noise=0.3)
    last = after(fed, CoBo(0.05, 0.5, 0.05, "simplex", "all", batch=1), 600)
    assert (last.weights.sum(-1) - 1).abs().max() < 1e-12
    same = fed.clusters.unsqueeze(1) == fed.clusters
    assert float(last.weights[same].sum() / fed.n) == pytest.approx(1.0, abs=0.005)


@pytest.mark.slow
def test_q8_errors_with_noise_are_in_the_reference_order():
    settings = {"steps": 1, "lr": 0.05}
    fed = bowls((4, 4, 4, 4), noise=2.0)
    found = {}
    for name, more in {"oracle": {}, "local": {}, "ditto": {"lam": 0.1}, "fedavg": {}}.items():
        run = fit(fed, make(name, batch=1, **settings, **more), 2000, evaluate_every=0)
        found[name] = error(fed, run.personal)
    cobo = [error(fed, state.models) for state in trajectory(fed, CoBo(0.05, 0.5, 0.05, batch=1), 2000)]
    assert 0.01 < found["oracle"] < 0.04 and 0.04 < cobo[-1] < 0.075 and 0.07 < found["local"] < 0.13
    assert 0.12 < found["ditto"] < 0.22 and 6 < found["fedavg"] < 10.5


@pytest.mark.slow
def test_q9_ifca_from_random_starts_rarely_finds_all_clusters():
    found = 0
    for seed in range(20):
        fed = bowls((4, 4, 4, 4), seed=seed)
        method = make("ifca", clusters=4, average="gradient", divide="cluster", lr=0.5, spread=1.0, batch=0)
        found += fit(fed, method, 100, evaluate_every=0).history.at(100, "server", "ari") == 1.0
    assert found <= 5


class TestReductions:
    """What CoBo is when the pull or the weights are nothing or everything."""

    fed = bowls((2, 2), noise=1.0)

    def steps(self, method, rounds=25):
        return fit(self.fed, method, rounds, evaluate_every=0).personal

    def test_without_pull_it_is_training_alone_bit_for_bit(self):
        exact = {"steps": 1, "lr": 0.05, "batch": 0}
        alone = self.steps(make("local", **exact))
        assert torch.equal(self.steps(CoBo(0.05, 0.0, batch=0)), alone)
        assert torch.equal(self.steps(make("ditto", lam=0.0, **exact)), alone)

    def test_without_weights_it_is_training_alone_bit_for_bit(self):
        zero = torch.zeros(4, 4, dtype=torch.float64)
        last = after(self.fed, CoBo(0.05, 3.0, 0.0, batch=0), 25, zero)
        assert torch.equal(last.models, self.steps(make("local", steps=1, lr=0.05, batch=0)))

    def test_an_infinite_implicit_pull_is_averaging_in_clusters_or_of_all(self):
        method = CoBo(0.05, 1e9, 0.0, rate=1e-9, implicit=True, batch=0)
        oracle = self.steps(make("oracle", steps=1, lr=0.05, batch=0))
        torch.testing.assert_close(
            after(self.fed, method, 25, block_weights(self.fed)).models, oracle, atol=1e-6, rtol=0
        )
        fedavg = self.steps(make("fedavg", steps=1, lr=0.05, batch=0))
        torch.testing.assert_close(after(self.fed, method, 25).models, fedavg, atol=1e-6, rtol=0)


@pytest.mark.parametrize("n", [10, 40, 160, 640])
def test_q11_constant_sampling_costs_as_many_gradients_as_training(n):
    fed, rounds = bowls((n,), d=2), 30
    run = fit(fed, CoBo(0.05, batch=0), rounds, evaluate_every=0)
    pairs = n * (n - 1) / 2
    spread = 4 * math.sqrt(pairs / n * (1 - 1 / n) / rounds)
    found = run.fed.ledger.total("messages_down", phase="agree", link="client-client") / rounds
    assert abs(found / 2 - pairs / n) < spread
    assert run.fed.ledger.total("messages_down", phase="slope", link="client-server") / rounds == n
    assert (
        run.fed.ledger.total("floats_up", phase="agree")
        == run.fed.ledger.total("messages_up", phase="agree") * fed.d
    )


@pytest.mark.parametrize("n", [10, 40])
def test_q11_all_pairs(n):
    run = fit(bowls((n,), d=2), CoBo(0.05, sampling="all", batch=0), 3, evaluate_every=0)
    assert run.fed.ledger.total("messages_up", phase="agree") == 3 * n * (n - 1)


@pytest.mark.slow
def test_the_corrected_theorem_holds_on_random_problems():
    ratios = [bound_ratios(seed, 120) for seed in range(10)]
    assert max(max(pair) for pair in ratios) < 0.5


def test_the_bounds_of_the_theorem_by_hand():
    slope, consensus = theorem_one(0.1, 50, smoothness=2.0, prox=6.0, noise=3.0, unlikeness=0.2, gap=5.0)
    assert slope == pytest.approx(5.6 * 5 / 5 + 2.8 * 0.1 * 3 * (2 + 16))
    assert consensus == pytest.approx(24 * 0.04 / 36 * slope + 4 * 0.1 * 3 / 6)


@pytest.mark.slow
def test_five_hundred_clients_are_stable_with_default_steps():
    fed = bowls((10,) * 50, d=20, noise=1.0, seed=3)
    run = fit(fed, CoBo(batch=1), 10, evaluate_every=0)
    assert error(fed, run.personal) < error(fed, torch.zeros_like(run.personal))
    ledger = run.fed.ledger
    assert ledger.total("messages_up", phase="agree") < 1.2 * ledger.total("messages_up", phase="slope")


def test_step_sizes_that_are_not_given_follow_the_stability_rule():
    xs = [torch.randn(30, 3, generator=torch.Generator().manual_seed(k)).double() for k in range(5)]
    fed = Federation.from_arrays(xs, [x.sum(-1) for x in xs], models.linear())
    fed.enter_round(0, None)
    largest = max(float(torch.linalg.eigvalsh(x.T @ x / 30)[-1]) for x in xs)
    assert CoBo().start(fed).lr == 0.05 < 0.5 / largest
    steep = Federation.from_arrays([9 * x for x in xs], [x.sum(-1) for x in xs], models.linear())
    steep.enter_round(0, None)
    assert CoBo().start(steep).lr == pytest.approx(0.5 / largest / 81)
    unguarded = CoBo(guard=0.0).start(fed)
    assert unguarded.lr * (largest + unguarded.rho * 5) < 2
    with pytest.warns(UserWarning, match="diverges.*guard"):
        CoBo(lr=0.1, rho=10.0, guard=0.0).start(fed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CoBo(lr=0.1, rho=10.0).start(fed)
        CoBo(lr=0.1, rho=10.0, guard=0.0, implicit=True).start(fed)


@pytest.mark.parametrize(
    ("settings", "chances"),
    [
        ({}, [1 / 8, 1 / 8, 1 / 8]),
        ({"rate": 2.0}, [2 / 8, 2 / 8, 2 / 8]),
        ({"sampling": "time"}, [1, 1 / 2, 1 / 3]),
        ({"sampling": "time", "power": 0.5}, [1, 2**-0.5, 3**-0.5]),
        ({"sampling": "mixed", "switch": 2}, [1 / 8, 1 / 8, 1 / 3]),
        ({"sampling": "all"}, [1, 1, 1]),
    ],
)
def test_chances_of_the_four_ways_of_sampling(settings, chances):
    assert [CoBo(**settings).chance(8, t) for t in (1, 2, 3)] == pytest.approx(chances)


def test_margin_and_cosine():
    fed = bowls((2, 2), seed=1)
    state = next(trajectory(fed, CoBo(batch=0), 0))
    i, j = torch.triu_indices(4, 4, 1)
    a, mu = curvatures(fed), centres(fed)
    g, h = -a[i] * mu[i], -a[j] * mu[j]
    product, size = (g * h).sum(-1), g.norm(dim=-1) * h.norm(dim=-1)
    for settings, expected in (
        ({}, product),
        ({"margin": 0.2}, product - 0.2 * size),
        ({"cosine": True}, product / size),
        ({"cosine": True, "margin": 0.2}, product / size - 0.2),
    ):
        found = CoBo(batch=0, **settings).agreements(fed, state.models, i, j)[2]
        torch.testing.assert_close(found, expected)


def test_momentum_is_the_authors_moving_average():
    fed = bowls((2,), seed=2)
    states = list(trajectory(fed, CoBo(0.1, 0.0, momentum=0.9, batch=0), 3))
    x, m = states[0].models, None
    for state in states[1:]:
        g = curvatures(fed) * (x - centres(fed))
        m = g if m is None else 0.9 * m + 0.1 * g
        x = x - 0.1 * m
        torch.testing.assert_close(state.models, x)


def test_without_symmetry_each_direction_is_looked_at_by_itself():
    fed = bowls((4, 4), seed=1)
    last = after(fed, CoBo(0.05, 0.5, 0.02, symmetric=False, batch=0), 60)
    assert not torch.equal(last.weights, last.weights.T)
    assert float(last.weights.diagonal().abs().max()) == 0.0


def test_projection_on_the_simplex_equals_brute_force():
    rows = torch.randn(200, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    expected = torch.tensor([brute_projection(row.tolist()) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(onto_simplex(rows), expected, atol=1e-14, rtol=0)
    inner = onto_simplex(rows)
    torch.testing.assert_close(onto_simplex(inner), inner, atol=1e-15, rtol=0)


def test_the_pull_ignores_the_own_weight():
    w = torch.tensor([[0.5, 0.2], [0.4, 0.1]], dtype=torch.float64)
    torch.testing.assert_close(
        pulled(w, degrees(w), 0.5), torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"domain": "simplex"},
        {"domain": "simplex", "sampling": "all", "momentum": 0.9},
        {"symmetric": False, "sampling": "all"},
        {"implicit": True, "sampling": "all"},
        {"guard": 0.0},
        {"cosine": True, "margin": 0.2, "sampling": "all"},
        {"participation": 0.5, "sampling": "all", "patience": 1, "momentum": 0.9},
        {"sampling": "mixed", "switch": 2},
    ],
    ids=str,
)
def test_every_variant_keeps_every_promise(settings):
    check_algorithm(CoBo(**settings))

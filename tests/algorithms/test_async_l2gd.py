"""Async-L2GD: enumerated coins, the convergence bound, counts, special cases and bad input."""

import itertools

import numpy as np
import pytest
import torch

from coterie import Federation, fit, models
from coterie._core.errors import SettingError
from coterie.algorithms import make
from coterie.algorithms.async_l2gd import AsyncL2GD
from coterie.theory import hierarchical as exact
from coterie.theory.cluster_penalty import Penalty
from coterie.theory.coins import Coins, balanced_share, count_rounds

CLUSTERS = torch.tensor([0, 1, 1, 2, 2, 2, 0, 1])
N, K, D = len(CLUSTERS), 3, 4


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: a second thread costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def quadratic(seed, spread=1.0):
    """Strongly convex losses 1/2 t'At - b't."""
    rng = np.random.default_rng(seed)
    root = torch.from_numpy(rng.normal(size=(N, D, D)))
    a = root @ root.mT / D + 0.3 * torch.eye(D, dtype=torch.float64)
    return a, spread * torch.from_numpy(rng.normal(size=(N, D)))


def pulls(seed):
    rng = np.random.default_rng(seed)
    return Penalty.of(
        CLUSTERS, torch.from_numpy(0.2 + rng.uniform(size=N)), alpha=rng.uniform(0.1, 0.9, size=K)
    )


def branches(penalty, coins, a, b, u):
    """Every outcome of the coins: probability and oracle [n, d], by the formulas of the paper."""
    inside, common = penalty.means(u)
    j, gamma = CLUSTERS, penalty.gamma
    alpha, tau, p = penalty.alpha[j], coins.tau[j], coins.p[j]
    together = gamma / coins.p0 * (alpha * (u - common) + tau * (1 - alpha) * (u - inside[j]))
    talk = gamma * (1 - tau) * (1 - alpha) / ((1 - coins.p0) * p) * (u - inside[j])
    step = (exact.times(a, u) - b) / ((1 - coins.p0) * (1 - p))
    yield coins.p0, together
    for tossed in itertools.product([0.0, 1.0], repeat=K):
        heads = torch.tensor(tossed, dtype=torch.float64).unsqueeze(-1)
        chance = float(torch.where(heads > 0, coins.p, 1 - coins.p).prod()) * (1 - coins.p0)
        yield chance, torch.where(heads[j] > 0, talk, step)


def ours(penalty, coins, a, b, u):
    """The same from the strengths that the algorithm uses."""
    inside, common = penalty.means(u)
    j = CLUSTERS
    yield coins.p0, coins.far(penalty) * (u - common) + coins.near(penalty) * (u - inside[j])
    for tossed in itertools.product([0.0, 1.0], repeat=K):
        heads = torch.tensor(tossed, dtype=torch.float64).unsqueeze(-1)
        chance = float(torch.where(heads > 0, coins.p, 1 - coins.p).prod()) * (1 - coins.p0)
        talk = coins.inside(penalty) * (u - inside[j])
        yield chance, torch.where(heads[j] > 0, talk, coins.alone[j] * (exact.times(a, u) - b))


@pytest.mark.parametrize("oracle", [branches, ours])
def test_expected_update_is_the_gradient(oracle):
    """The sum over all 2^k + 1 outcomes, for every tau in [0, 1]^k."""
    a, b = quadratic(0)
    penalty, rng = pulls(1), np.random.default_rng(2)
    for tau in (None, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), tuple(rng.uniform(size=K))):
        coins = Coins.of(penalty, 0.3, tuple(rng.uniform(0.1, 0.8, size=K)), tau)
        u = torch.from_numpy(rng.normal(size=(N, D)))
        slope = exact.times(a, u) - b + penalty.grad(u)
        expected = sum(chance * update for chance, update in oracle(penalty, coins, a, b, u))
        assert (expected - slope).abs().max() < 1e-10


def total(penalty, a, b, u):
    return float((0.5 * u * exact.times(a, u) - b * u).sum() + penalty.value(u))


def test_second_moment_is_bounded_by_the_expected_smoothness():
    """E|G(u) - G(best)|^2 <= 2 Lcal (F(u) - F(best)), exactly enumerated."""
    worst = 0.0
    for seed in range(30):
        a, b = quadratic(seed)
        penalty, rng = pulls(seed + 100), np.random.default_rng(seed)
        coins = Coins.of(penalty, rng.uniform(0.05, 0.9), tuple(rng.uniform(0.05, 0.9, size=K)))
        best = exact.minimiser(a, b, penalty).models
        u = best + 10 ** rng.uniform(-2, 1) * torch.from_numpy(rng.normal(size=(N, D)))
        smoothness = coins.smoothness(penalty, float(torch.linalg.eigvalsh(a).max()))
        moment = sum(
            chance * float((g - h).square().sum())
            for (chance, g), (_, h) in zip(
                ours(penalty, coins, a, b, u), ours(penalty, coins, a, b, best), strict=True
            )
        )
        bound = 2 * smoothness * (total(penalty, a, b, u) - total(penalty, a, b, best))
        assert moment <= bound * (1 + 1e-12)
        worst = max(worst, moment / bound)
    assert worst > 0.2


def transitions(penalty, coins, a, b, lr):
    """Each outcome as a map of the error e = t - best: e <- M e + v, with its probability."""
    size = N * D
    best = exact.minimiser(a, b, penalty).models
    unit = torch.eye(size, dtype=torch.float64)
    at_best = [(chance, g.reshape(-1)) for chance, g in ours(penalty, coins, a, b, best)]
    moved = [
        [g.reshape(-1) for _, g in ours(penalty, coins, a, b, best + unit[c].view(N, D))] for c in range(size)
    ]
    for k, (chance, noise) in enumerate(at_best):
        slope = torch.stack([column[k] - noise for column in moved], 1)
        yield chance, unit - lr * slope, -lr * noise


def exact_errors(penalty, coins, a, b, lr, rounds):
    """E|t - best|^2 after every round, and the variance of the oracle at the minimiser."""
    maps = list(transitions(penalty, coins, a, b, lr))
    mean = -exact.minimiser(a, b, penalty).models.reshape(-1)
    second = torch.outer(mean, mean)
    errors = [float(second.trace())]
    for _ in range(rounds):
        new_second, new_mean = torch.zeros_like(second), torch.zeros_like(mean)
        for chance, m, v in maps:
            cross = torch.outer(m @ mean, v)
            new_second += chance * (m @ second @ m.T + cross + cross.T + torch.outer(v, v))
            new_mean += chance * (m @ mean + v)
        mean, second = new_mean, new_second
        errors.append(float(second.trace()))
    return errors, sum(chance * float((v / lr).square().sum()) for chance, _, v in maps)


@pytest.mark.parametrize("seed", range(3))
def test_mean_error_obeys_the_theorem(seed):
    """The exact second moment never exceeds (1 - lr mu)^t |t0 - best|^2 + 2 lr sigma^2 / mu."""
    a, b = quadratic(seed, spread=3.0)
    penalty = pulls(seed + 7)
    eigenvalues = torch.linalg.eigvalsh(a)
    mu, top = float(eigenvalues.min()), float(eigenvalues.max())
    coins = Coins.best(penalty, top) if seed else Coins.of(penalty, 0.3, 0.4)
    lr = 0.5 / coins.smoothness(penalty, top)
    errors, variance = exact_errors(penalty, coins, a, b, lr, 300)
    for t, error in enumerate(errors):
        assert error <= (1 - lr * mu) ** t * errors[0] + 2 * lr * variance / mu + 1e-12


def federation(seed=0, clusters=CLUSTERS, model=None, rows=12, **options):
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(rows, D)) for _ in range(len(clusters))]
    ys = [x @ rng.normal(size=D) + rng.normal(size=rows) for x in xs]
    return Federation.from_arrays(xs, ys, model or models.linear(l2=0.05), clusters=clusters, **options)


def minimiser_of(fed, algorithm):
    a, b, _ = fed.runtime.statistics(None)
    return exact.minimiser(a, b, algorithm.penalty(fed)).models


def test_noise_floor_is_linear_in_the_step():
    """It does not converge at a fixed step; a step ten times smaller leaves less than .35 of the error."""
    a, b = quadratic(4, spread=3.0)
    penalty = pulls(5)
    top = float(torch.linalg.eigvalsh(a).max())
    for coins in (Coins.best(penalty, top), Coins.best_one(penalty, top)):
        lr = 0.5 / coins.smoothness(penalty, top)
        errors = [stationary_error(penalty, coins, a, b, lr * factor) for factor in (1.0, 0.1, 0.01)]
        assert 0.03 < errors[1] / errors[0] < 0.35 and 0.03 < errors[2] / errors[1] < 0.35


def stationary_error(penalty, coins, a, b, lr):
    """The limit of E|t - best|^2: the fixed point of the second moment, whose mean is zero."""
    maps = transitions(penalty, coins, a, b, lr)
    size = N * D
    system = torch.eye(size * size, dtype=torch.float64)
    right = torch.zeros(size, size, dtype=torch.float64)
    for chance, m, v in maps:
        system -= chance * torch.kron(m, m)
        right += chance * torch.outer(v, v)
    return float(torch.linalg.solve(system, right.reshape(-1)).view(size, size).trace())


def test_the_run_is_the_recursion_of_the_paper():
    """Against a plain loop that tosses the same coins; all three branches occur."""
    fed = federation()
    algorithm = AsyncL2GD(lr=0.02, gamma=(0.5, 1.0, 2.0), alpha=(0.2, 0.7, 0.4), p0=0.25, p=(0.2, 0.5, 0.7))
    run = fit(fed, algorithm, rounds=120, evaluate_every=0)
    penalty = algorithm.penalty(fed)
    coins = algorithm.chances(penalty)
    a, b, _ = fed.runtime.statistics(None)
    u, seen = torch.zeros(N, D, dtype=torch.float64), set()
    for t in range(1, 121):
        everyone, inside = algorithm.toss(fed, t, K)
        outcomes = list(branches(penalty, coins, a, b, u))
        index = 0 if everyone else 1 + sum(2 ** (K - 1 - j) * talks for j, talks in enumerate(inside))
        seen.add(index)
        u = u - algorithm.lr * outcomes[index][1]
    assert len(seen) >= 8
    assert (run.personal - u).abs().max() < 1e-12


@pytest.mark.slow
def test_from_theory_minimises_the_expected_smoothness():
    """Both cases of Corollary 3.6, and the one coin, against a grid over (p0, p)."""
    for gamma, alpha in ((1.0, 0.2), (2.0, 0.5), (0.3, 0.9), (5.0, 0.05)):
        penalty, smoothness = Penalty.of(CLUSTERS, gamma, alpha=alpha), 3.0
        best = Coins.best(penalty, smoothness)
        value = best.smoothness(penalty, smoothness)
        grid = [
            Coins.of(penalty, p0, p).smoothness(penalty, smoothness)
            for p0 in np.linspace(0.01, 0.99, 50)
            for p in np.linspace(0.0, 0.96, 25)
        ]
        far, near = alpha * gamma, (1 - alpha) * gamma
        assert abs(value - (far + near + smoothness if near > far else 2 * far + smoothness)) < 1e-9
        assert value <= min(grid) + 1e-9 and min(grid) < 1.08 * value
        one = Coins.best_one(penalty, smoothness).smoothness(penalty, smoothness)
        singles = [
            Coins.of(penalty, p0, 0.0).smoothness(penalty, smoothness)
            for p0 in np.linspace(0.005, 0.995, 199)
        ]
        assert abs(one - min(singles)) < 0.02 * one and one <= min(singles) + 1e-9
        if near > far:
            assert abs(float(best.tau[0]) - far / near) < 1e-12
    fed = federation()
    chosen = AsyncL2GD.from_theory(fed, alpha=0.2, gamma=1.0)
    top = chosen.constants(fed)["smoothness"]
    assert abs(chosen.p0 - 0.4 / (1 + top)) < 1e-9 and abs(chosen.p - 0.6 / (0.6 + top)) < 1e-9
    assert abs(chosen.lr - 0.5 / (1 + top)) < 1e-9


def test_counts():
    """Raw rounds and the paper's starts of runs, for independent coins; the ledger has the raw rounds."""
    generator = torch.Generator().manual_seed(0)
    rounds, p0, p = 400_000, 0.3, 0.4
    everyone = torch.rand(rounds, generator=generator) < p0
    inside = torch.rand(rounds, generator=generator) < p
    found = count_rounds(everyone, inside)
    coins = Coins.of(Penalty.of(CLUSTERS, 1.0, alpha=0.5), p0, p)
    for (name, count), expected in zip(found.items(), (119875, 83987, 111900, 67194, 46985), strict=True):
        assert abs(count / coins.expected_counts(rounds)[name] - 1) < 0.012, name
        assert abs(count / expected - 1) < 0.02, name
    fed = federation()
    run = fit(fed, make("async-l2gd", p0=p0, p=p), rounds=300, evaluate_every=0)
    ledger = run.ledger.to_dicts()
    counted = run.algorithm.counts(fed, 300)
    together = {row["round"] for row in ledger if row["link"] == "cluster-server"}
    assert len(together) == counted["global"] == run.state.rounds_global
    pulled = {(row["round"]) for row in ledger if row["phase"] == "pull_inside"}
    assert len(pulled) == sum(
        any(run.algorithm.toss(fed, t, K)[1]) for t in range(1, 301)
    ) and run.state.rounds_within == sum(sum(run.algorithm.toss(fed, t, K)[1]) for t in range(1, 301))
    floats = run.fed.ledger.total("floats_up", phase="means", link="cluster-server")
    assert floats == counted["global"] * K * D
    assert run.fed.ledger.total("floats_up", link="client-server") == 0


def test_averages_may_be_reused_when_weights_are_equal():
    """After a within round m_j stays if gamma is constant in the cluster; after a global round m stays if
    alpha gamma is, and m_j moves to (1 - c) m_j + c m with c = lr gamma alpha / p0."""
    rng, lr = np.random.default_rng(0), 0.05
    u = torch.from_numpy(rng.normal(size=(N, D)))
    penalty = Penalty.of(CLUSTERS, 0.8, alpha=0.3)
    coins = Coins.of(penalty, 0.3, 0.4)
    inside, common = penalty.means(u)
    talked = u - lr * coins.inside(penalty) * (u - inside[CLUSTERS])
    assert (penalty.means(talked)[0] - inside).abs().max() < 1e-14
    pulled = u - lr * (coins.far(penalty) * (u - common) + coins.near(penalty) * (u - inside[CLUSTERS]))
    c = lr * 0.8 * 0.3 / 0.3
    assert (penalty.means(pulled)[1] - common).abs().max() < 1e-14
    assert (penalty.means(pulled)[0] - ((1 - c) * inside + c * common)).abs().max() < 1e-14
    uneven = Penalty.of(CLUSTERS, torch.from_numpy(0.2 + rng.uniform(size=N)), alpha=0.3)
    middle, _ = uneven.means(u)
    talked = u - lr * coins.inside(uneven) * (u - middle[CLUSTERS])
    assert (uneven.means(talked)[0] - middle).abs().max() > 1e-4


@pytest.mark.slow
def test_single_cluster_and_independent_clusters():
    """alpha = 1 forgets the clusters; alpha = 0 (lambda = 0) is each cluster by itself, and needs no p0."""
    fed, one = federation(), federation(clusters=torch.zeros(N, dtype=torch.long))
    pulled = fit(fed, make("async-l2gd", alpha=1.0, p0=0.3, p=0.0), rounds=50).personal
    torch.testing.assert_close(
        pulled, fit(one, make("async-l2gd", alpha=1.0, p0=0.3, p=0.0), rounds=50).personal
    )
    settings = {"lambda_": 0.0, "p0": 0.0, "p": 0.4, "lr": 0.03}
    run = fit(fed, make("async-l2gd", **settings), rounds=800, evaluate_every=0)
    best = minimiser_of(fed, run.algorithm)
    assert (run.personal - best).norm() < 0.3 * best.norm()
    assert run.fed.ledger.total("floats_up", link="cluster-server") == 0
    theory = AsyncL2GD.from_theory(fed, lambda_=0.0, gamma=1.0)
    assert theory.p0 == 0 and theory.p > 0
    assert torch.isfinite(fit(fed, theory, rounds=20).personal).all()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"p0": 1.0}, "p0 = 1"),
        ({"p0": 0.0}, "p0 = 0"),
        ({"p0": 0.0, "coins": "one", "lambda_": 0.0}, "never talks inside"),
        ({"p": 1.0}, r"p = 1.0"),
        ({"p": 0.0, "tau": 0.5}, "tau"),
        ({"p": (0.1, 0.2)}, "one for each of 3"),
        ({"gamma": -1.0}, "gamma"),
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": (1.0, -1.0, 1.0)}, "gamma"),
        ({"gamma": (1.0, 1.0)}, "2 numbers for 3 clusters"),
        ({"lambda_": -0.5}, "lambda_"),
        ({"alpha": 1.2}, "alpha"),
        ({"coins": "many"}, "coins"),
    ],
)
def test_bad_settings(settings, match):
    with pytest.raises(SettingError, match=match):
        fit(federation(), make("async-l2gd", **settings), rounds=1)


def test_clusters_must_be_known_and_may_have_one_client():
    with pytest.raises(SettingError, match="known clusters"):
        unknown = Federation.from_arrays([np.ones((2, 1))] * 2, [np.ones(2)] * 2, models.linear())
        fit(unknown, make("async-l2gd"), rounds=1)
    alone = federation(clusters=torch.arange(N))
    algorithm = AsyncL2GD.from_theory(alone, lambda_=1.0, gamma=1.0)
    run = fit(alone, algorithm.replace(lr=algorithm.lr / 20), rounds=2500, evaluate_every=0)
    best = minimiser_of(alone, algorithm)
    assert (run.personal - best).norm() < 0.1 * best.norm()


def test_any_module_and_minibatches():
    """A network learns; gradients on four rows at a time."""
    from torch import nn

    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(8, 3)) for _ in range(4)]
    ys = [x.sum(1) for x in xs]
    run = fit(
        Federation.from_arrays(
            xs, ys, models.network(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))),
            clusters=[0, 0, 1, 1],
        ),
        make("async-l2gd", lr=0.02, batch=4),
        rounds=150,
    )  # fmt: skip
    first, last = (value for _, value in [*zip(*run.history.curve("train", "loss"), strict=True)][::20])
    assert last < 0.5 * first


def test_share_of_balanced_coins():
    assert balanced_share(0.3, torch.tensor([[0.0]])).item() == 1.0
    assert balanced_share(0.0, torch.tensor([[0.4]])).item() == 0.0

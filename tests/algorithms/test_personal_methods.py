"""Personal methods, from APFL to FedPHP, against numpy loops, closed forms and special cases."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from coterie import Federation, fit, models
from coterie.algorithms import make

BATCH, STEPS, LR, ROUNDS = 4, 3, 0.05, 4
EXACT = {"rtol": 0, "atol": 1e-11}


def trained(fed, name, rounds=ROUNDS, **settings):
    method = make(name, **{"lr": LR, "batch": BATCH, **settings})
    return fit(fed, method, rounds, evaluate_every=0)


def descend(ref, t, client, w, *, change=lambda y: 0.0, steps=STEPS, first=1, lr=LR, call=0):
    """Local steps on the minibatches of round t; `change` is added to every gradient."""
    for step in range(first, first + steps):
        rows = ref.rows("train", t, call, client, step, BATCH)
        w = w - lr * (ref.grad(client, w, rows) + change(w))
    return w


# APFL


@pytest.mark.parametrize("adapt", [True, False])
def test_apfl_is_a_plain_loop(reference, adapt):
    ref = reference()
    run = trained(ref.fed, "apfl", steps=STEPS, learn_alpha=adapt, alpha=0.4)
    x, v, alpha = np.zeros(3), np.zeros((4, 3)), np.full(4, 0.4)
    for t in range(1, ROUNDS + 1):
        ends = []
        for k in range(4):
            w = x
            for step in range(1, STEPS + 1):
                rows = ref.rows("train", t, int(t == 1), k, step, BATCH)
                shared = ref.grad(k, w, rows)
                own = ref.grad(k, alpha[k] * v[k] + (1 - alpha[k]) * w, rows)
                slope = own @ (v[k] - w)
                w, v[k] = w - LR * shared, v[k] - LR * alpha[k] * own
                if adapt and step == 1:
                    alpha[k] = min(1, max(0, alpha[k] - LR * slope))
            ends.append(w)
        x = ref.share @ ends
    np.testing.assert_allclose(run.state.x, x, **EXACT)
    mixed = alpha[:, None] * v + (1 - alpha[:, None]) * x
    np.testing.assert_allclose(run.personal, mixed, **EXACT)


def test_apfl_at_its_ends_is_fedavg_and_training_alone(reference):
    fed = reference().fed
    shared = trained(fed, "apfl", alpha=0.0, learn_alpha=False, batch=0)
    torch.testing.assert_close(shared.personal, trained(fed, "fedavg", batch=0).personal, **EXACT)
    alone = trained(fed, "apfl", alpha=1.0, learn_alpha=False)
    torch.testing.assert_close(alone.personal, trained(fed, "local").personal, **EXACT)


# FedALA


@pytest.mark.parametrize("mixing_steps", [0, 2])
def test_fedala_is_a_plain_loop(reference, mixing_steps):
    ref = reference()
    run = trained(ref.fed, "fedala", steps=STEPS, mixing_steps=mixing_steps, mixing_lr=0.8)
    x, v, a = np.zeros(3), np.zeros((4, 3)), np.ones((4, 3))
    for t in range(1, ROUNDS + 1):
        for k in range(4):
            for step in range(1, mixing_steps + 1):
                rows = ref.rows("train", t, int(t == 1), k, step, BATCH)
                grad = ref.grad(k, v[k] + (x - v[k]) * a[k], rows)
                a[k] = np.clip(a[k] - 0.8 * grad * (x - v[k]), 0, 1)
            start = v[k] + (x - v[k]) * a[k]
            v[k] = descend(ref, t, k, start, first=mixing_steps + 1, call=int(t == 1))
        x = ref.share @ v
    np.testing.assert_allclose(run.personal, v, **EXACT)
    np.testing.assert_allclose(run.state.x, x, **EXACT)
    assert (a.min() < 0.9) == bool(mixing_steps)


def test_fedala_without_mixing_deploys_the_local_models_of_fedavg(reference):
    fed = reference().fed
    run = trained(fed, "fedala", mixing_steps=0, batch=0)
    torch.testing.assert_close(run.state.x, trained(fed, "fedavg", batch=0).state.x, **EXACT)


def test_fedala_mixes_the_head_alone_where_asked():
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(8, 5, generator=draw, dtype=torch.float64) for _ in range(3)]
    ys = [torch.randint(0, 2, (8,), generator=draw) for _ in range(3)]
    fed = Federation.from_arrays(xs, ys, models.mlp((4,), classes=2))
    run = trained(fed, "fedala", mix="head", mixing_lr=50.0, rounds=3)
    weights, head = run.fed.runtime.kept("weights"), fed.model.groups["head"]
    assert (weights[:, ~head] == 1).all() and (weights[:, head] < 1).any()


# FedAMP and pFedGraph


def test_fedamp_is_a_plain_loop(reference):
    ref = reference()
    run = trained(ref.fed, "fedamp", steps=STEPS, sigma=0.5, share=0.8, lam=0.3)
    v = np.zeros((4, 3))
    for t in range(1, ROUNDS + 1):
        squares = ((v[:, None] - v[None]) ** 2).sum(-1)
        apart = sorted(squares[i, j] for i in range(4) for j in range(4) if i != j)
        sigma = max(0.5 * apart[(len(apart) - 1) // 2], 1e-300)  # torch's median is the lower one
        xi = 0.8 / 3 * np.exp(-squares / sigma) * (1 - np.eye(4))
        u = v + xi @ v - xi.sum(1, keepdims=True) * v
        v = np.array([descend(ref, t, k, u[k], change=lambda y, u=u[k]: 0.3 * (y - u)) for k in range(4)])
    np.testing.assert_allclose(run.personal, v, **EXACT)


def test_the_graph_solves_its_quadratic_program(reference):
    ref = reference()
    draws = np.random.default_rng(0).normal(size=(4, 3))
    method = make("pfedgraph", strength=0.4)
    found = method.weights(ref.fed, torch.tensor(draws)).numpy()
    cosine = draws @ draws.T / np.outer(*[np.linalg.norm(draws, axis=1)] * 2)
    for k in range(4):
        solved = minimize(
            lambda w, k=k: 0.4 * ((w - ref.share) ** 2).sum() - w @ cosine[k],
            ref.share,
            jac=lambda w, k=k: 0.8 * (w - ref.share) - cosine[k],
            bounds=[(0, 1)] * 4,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
            options={"ftol": 1e-15},
        )
        np.testing.assert_allclose(found[k], solved.x, atol=1e-7)
        support = found[k] > 0  # Karush-Kuhn-Tucker: equal slopes on the support, none smaller elsewhere
        slope = 0.8 * (found[k] - ref.share) - cosine[k]
        np.testing.assert_allclose(slope[support], slope[support].min(), atol=1e-12)
        assert (slope[~support] >= slope[support].min() - 1e-12).all() and abs(found[k].sum() - 1) < 1e-12


def test_pfedgraph_is_a_plain_loop(reference):
    ref = reference()
    run = trained(ref.fed, "pfedgraph", steps=STEPS, lam=0.3)
    method, v = make("pfedgraph"), np.zeros((4, 3))
    for t in range(1, ROUNDS + 1):
        u = method.weights(ref.fed, torch.tensor(v)).numpy() @ v
        v = np.array([descend(ref, t, k, u[k], change=lambda y, u=u[k]: 0.3 * (y - u)) for k in range(4)])
    np.testing.assert_allclose(run.personal, v, **EXACT)


@pytest.mark.parametrize("name", ["fedamp", "pfedgraph"])
def test_opposite_clients_get_no_weight(reference, name):
    ref = reference((20,) * 6, opposite=True)
    run = trained(ref.fed, name, rounds=30, lr=0.1, batch=0)
    weights = make(name).weights(ref.fed, run.state.models)
    assert weights[:3, 3:].max() < 0.01 and weights[3:, :3].max() < 0.01
    assert weights[:3, :3].min() > 0.05 and weights[3:, 3:].min() > 0.05


# FedFomo


@pytest.mark.parametrize("split", ["train", "validation"])
def test_fedfomo_is_a_plain_loop(reference, split):
    """Everybody is a candidate of everybody; without validation rows models are compared on the training rows."""
    ref, most = reference((12, 18, 60, 24), noise=2.0), 0
    if split == "validation":
        fed = Federation.from_arrays(ref.xs, ref.ys, models.linear(), split=(0.5, 0.5, 0.0))
        own = [fed.runtime.rows("train").of(k) for k in range(4)]
        ref = replace(ref, fed=fed, xs=[x.numpy() for x, _ in own], ys=[y.numpy() for _, y in own])
    run = trained(ref.fed, "fedfomo", steps=STEPS, candidates=3)
    v, affinity = np.zeros((4, 3)), np.zeros((4, 4))

    def loss(k, w):
        x, y = (part.numpy() for part in ref.fed.runtime.rows(split).of(k))
        return 0.5 * np.mean((x @ w - y) ** 2)

    for t in range(1, ROUNDS + 1):
        mixed = v.copy()
        for k in range(4):
            gains = np.zeros(4)
            for j in set(range(4)) - {k}:
                gains[j] = max(0.0, loss(k, v[k]) - loss(k, v[j])) / max(1e-12, np.linalg.norm(v[j] - v[k]))
            most = max(most, (gains > 0).sum())
            gains = gains / max(1e-30, gains.sum())
            affinity[k] += gains
            mixed[k] = v[k] + gains @ (v - v[k])
        v = np.array([descend(ref, t, k, mixed[k], call=int(t == 1)) for k in range(4)])
    np.testing.assert_allclose(run.personal, v, **EXACT)
    np.testing.assert_allclose(run.state.affinity, affinity, **EXACT)
    assert most >= 2 or split == "train"


def test_fedfomo_weighs_its_own_kind_by_validation_rows(reference):
    ref = reference((40,) * 6, opposite=True, noise=1.0)
    fed = Federation.from_arrays(ref.xs, ref.ys, models.linear(), split=(0.5, 0.5, 0.0))
    affinity = trained(fed, "fedfomo", rounds=20, candidates=2).state.affinity
    assert affinity[:3, :3].sum() + affinity[3:, 3:].sum() > 5
    assert affinity[:3, 3:].sum() + affinity[3:, :3].sum() < 0.01


def test_fedfomo_asks_for_those_it_knows_and_some_others(reference):
    fed = reference((5,) * 6).fed
    affinity = torch.zeros(6, 6, dtype=torch.float64)
    affinity[:, 2] = affinity[:, 4] = 1.0
    method, seen = make("fedfomo", candidates=3, explore=0.3), set()
    for t in range(1, 30):
        picked = method._picked(fed, affinity, t)
        assert picked.shape == (6, 3)
        for k in range(6):
            mine = set(picked[k].tolist())
            assert k not in mine and len(mine) == 3 and {2, 4} - {k} <= mine
            seen |= {(k, other) for other in mine}
    assert len(seen) == 30  # everybody is tried in the end


# CFL


def test_cfl_is_fedavg_until_it_splits(reference):
    ref = reference()
    run = trained(ref.fed, "cfl", steps=STEPS, moving=1.0)
    average = trained(ref.fed, "fedavg", steps=STEPS)
    torch.testing.assert_close(run.state.models[0], average.state.x, **EXACT)


def test_cfl_finds_two_opposite_clusters_and_does_not_split_like_clients(reference):
    ref = reference((20, 25, 30, 20, 25, 30), opposite=True)
    run = trained(ref.fed, "cfl", rounds=60, batch=0)
    assert run.state.labels.tolist() == [0, 0, 0, 1, 1, 1]
    oracle = Federation.from_arrays(ref.xs, ref.ys, models.linear(), clusters=run.state.labels)
    known = trained(oracle, "oracle", rounds=400, batch=0)
    torch.testing.assert_close(trained(ref.fed, "cfl", rounds=400, batch=0).personal, known.personal, **EXACT)
    like = Federation.from_arrays(ref.xs[:3] * 2, ref.ys[:3] * 2, models.linear())
    assert trained(like, "cfl", rounds=60).state.labels.max() == 0


def test_a_split_is_the_one_of_the_least_similar_pairs():
    draws = torch.randn(7, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    draws[3:] -= 3
    second = make("cfl")._second_part(draws)
    unit = torch.nn.functional.normalize(draws, dim=1)
    cosine = unit @ unit.t()

    def across(part):  # the largest cosine between the two parts, which the paper minimises
        return float(cosine[part][:, ~part].max())

    parts = (torch.tensor(part) for part in itertools.product([False, True], repeat=7))
    best = min((part for part in parts if 0 < part.sum() < 7), key=across)
    assert across(second) == across(best)


# FedEM and FedSoft


def test_fedem_is_a_plain_loop(reference):
    ref, m = reference(), 2
    run = trained(ref.fed, "fedem", steps=STEPS, components=m)
    thetas = make("fedem", components=m).start(ref.fed).thetas.numpy()
    pi = np.full((4, m), 1 / m)
    for t in range(1, ROUNDS + 1):
        ends = np.zeros((4, m, 3))
        for k in range(4):
            losses = 0.5 * (ref.xs[k] @ thetas.T - ref.ys[k][:, None]) ** 2
            q = pi[k] * np.exp(-losses)
            q /= q.sum(1, keepdims=True)
            ends[k] = thetas
            for step in range(1, STEPS + 1):
                rows = ref.rows("train", t, int(t == 1), k, step, BATCH)
                x, y = ref.xs[k][rows], ref.ys[k][rows]
                for c in range(m):
                    ends[k, c] -= LR * x.T @ (q[rows, c] * (x @ ends[k, c] - y)) / len(rows)
            pi[k] = q.mean(0)
        thetas = np.tensordot(ref.share, ends, 1)
    np.testing.assert_allclose(run.state.thetas, thetas, **EXACT)
    np.testing.assert_allclose(run.fed.runtime.kept("pi"), pi, **EXACT)


def test_fedem_with_one_component_is_fedavg(logistic):
    fed = logistic(n=4, rows=12)
    one = trained(fed, "fedem", components=1, batch=0)
    torch.testing.assert_close(one.personal, trained(fed, "fedavg", batch=0).personal, **EXACT)


def test_fedem_finds_two_opposite_clusters(reference):
    ref = reference((40,) * 6, opposite=True)
    run = trained(ref.fed, "fedem", rounds=150, components=2, lr=0.2, batch=0)
    pi = run.fed.runtime.kept("pi")
    best = pi.argmax(1).tolist()
    assert best in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]) and pi.amax(1).min() > 0.9
    half = [np.concatenate(part[:3]) for part in (ref.xs, ref.ys)]
    np.testing.assert_allclose(run.personal[0], np.linalg.lstsq(*half, rcond=None)[0], atol=0.05)


def test_fedsoft_is_a_plain_loop(reference):
    ref, s, floor, lam = reference(), 2, 0.05, 0.4
    run = trained(ref.fed, "fedsoft", steps=STEPS, centres=s, floor=floor, lam=lam, interval=2)
    centres = make("fedsoft", centres=s).start(ref.fed).centres.numpy()
    v, u = np.zeros((4, 3)), np.zeros((4, s))
    for t in range(1, ROUNDS + 1):
        for k in range(4):
            if t % 2 == 1:
                nearest = ((ref.xs[k] @ centres.T - ref.ys[k][:, None]) ** 2).argmin(1)
                u[k] = np.maximum(np.bincount(nearest, minlength=s) / len(nearest), floor)
                u[k] /= u[k].sum()

            def pull(y, u=u[k], centres=centres):
                return lam * sum(u[c] * (y - centres[c]) for c in range(s))

            v[k] = descend(ref, t, k, v[k], change=pull, call=int(t == 1))
        weights = u * np.array([[len(x)] for x in ref.xs])
        centres = weights.T @ v / weights.sum(0)[:, None]
    np.testing.assert_allclose(run.state.centres, centres, **EXACT)
    np.testing.assert_allclose(run.personal, v, **EXACT)


def test_fedsoft_finds_two_opposite_clusters(reference):
    ref = reference((40,) * 6, opposite=True)
    run = trained(ref.fed, "fedsoft", rounds=80, centres=2, lr=0.1, batch=0)
    method = make("fedsoft", centres=2)
    assert float((run.personal[0] - run.personal[1]).norm()) < 0.1
    assert float((run.personal[0] + run.personal[5]).norm()) < 0.1
    assert float((run.state.centres[0] + run.state.centres[1]).norm()) < 0.2 and method.centres == 2


# L2SGD


def test_l2sgd_is_a_plain_loop_with_the_coins_of_the_paper(reference):
    ref, lam, p, rounds = reference(), 0.7, 0.3, 8
    run = trained(ref.fed, "l2sgd", lam=lam, p=p, rounds=rounds)
    x, v, counts = np.zeros(3), np.zeros((4, 3)), []
    for t in range(1, rounds + 1):
        counts.append(math.floor(math.log(1 - ref.fed.coin("steps", t)) / math.log(1 - p)))
        v = v - LR * lam / p * (v - x)
        for k in range(4):
            v[k] = descend(ref, t, k, v[k], steps=counts[-1], lr=LR / (1 - p), call=int(t == 1))
        x = v.mean(0)
    np.testing.assert_allclose(run.state.x, x, **EXACT)
    np.testing.assert_allclose(run.personal, v - LR * lam / p * (v - x), **EXACT)
    assert len(set(counts)) > 2


def test_steps_between_means_are_geometric(reference):
    fed, p = reference().fed, 0.3
    counts = np.array(
        [math.floor(math.log1p(-fed.coin("steps", t)) / math.log1p(-p)) for t in range(1, 4001)]
    )
    for k in range(5):
        share = p * (1 - p) ** k
        assert abs((counts == k).mean() - share) < 4 * math.sqrt(share * (1 - share) / 4000)


@pytest.mark.slow
def test_l2sgd_tends_to_the_minimiser_of_its_objective(reference):
    """sum_i f_i(v_i) + lam/2 |v_i - mean|^2, solved as one linear system; the distance shrinks with lr."""
    ref, lam, n, d = reference(), 0.5, 4, 3
    system, right = np.zeros((n * d, n * d)), np.zeros(n * d)
    for k, (x, y) in enumerate(zip(ref.xs, ref.ys, strict=True)):
        own = slice(k * d, (k + 1) * d)
        system[own, own] += x.T @ x / len(x)
        right[own] = x.T @ y / len(x)
    system += lam * np.kron(np.eye(n) - np.full((n, n), 1 / n), np.eye(d))
    best = np.linalg.solve(system, right).reshape(n, d)
    off = []
    for lr, rounds in ((0.02, 300), (0.002, 1500)):
        run = trained(ref.fed, "l2sgd", lr=lr, lam=lam, p=0.2, batch=0, rounds=rounds)
        off.append(np.abs(run.personal.numpy() - best).max())
    assert off[1] < 0.04 * np.abs(best).max() and off[1] < off[0]


# FedPHP


def test_fedphp_is_a_plain_loop(reference):
    ref, lam, mu = reference(), 0.4, 0.8
    run = trained(ref.fed, "fedphp", steps=STEPS, lam=lam, mu=mu)
    x, private = np.zeros(3), np.zeros((4, 3))
    for t in range(1, ROUNDS + 1):
        ends = []
        for k in range(4):
            own = private[k].copy()
            y = descend(ref, t, k, x, change=lambda y, own=own: lam * (y - own), call=int(t == 1))
            memory = mu * (t - 1) / t
            private[k] = memory * own + (1 - memory) * y
            ends.append(y)
        x = ref.share @ ends
    np.testing.assert_allclose(run.state.x, x, **EXACT)
    np.testing.assert_allclose(run.personal, private, **EXACT)

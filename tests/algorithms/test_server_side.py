"""FedPAC and pFedHN, whose servers compute something for each client, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

import coterie
from coterie import models
from coterie.algorithms import make
from coterie.theory.simplex import best_mixtures
from tests.algorithms.reference import federation, flat, losses, mean, minibatches, sgd, start

ROUNDS, LR = 3, 0.2
BODY, HEAD = ["1.weight", "1.bias"], ["3.weight", "3.bias"]


def network():
    return models.mlp((5,), activation="tanh", stacked=False, classes=3)


def objective(a: Tensor, means: Tensor, variances: Tensor, i: int) -> Tensor:
    return (a.square() * variances).sum() + (a @ means - means[i]).square().sum()


@pytest.mark.parametrize("seed", range(3))
def test_the_best_mixtures_are_those_of_another_solver(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    means = torch.randn(6, 9, generator=draw, dtype=torch.float64)
    variances = torch.rand(6, generator=draw, dtype=torch.float64) * 3
    found = best_mixtures(means, variances)
    torch.testing.assert_close(found.sum(1), torch.ones(6, dtype=torch.float64))
    assert (found >= 0).all()
    for i in range(6):
        other = minimize(
            lambda a, i=i: float(objective(torch.as_tensor(a), means, variances, i)),
            [1 / 6] * 6,
            bounds=[(0, 1)] * 6,
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
            method="SLSQP",
            options={"ftol": 1e-12},
        )
        assert float(objective(found[i], means, variances, i)) <= other.fun + 1e-7


def test_mixtures_of_clients_alike_weigh_by_precision() -> None:
    found = best_mixtures(torch.zeros(3, 2).double(), torch.tensor([1.0, 2.0, 4.0]).double())
    torch.testing.assert_close(found, torch.tensor([[4 / 7, 2 / 7, 1 / 7]]).double().expand(3, 3))


def test_fedpac_is_that_of_torch() -> None:
    fed = federation(network())
    algorithm = make("fedpac", lr=LR, head_steps=3, steps=4, batch=5, lam=0.6)
    run = coterie.fit(fed, algorithm, ROUNDS)
    module, first = start(fed)
    rows = [fed.runtime.rows("train").of(k) for k in range(fed.n)]
    body, heads, centres = ({name: first[name] for name in BODY}, [{n: first[n] for n in HEAD}] * fed.n, None)

    def hidden(w, x: Tensor) -> Tensor:
        return torch.tanh(x @ w["1.weight"].T + w["1.bias"])

    def pulled(module, w, x: Tensor, y: Tensor) -> Tensor:
        plain = losses(module, w, x, y)
        return plain if centres is None else plain + 0.6 * (hidden(w, x) - centres[y]).square().mean(1)

    for t in range(1, ROUNDS + 1):
        found, ends = [hidden(body, x) for x, _ in rows], []
        for k in range(fed.n):
            w = sgd(module, body | heads[k], minibatches(fed, algorithm, k, t, 3, "head"), LR, HEAD)
            ends.append(sgd(module, w, minibatches(fed, algorithm, k, t, 4), LR, BODY, pulled))
        means, variances = [], []
        for h, (_, y) in zip(found, rows, strict=True):
            share = [(y == c).double().mean() for c in range(3)]
            middle = [h[y == c].mean(0) if (y == c).any() else torch.zeros(5).double() for c in range(3)]
            means.append(torch.cat([p * m for p, m in zip(share, middle, strict=True)]))
            within = sum(
                p * h[y == c].square().sum(1).mean() - p**2 * m.square().sum()
                for c, (p, m) in enumerate(zip(share, middle, strict=True))
                if p > 0
            )
            variances.append(within / len(y))
        weights = best_mixtures(torch.stack(means), torch.stack(variances))
        heads = [mean([{n: w[n] for n in HEAD} for w in ends], row) for row in weights]
        body = mean([{n: w[n] for n in BODY} for w in ends], fed.rows["train"])
        labels = torch.cat([y for _, y in rows])
        centres = torch.stack([torch.cat(found)[labels == c].mean(0) for c in range(3)])
    expected = torch.stack([flat(body | head) for head in heads])
    torch.testing.assert_close(run.personal, expected, rtol=0, atol=1e-8)


def test_a_linear_hypernetwork_moves_as_its_jacobian_says() -> None:
    """theta_i = W v_i + b: W moves by delta v', b by delta, v_i by W' delta."""
    fed = federation(network())
    algorithm = make("pfedhn", lr=LR, steps=4, batch=5, layers=0, embedding=2, server_lr=0.3)
    run = coterie.fit(fed, algorithm, ROUNDS)
    module, first = start(fed)
    begun = algorithm.start(fed)
    v, weight, bias = begun.descriptions, begun.weight, begun.bias
    assert v.shape == (3, 2) and torch.equal(bias, fed.initial_model())
    for t in range(1, ROUNDS + 1):
        theta = v @ weight.T + bias
        deltas = []
        for k in range(fed.n):
            parts = theta[k].split([value.numel() for value in first.values()])
            w = {name: p.view_as(first[name]) for name, p in zip(first, parts, strict=True)}
            deltas.append(
                theta[k] - flat(sgd(module, w, minibatches(fed, algorithm, k, t, 4), LR, list(first)))
            )
        delta = torch.stack(deltas)
        v, weight, bias = (
            v - 0.3 * delta @ weight,
            weight - 0.3 * delta.T @ v / 3,
            bias - 0.3 * delta.mean(0),
        )
    torch.testing.assert_close(run.personal, v @ weight.T + bias, rtol=0, atol=1e-12)


def test_a_hypernetwork_learns_models_that_differ() -> None:
    """Two kinds of clients with opposite labels: one model for all knows nothing, the written models do."""
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(40, 3, generator=draw) for _ in range(6)]
    ys = [((x[:, 0] > 0) ^ bool(k % 2)).long() for k, x in enumerate(xs)]
    fed = coterie.Federation.from_arrays(xs, ys, models.logistic(intercept=True), split=(0.6, 0.2, 0.2))
    run = coterie.fit(fed, make("pfedhn", lr=0.3, server_lr=0.3), 60, evaluate_every=0)
    one = coterie.fit(fed, make("fedavg", lr=0.3), 60, evaluate_every=0)
    assert (
        float(run.score("test", "accuracy").mean()) > 0.85 > 0.7 > float(one.score("test", "accuracy").mean())
    )

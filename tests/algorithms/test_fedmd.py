"""FedMD with different architectures against plain PyTorch on the same minibatches."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

import coterie
from coterie import Federation, models
from coterie._core import randomness
from coterie._core.errors import SettingError
from coterie.algorithms import make
from tests.algorithms.reference import federation, flat, minibatches, sgd, start

ROUNDS, LR = 3, 0.2


def networks(classes: int = 3):
    small, deep = (
        models.mlp(hidden, activation="tanh", stacked=False, classes=classes) for hidden in ((5,), (3, 4))
    )
    return small, deep


def test_only_scores_travel_between_different_architectures() -> None:
    fed = federation(models.assorted(*networks()))
    algorithm = make("fedmd", lr=LR, steps=4, batch=5, digest_lr=0.3, digest_steps=2, rows=10)
    run = coterie.fit(fed, algorithm, ROUNDS)
    kinds = [start(federation(one)) for one in networks()]
    modules, own = zip(*(kinds[k % 2] for k in range(fed.n)), strict=True)
    own = list(own)
    public = randomness.normal(randomness.slots(randomness.key(fed.seed, "public rows"), 40)).view(10, 4)
    consensus = None
    for t in range(1, ROUNDS + 1):
        for k, module in enumerate(modules):
            for _ in range(2 if consensus is not None else 0):
                w = {name: value.requires_grad_() for name, value in own[k].items()}
                apart = (functional_call(module, w, (public,)) - consensus).square().sum(1).mean() / 2
                grads = torch.autograd.grad(apart, list(w.values()))
                own[k] = {name: (w[name] - 0.3 * g).detach() for name, g in zip(w, grads, strict=True)}
            own[k] = sgd(module, own[k], minibatches(fed, algorithm, k, t, 4), LR, list(own[k]))
        said = [functional_call(module, w, (public,)) for module, w in zip(modules, own, strict=True)]
        consensus = torch.stack(said).mean(0)
    torch.testing.assert_close(run.state.consensus, consensus, rtol=0, atol=1e-11)
    for k in range(fed.n):
        mine = flat(own[k])
        torch.testing.assert_close(run.personal[k, : len(mine)], mine, rtol=0, atol=1e-11)
        assert run.personal[k, -1] == k % 2 and not run.personal[k, len(mine) : -1].any()
        rows = torch.randn(6, 4).double()
        expected = torch.softmax(functional_call(modules[k], own[k], (rows,)), 1)
        torch.testing.assert_close(run.model(fed.names[k])(rows).detach(), expected, rtol=0, atol=1e-11)
    assert run.fed.ledger.total("floats_up") == ROUNDS * fed.n * 10 * 3
    assert run.fed.ledger.total("floats_down") == ROUNDS * fed.n * (10 * 3 + 1)


@pytest.mark.parametrize("loop", [False, True])
def test_any_runtime_trains_several_architectures(loop: bool) -> None:
    algorithm = make("fedmd", lr=LR, batch=5, rows=10)
    expected = coterie.fit(federation(models.assorted(*networks())), algorithm, 2)
    found = coterie.fit(federation(models.assorted(*networks()), loop=loop), algorithm, 2)
    torch.testing.assert_close(found.personal, expected.personal, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_clients_learn_from_each_other() -> None:
    """Few rows of one rule: with digestion the clients say more nearly the same, and it is more nearly right."""
    draw = torch.Generator().manual_seed(0)
    slope = torch.tensor([1.0, -1.0, 0.5, 0.0])
    xs = [torch.randn(30, 4, generator=draw) for _ in range(8)]
    ys = [x @ slope + torch.randn(30, generator=draw) for x in xs]
    model = models.assorted(models.mlp((8,), stacked=False), models.mlp((4, 4), stacked=False))
    fed = Federation.from_arrays(xs, ys, model, split=(0.4, 0.1, 0.5))
    alone, together = (
        coterie.fit(fed, make("fedmd", lr=0.1, digest_lr=0.1, digest_steps=steps), 20, evaluate_every=0)
        for steps in (0, 10)
    )
    assert float(together.score("test", "rmse").mean()) < 0.95 * float(alone.score("test", "rmse").mean())


def test_a_description_makes_the_same_model() -> None:
    model = models.assorted(*networks()).fit_to(torch.zeros(6, 4), torch.arange(6) % 3)
    again = models.from_description(model.describe())
    w, x = model.start_of(1, 3, torch.float64), torch.randn(5, 4).double()
    torch.testing.assert_close(model.scores(w, x), again.scores(w, x))


def test_what_is_refused() -> None:
    with pytest.raises(SettingError, match="networks, such as"):
        models.assorted(models.linear())
    with pytest.raises(SettingError, match="same number of outputs"):
        models.assorted(models.mlp(classes=3), models.mlp(classes=4)).fit_to(
            torch.zeros(6, 4), torch.arange(6) % 3
        )

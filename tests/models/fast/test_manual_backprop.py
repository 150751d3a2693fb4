"""Gradients of one client that are written out are those of autograd, and so are the steps taken with them."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from coterie import models
from coterie.data.rows import Batch
from coterie.models.fast import manual_backprop
from coterie.models.fast.manual_backprop import written_out
from coterie.models.network import Network, network

ROWS = 7


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def plain() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )


def odd() -> nn.Module:
    """Strides, paddings, dilations, groups, no biases, nests, and something of one's own before the first weight."""
    body = nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), stride=2, padding=(1, 0), bias=False),
        nn.Tanh(),
        nn.MaxPool2d(3, stride=1, padding=1, ceil_mode=True),
        nn.ReLU(inplace=True),
    )
    deep = nn.Sequential(nn.Conv2d(4, 6, 2, dilation=2, groups=2), nn.Sigmoid(), nn.MaxPool2d((2, 1)))
    return nn.Sequential(Doubled(), body, nn.Identity(), deep, nn.Flatten(), nn.Linear(12, 3, bias=False))


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(128, 6), nn.Tanh(), nn.ReLU(), nn.Linear(6, 3))


def one_output() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 8), nn.Flatten(), nn.Linear(3, 1), nn.Tanh())


CHAINS = {"plain": plain, "odd": odd, "dense": dense}


def rows(kind: str = "multiclass") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 2, 8, 8, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3 if kind == "multiclass" else 2, (ROWS,), generator=generator)
    weight = torch.rand(ROWS, dtype=torch.float64, generator=generator)
    return x, y.double() if kind == "regression" else y, weight


def built(module: nn.Module, x: Tensor, y: Tensor, **options: object) -> tuple[Network, Tensor]:
    model = network(module, stacked=False, **options).fit_to(x, y)  # type: ignore[arg-type]
    return model, model.initial(0, torch.float64)


def by_autograd(model: Network) -> Network:
    """The same model, made to build graphs."""
    other = replace(model, decisions={})
    manual_backprop._made[other] = None
    return other


@pytest.mark.parametrize("name", CHAINS)
def test_gradients_are_those_of_autograd(name: str) -> None:
    x, y, weight = rows()
    model, w = built(CHAINS[name](), x, y)
    assert written_out(model) is not None
    torch.testing.assert_close(
        model.grad(w, x, y, weight), by_autograd(model).grad(w, x, y, weight), rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("kind", ["binary", "regression"])
def test_one_output(kind: str) -> None:
    x, y, weight = rows(kind)
    model, w = built(one_output(), x, y)
    assert model.task == kind and written_out(model) is not None
    torch.testing.assert_close(
        model.grad(w, x, y, weight), by_autograd(model).grad(w, x, y, weight), rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(("l2", "prox"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.5)])
def test_steps_are_those_of_autograd(name: str, l2: float, prox: float) -> None:
    x, y, weight = rows()
    model, w = built(CHAINS[name](), x, y, l2=l2)
    batches = [Batch(x[k:], y[k:], weight[k:]) for k in range(3)]
    start, anchor = w.clone(), w + 0.1
    found = model.sgd(w, batches, 0.1, prox, anchor)
    torch.testing.assert_close(
        found, by_autograd(model).sgd(w, batches, 0.1, prox, anchor), rtol=1e-12, atol=1e-13
    )
    assert torch.equal(w, start)
    one_by_one = w
    for batch in batches:
        grad = model.grad(one_by_one, batch.x, batch.y, batch.weight)
        one_by_one = one_by_one - 0.1 * (grad + prox * (one_by_one - anchor))
    torch.testing.assert_close(found, one_by_one, rtol=1e-12, atol=1e-13)


def test_pooling_first_changes_nothing_where_values_are_equal_or_negative() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 3))
    x, y, weight = rows()
    x = x.sign()  # many ties
    model, w = built(module, x, y)
    assert isinstance(written_out(model).layers[1], nn.MaxPool2d)  # type: ignore[union-attr]
    torch.testing.assert_close(
        model.grad(w, x, y, weight), by_autograd(model).grad(w, x, y, weight), rtol=1e-12, atol=1e-13
    )


def test_memory_is_held_for_few_shapes_and_threads_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, weight = rows()
    model, w = built(plain(), x, y)
    kept = written_out(model).operations  # type: ignore[union-attr]
    parts = [slice(size) for size in (ROWS, 3, 2, ROWS, 3)]
    wanted = [by_autograd(model).grad(w, x[part], y[part], weight[part]) for part in parts]

    def all_of_them(_: int) -> list[Tensor]:
        return [model.grad(w, x[part], y[part], weight[part]) for part in parts]

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(all_of_them, range(20)):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    assert 1 <= len(kept) <= 2
    assert all([key[0][0] for key in shapes] == [ROWS, 3] for shapes in kept.values())
    kept.clear()
    monkeypatch.setattr(manual_backprop, "KEPT_BYTES", 0)
    torch.testing.assert_close(all_of_them(0), wanted, rtol=1e-12, atol=1e-13)
    assert list(kept.values()) == [{}]


def frozen() -> nn.Module:
    module = plain()
    module[0].weight.requires_grad_(False)
    return module


def hooked() -> nn.Module:
    module = plain()
    module[1].register_forward_hook(lambda layer, inputs, output: 2 * output)
    return module


def with_layer(layer: nn.Module) -> nn.Module:
    module = plain()
    module[1] = layer
    return module


@pytest.mark.parametrize(
    "module",
    [
        frozen(),
        hooked(),
        with_layer(nn.GELU()),
        with_layer(nn.GroupNorm(2, 4)),
        nn.Sequential(nn.Conv2d(2, 1, 3, padding="same"), nn.Flatten(), nn.Linear(64, 3)),
        nn.Sequential(nn.Conv2d(2, 1, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(64, 3)),
        nn.Sequential(nn.Flatten(1, 2), nn.Conv1d(16, 3, 8), nn.Flatten(), nn.Linear(3, 3)),
    ],
)
def test_what_is_not_written_out_is_left_to_autograd(module: nn.Module) -> None:
    x, y, weight = rows()
    model, w = built(copy.deepcopy(module), x, y)
    assert written_out(model) is None
    assert model.grad(w, x, y, weight).isfinite().all()


def test_other_losses_and_precisions_are_left_to_autograd() -> None:
    x, y, _ = rows()
    assert written_out(built(plain(), x, y, precision="bf16")[0]) is None
    assert written_out(built(plain(), x, y, compiled=True)[0]) is None
    own = nn.CrossEntropyLoss(reduction="none")
    assert written_out(built(plain(), x, y, loss=own)[0]) is None


def test_networks_of_the_zoo() -> None:
    x, y, weight = rows()
    for model, written in ((models.cnn(channels=(3,), hidden=4), True), (models.resnet9(width=4), False)):
        fitted = model.fit_to(x, y)
        w = fitted.initial(0, torch.float64)
        assert (written_out(fitted) is not None) == written
        torch.testing.assert_close(
            fitted.grad(w, x, y, weight), by_autograd(fitted).grad(w, x, y, weight), rtol=1e-10, atol=1e-12
        )

"""A chain of linear layers is stacked without vmap, with the gradients of one client after the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coterie import models
from coterie._core import threads
from coterie.models.fast import batched_layers, mlp_kernel
from coterie.models.flat_module import FlatModule
from coterie.models.network import Network


def rows(k: int = 5, b: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(k, b, 2, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (k, b), generator=generator)
    weight = torch.rand(k, b, generator=generator, dtype=torch.float64)
    return x, y, weight


def by_autograd(model: Network, w: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    """Gradients of one client after the other, through a graph."""
    grads = []
    for own, *client in zip(w, *rows, strict=True):
        leaf = own.clone().requires_grad_()
        grads += torch.autograd.grad(model.objective(leaf, *client), leaf)
    return torch.stack(grads)


@pytest.mark.parametrize("hidden", [(6, 5), (9, 8), (9, 5, 7)])  # narrower and wider than there are rows
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_stacked_equals_one_after_the_other(activation: str, hidden: tuple[int, ...]) -> None:
    x, y, weight = rows()
    model = models.mlp(hidden=hidden, activation=activation, stacked=True).fit_to(
        x.flatten(0, 1), y.flatten()
    )
    w = torch.randn(5, model.d, dtype=torch.float64)
    assert model.flat_module.layers is not None
    torch.testing.assert_close(
        model.grad(w, x, y, weight), by_autograd(model, w, x, y, weight), rtol=1e-12, atol=1e-12
    )


def test_shared_parameters_and_regression_without_bias() -> None:
    x, _, weight = rows()
    y = x.sum((-2, -1))
    chain = nn.Sequential(
        nn.Flatten(), nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh()), nn.Linear(4, 1)
    )
    model = models.network(chain, stacked=True).fit_to(x.flatten(0, 1), y.flatten())
    w = torch.randn(model.d, dtype=torch.float64).expand(5, -1)
    torch.testing.assert_close(
        model.grad(w, x, y, weight), by_autograd(model, w, x, y, weight), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("last", [nn.Identity(), nn.Sigmoid(), nn.Tanh()])
@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
def test_one_output_and_an_activation_at_the_end(loss: str, last: nn.Module) -> None:
    """Written out, the gradient is that of autograd for two classes and for numbers."""
    x, y, weight = rows()
    y = y.clamp(max=1) if loss == "cross-entropy" else x.sum((-2, -1))
    body = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1), last)
    model = models.network(body, loss=loss, stacked=True).fit_to(x.flatten(0, 1), y.flatten())
    assert batched_layers.supports(model, torch.zeros(5, model.d))
    w = torch.randn(5, model.d, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(
        model.grad(w, x, y, weight), by_autograd(model, w, x, y, weight), rtol=1e-12, atol=1e-12
    )


def test_activations_before_the_first_layer_and_after_each_other() -> None:
    x, y, weight = rows()
    body = nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(6, 4), nn.ReLU(), nn.Sigmoid(), nn.Linear(4, 4))
    model = models.network(body, stacked=True).fit_to(x.flatten(0, 1), y.flatten())
    w, before = torch.randn(5, model.d, dtype=torch.float64), x.clone()
    torch.testing.assert_close(
        model.grad(w, x, y, weight), by_autograd(model, w, x, y, weight), rtol=1e-12, atol=1e-12
    )
    assert torch.equal(x, before), "rows are overwritten"


def test_a_stack_in_parts_has_the_gradients_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, weight = rows()
    model = models.mlp(hidden=(6, 5), stacked=True).fit_to(x.flatten(0, 1), y.flatten())
    w = torch.randn(5, model.d, dtype=torch.float64)
    whole = model.grad(w, x, y, weight)
    monkeypatch.setattr(threads, "SHARED_PRODUCTS", 1)
    with threads.helped(3):
        torch.testing.assert_close(model.grad(w, x, y, weight), whole, rtol=1e-14, atol=1e-14)


def test_other_activations_go_through_autograd() -> None:
    x, y, _ = rows()
    model = models.mlp(activation="gelu", stacked=True).fit_to(x.flatten(0, 1), y.flatten())
    w = torch.zeros(5, model.d)
    assert batched_layers.supports(model, w) and not mlp_kernel.supports(model, w)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(6, 4), nn.Softmax(-1), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.0), nn.Linear(4, 2)),
        nn.Sequential(nn.Flatten(0, 1), nn.Linear(6, 2)),
        nn.Sequential(nn.Conv1d(1, 1, 3), nn.Flatten()),
    ],
)
def test_what_is_no_chain_is_left_to_vmap(module: nn.Module) -> None:
    assert FlatModule(module).layers is None


def test_frozen_layers_are_no_chain() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    assert FlatModule(module).layers is None


def test_a_layer_that_is_there_twice_is_no_chain() -> None:
    twice = nn.Linear(4, 4)
    assert FlatModule(nn.Sequential(twice, nn.ReLU(), twice)).layers is None

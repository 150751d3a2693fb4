"""Operations of a chain are those of torch, forwards and backwards, in both orders of memory and when called again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from coterie.models.fast import operations
from coterie.models.fast.operations import (
    Activation,
    Dense,
    Direct,
    Flat,
    MaxPool,
    Operation,
    Unfolded,
    held_bytes,
    positions_first,
)

Make = Callable[[nn.Module, Tensor], Operation]


def normal(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def laid_out(x: Tensor) -> Tensor:
    return positions_first(positions_first(x).contiguous())


def check(layer: nn.Module, operation: Operation, x: Tensor, needs: bool = True) -> None:
    """Two calls give outputs and grads of autograd."""
    layer = layer.double()
    for seed in range(2):
        leaf = (x + seed).clone().requires_grad_()
        wanted = layer(leaf)
        grad = normal(wanted.shape, seed)
        leaves = [*layer.parameters(), leaf]
        grads = list(torch.autograd.grad(wanted, leaves, grad))
        parameters = [part.detach().clone() for part in layer.parameters()]
        found = {k: torch.zeros_like(part) for k, part in enumerate(parameters)}

        def put(
            k: int,
            left: Tensor,
            right: Tensor | None = None,
            columns: slice = operations.ALL,
            found: dict[int, Tensor] = found,
        ) -> None:
            if right is None:
                found[k] = left
            else:
                found[k][:, columns] = left.t() @ right

        given = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(leaf.detach())
        torch.testing.assert_close(
            operation.forward(given, *parameters), wanted.detach(), rtol=1e-12, atol=1e-13
        )
        inner = operation.backward(grad, needs, put)
        for k, part in found.items():
            torch.testing.assert_close(part, grads[k], rtol=1e-12, atol=1e-13)
        if needs:
            torch.testing.assert_close(inner, grads[-1], rtol=1e-12, atol=1e-13)
        else:
            assert inner is None


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(1, 4, 3),
        nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), bias=False),
        nn.Conv2d(3, 2, 2, dilation=(2, 3), padding=2),
    ],
)
def test_convolutions(layer: nn.Conv2d) -> None:
    x = normal(torch.Size((5, layer.in_channels, 9, 8)), 0)
    assert Unfolded.takes(layer)
    check(layer, Unfolded(layer, x), x, needs=False)
    for inputs in (x, laid_out(x)):
        check(layer, Direct(layer), inputs)


def test_unfolding_is_for_few_inputs_of_one_group() -> None:
    assert not Unfolded.takes(nn.Conv2d(8, 2, 3)) and not Unfolded.takes(nn.Conv2d(2, 2, 3, groups=2))


@pytest.mark.parametrize(
    ("layer", "make"),
    [
        (nn.MaxPool2d(2), MaxPool),
        (nn.MaxPool2d(3, stride=1, padding=1, ceil_mode=True), MaxPool),
        (nn.MaxPool2d((2, 1), dilation=2), MaxPool),
        (nn.Flatten(), lambda layer, x: Flat(x)),
        (nn.ReLU(), lambda layer, x: Activation(layer, alone=False)),
        (nn.ReLU(), lambda layer, x: Activation(layer, alone=True)),
        (nn.Tanh(), lambda layer, x: Activation(layer, alone=True)),
    ],
)
def test_images(layer: nn.Module, make: Make) -> None:
    x = normal(torch.Size((3, 4, 7, 6)), 0)
    for inputs in (x, laid_out(x), x.contiguous(memory_format=torch.channels_last)):
        check(layer, make(layer, inputs), inputs)


@pytest.mark.parametrize("cached", [1, 24, 2**18])
@pytest.mark.parametrize("bias", [True, False])
def test_dense(cached: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "CACHED", cached)
    layer = nn.Linear(10, 6, bias=bias)
    for shape in ((4, 10), (2, 3, 10)):
        check(layer, Dense(), normal(torch.Size(shape), 0))
    check(layer, Dense(), normal(torch.Size((4, 10)), 0), needs=False)


def test_memory_is_counted() -> None:
    x = torch.zeros(2, 3, 4, 4)
    assert held_bytes([Flat(laid_out(x)), Dense()]) == 2 * x.nbytes and held_bytes([Flat(x)]) == 0

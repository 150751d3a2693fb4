"""Convolutions with fewer multiplications are those of torch, forwards and backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie import models
from coterie.data.rows import Batch
from coterie.models.fast import manual_backprop
from coterie.models.fast.manual_backprop import ManualBackprop
from coterie.models.fast.operations import Direct, Unfolded, positions_first
from coterie.models.fast.winograd import Winograd, transformations
from coterie.models.network import Network, network

SHAPES = [  # rows, channels, outputs, height, width
    (20, 32, 64, 26, 26),
    (3, 1, 2, 9, 7),
    (2, 3, 5, 3, 3),
    (4, 32, 16, 11, 14),
    (1, 3, 1, 6, 6),
]
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-12}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def exact(layer: nn.Conv2d, x: Tensor, grad: Tensor, *parameters: Tensor) -> list[Tensor]:
    """Outputs and the grads of weights, biases and inputs, by autograd."""
    leaves = [value.double().clone().requires_grad_() for value in (*parameters, x)]
    bias = leaves[1] if layer.bias is not None else None
    sizes: tuple[Any, ...] = (layer.stride, layer.padding, layer.dilation)
    outputs = functional.conv2d(leaves[-1], leaves[0], bias, *sizes)
    return [outputs.detach(), *torch.autograd.grad(outputs, leaves, grad.double())]


def drawn(layer: nn.Conv2d, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Inputs, grads of the outputs, parameters."""
    x = normal(*shape, seed=seed)
    with torch.no_grad():
        grad = normal(*layer.double()(x).shape, seed=seed + 1)
    parameters = [normal(*part.shape, seed=seed + 2) for part in layer.parameters()]
    return [value.to(dtype) for value in (x, grad, *parameters)]


def test_transformations_multiply_polynomials() -> None:
    inputs, kernel, results = transformations()
    d, g = normal(6), normal(3, seed=1)
    wanted = torch.stack([d[k : k + 3] @ g for k in range(4)])
    torch.testing.assert_close(results @ ((inputs @ d) * (kernel @ g)), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (0, 1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_convolution_of_torch(
    shape: tuple[int, ...], padding: tuple[int, int], dtype: torch.dtype
) -> None:
    n, c, outputs, height, width = shape
    layer = nn.Conv2d(c, outputs, 3, padding=padding)
    fast = Winograd(layer, torch.empty(n, c, height, width, dtype=dtype))
    for seed in range(2):  # in the same memory
        x, grad, *parameters = drawn(layer, (n, c, height, width), dtype, 10 * seed)
        found: dict[int, Tensor] = {}
        laid_out = positions_first(positions_first(x).contiguous()) if seed else x
        outputs_found = fast.forward(laid_out, *parameters).clone()
        inner = fast.backward(grad, True, found.__setitem__)
        assert inner is not None
        for mine, theirs in zip(
            (outputs_found, found[0], found[1], inner), exact(layer, x, grad, *parameters), strict=True
        ):
            assert apart(mine, theirs) < CLOSE[dtype]


def test_without_biases_and_slopes_of_inputs() -> None:
    layer = nn.Conv2d(3, 4, 3, bias=False)
    x, grad, weight = drawn(layer, (2, 3, 8, 10), torch.float64)
    fast = Winograd(layer, x)
    found: dict[int, Tensor] = {}
    wanted = exact(layer, x, grad, weight)
    assert apart(fast.forward(x, weight), wanted[0]) < 1e-12
    assert fast.backward(grad, False, found.__setitem__) is None
    assert set(found) == {0} and apart(found[0], wanted[1]) < 1e-12


@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (0, 1)])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES[1:] if min(shape[3:]) > 3])
def test_the_largest_are_those_of_torch(shape: tuple[int, ...], padding: tuple[int, int]) -> None:
    n, c, outputs, height, width = shape
    layer = nn.Conv2d(c, outputs, 3, padding=padding)
    x, _, *parameters = drawn(layer, (n, c, height, width), torch.float64)
    x[0] = 0  # the outputs of this row are equal, but for edges
    leaves = [value.clone().requires_grad_() for value in (*parameters, x)]
    wanted = functional.max_pool2d(functional.conv2d(leaves[2], leaves[0], leaves[1], padding=padding), 2)
    grad = normal(*wanted.shape, seed=5)
    grads = torch.autograd.grad(wanted, leaves, grad)
    fast = Winograd(layer, x, pooled=True)
    for _ in range(2):
        found: dict[int, Tensor] = {}
        torch.testing.assert_close(fast.forward(x, *parameters), wanted.detach(), rtol=1e-11, atol=1e-11)
        inner = fast.backward(grad, True, found.__setitem__)
        for mine, theirs in zip((found[0], found[1], inner), grads, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("layer", "pools"),
    [
        (nn.MaxPool2d(2), True),
        (nn.MaxPool2d((2, 2), (2, 2)), True),
        (nn.MaxPool2d(2, 1), False),
        (nn.MaxPool2d(2, padding=1), False),
        (nn.MaxPool2d((2, 1)), False),
        (nn.MaxPool2d(2, ceil_mode=True), False),
        (nn.AvgPool2d(2), False),
    ],
)
def test_pools(layer: nn.Module, pools: bool) -> None:
    assert Winograd.pools(layer) == pools


@pytest.mark.parametrize(
    ("layer", "takes"),
    [
        (nn.Conv2d(16, 16, 3, padding=1), True),
        (nn.Conv2d(15, 16, 3), False),
        (nn.Conv2d(16, 16, 3, stride=2), False),
        (nn.Conv2d(16, 16, 3, dilation=2), False),
        (nn.Conv2d(16, 16, (3, 1)), False),
        (nn.Conv2d(32, 32, 3, groups=2), False),
    ],
)
def test_takes(layer: nn.Conv2d, takes: bool) -> None:
    x = torch.empty(1, layer.in_channels, 8, 8)
    assert Winograd.takes(layer, x) == takes
    assert not Winograd.takes(layer, x.expand(257, -1, -1, -1))


def convolutional() -> nn.Module:
    """Tiles that do and do not fit, paddings, and positions first in memory before every kind of layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 24, 3, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(24, 4, 2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


def fitted(dtype: torch.dtype) -> tuple[Network, Tensor, list[Batch]]:
    x = torch.rand(9, 14, 14, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x.unsqueeze(1).to(dtype)
    y = torch.arange(9) % 3
    model = network(convolutional, stacked=False).fit_to(x, y)
    batches = [Batch(x[k:], y[k:], torch.full((9 - k,), 0.1, dtype=dtype)) for k in (0, 0, 1, 4)]
    return model, model.initial(0, dtype), batches


def told(model: Network, batches: list[Batch], choice: str) -> Network:
    """The same model, with every measured convolution computed in this way."""
    layered = ManualBackprop(model.flat_module, {})
    manual_backprop._made[model] = layered
    for batch in batches:
        model.grad(model.initial(0, batch.x.dtype), batch.x, batch.y, batch.weight)
    assert layered.decisions
    fixed = ManualBackprop(model.flat_module, dict.fromkeys(layered.decisions, choice))
    manual_backprop._made[model] = fixed
    return model


def kinds(model: Network) -> list[type]:
    """Of the operations last used."""
    chain = manual_backprop.written_out(model)
    assert chain is not None
    (shapes,) = chain.operations.values()
    return [type(operation) for operation in list(shapes.values())[-1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_torch(dtype: torch.dtype) -> None:
    model, w, batches = fitted(dtype)
    ends = {choice: told(model, batches, choice).sgd(w, batches, 0.1) for choice in ("winograd", "direct")}
    assert apart(ends["winograd"] - w, (ends["direct"] - w).double()) < (
        2e-5 if dtype is torch.float32 else 1e-12
    )
    assert kinds(model).count(Direct) == 3
    again = told(model, batches, "winograd")
    assert torch.equal(again.sgd(w, batches, 0.1), ends["winograd"])
    assert kinds(again).count(Winograd) == 2 and kinds(again).count(Unfolded) == 1


def test_the_choice_is_remembered() -> None:
    x = torch.rand(8, 28, 28, generator=torch.Generator().manual_seed(0))
    y = torch.arange(8) % 3
    model = models.cnn(channels=(16, 16), hidden=4).fit_to(x, y)
    model.sgd(model.initial(0, torch.float32), [Batch(x, y, torch.full((8,), 0.1))], 0.1)
    assert set(model.measured().values()) <= {"winograd", "direct"} and len(model.measured()) == 1

"""Forward and backward passes of layers, each for inputs of one shape, in memory that is reused.

Images are [rows, channels, height, width] to callers. In memory they are [height, width, rows, channels] after an
operation that is fastest in that order; the next operations take them as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

aten = torch.ops.aten

ALL = slice(None)
CACHED = 2**18  # weights that the cache of a core holds
MOST_UNFOLDED = 64  # inputs of one output of a convolution that is computed as one product

Derivative = Callable[[Tensor, Tensor], Tensor]
"""(derivative in the outputs, outputs) -> derivative in the inputs; may overwrite the first."""

DERIVATIVES: dict[type[nn.Module], Derivative] = {
    nn.ReLU: lambda grad, output: aten.threshold_backward(grad, output, 0),
    nn.Tanh: lambda grad, output: aten.tanh_backward(grad, output),
    nn.Sigmoid: lambda grad, output: aten.sigmoid_backward(grad, output),
    nn.Identity: lambda grad, output: grad,
}

Put = Callable[..., None]
"""(k, left, right=None, columns=ALL) takes the gradient of parameter k: `left`, or left' right for some of its
columns if `right` is given."""


class Operation(Protocol):
    """Layer with a forward and a backward pass.

    The result of `forward` is valid until its next call; `backward` may overwrite the gradient that it is given. A
    parameter is not read after its gradient was put.
    """

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor: ...

    def backward(self, grad: Tensor, needs: bool, put: Put) -> Tensor | None:
        """Put the gradients of the parameters and, if it `needs` it, return that of the inputs."""
        ...


def positions_first(x: Tensor) -> Tensor:
    """Permute [N, C, H, W] to [H, W, N, C], or back."""
    return x.permute(2, 3, 0, 1)


class Direct:
    """Convolution by torch."""

    def __init__(self, layer: nn.Conv2d) -> None:
        self.geometry: tuple[Any, ...] = (layer.stride, layer.padding, layer.dilation, layer.groups)
        self.kept: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor:
        weight, bias = parameters if len(parameters) == 2 else (parameters[0], None)
        self.kept = (x, *parameters)
        return functional.conv2d(x, weight, bias, *self.geometry)

    def backward(self, grad: Tensor, needs: bool, put: Put) -> Tensor | None:
        (x, weight, *biases), self.kept = self.kept, ()
        if biases:
            put(1, grad.sum((0, 2, 3)))
        stride, padding, dilation, groups = self.geometry
        inner: Tensor | None
        inner, own, _ = aten.convolution_backward(
            grad, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [needs, True, False]
        )
        put(0, own)
        return inner


class Unfolded:
    """First convolution of a network with few inputs per output, as one matrix product."""

    def __init__(self, layer: nn.Conv2d, x: Tensor) -> None:
        n, c, height, width = x.shape
        padding: Any = layer.padding
        tall, wide = height + 2 * padding[0], width + 2 * padding[1]
        spans = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        self.ends = ((tall - spans[0]) // layer.stride[0] + 1, (wide - spans[1]) // layer.stride[1] + 1)
        self.padded = x.new_zeros(c, tall, wide, n)
        self.inside = self.padded[:, padding[0] : padding[0] + height, padding[1] : padding[1] + width]
        steps = self.padded.stride()
        self.windows = self.padded.as_strided(
            (c, *layer.kernel_size, *self.ends, n),
            (
                steps[0],
                *(step * d for step, d in zip(steps[1:3], layer.dilation, strict=True)),
                *(step * s for step, s in zip(steps[1:3], layer.stride, strict=True)),
                1,
            ),
        )
        inputs = self.windows[..., 0, 0, 0].numel()
        self.patches = x.new_ones(inputs + (layer.bias is not None), self.windows[0, 0, 0].numel())
        self.folded = self.patches[:inputs].view(self.windows.shape)
        self.y = x.new_empty(self.patches.shape[1], layer.out_channels)
        self.shape = layer.weight.shape

    @staticmethod
    def takes(layer: nn.Conv2d) -> bool:
        """Return True if the convolution can be computed this way without much memory."""
        return layer.groups == 1 and layer.weight[0].numel() <= MOST_UNFOLDED

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor:
        self.inside.copy_(x.permute(1, 2, 3, 0))
        self.folded.copy_(self.windows)
        matrix = torch.cat([part.reshape(len(part), -1) for part in parameters], 1)
        torch.mm(self.patches.t(), matrix.t(), out=self.y)
        return positions_first(self.y.view(*self.ends, len(x), -1))

    def backward(self, grad: Tensor, needs: bool, put: Put) -> Tensor | None:
        assert not needs
        own = self.patches @ positions_first(grad).reshape(self.y.shape)
        inputs = self.shape[1:].numel()
        put(0, own[:inputs].t().reshape(self.shape))
        if len(own) > inputs:
            put(1, own[inputs])
        return None


class Dense:
    """Linear layer whose backward pass reads large weights once, in blocks of columns that are updated at once."""

    def __init__(self) -> None:
        self.grads: Tensor | None = None
        self.kept: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor:
        self.kept = (x, *parameters)
        return functional.linear(x, *parameters)

    def backward(self, grad: Tensor, needs: bool, put: Put) -> Tensor | None:
        (x, weight, *biases), self.kept = self.kept, ()
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        if biases:
            put(1, rows.sum(0))
        if not needs:
            put(0, rows, inputs)
            return None
        if self.grads is None:
            self.grads = torch.empty_like(x, memory_format=torch.contiguous_format)
        inner, step = self.grads.view(inputs.shape), max(1, CACHED // len(weight))
        for first in range(0, weight.shape[1], step):
            columns = slice(first, first + step)
            torch.mm(rows, weight[:, columns], out=inner[:, columns])
            put(0, rows, inputs[:, columns], columns)
        return self.grads


class MaxPool:
    """Max pool, which sees images stored position by position as one image with many channels."""

    def __init__(self, layer: nn.MaxPool2d, x: Tensor) -> None:
        sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        self.window: list[Any] = [list(size) if isinstance(size, tuple) else [size, size] for size in sizes]
        self.window.append(layer.ceil_mode)
        self.rows = len(x)
        self.joined = x.dim() == 4 and positions_first(x).is_contiguous()
        self.results: tuple[Tensor, Tensor] | None = None
        self.grads: Tensor | None = None
        self.x: Tensor | None = None

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor:
        self.x = self._joined(x)
        if self.results is None:
            self.results = aten.max_pool2d_with_indices(self.x, *self.window)
        else:
            values, places = self.results
            aten.max_pool2d_with_indices.out(self.x, *self.window, out=values, indices=places)
        return self._parted(self.results[0])

    def backward(self, grad: Tensor, needs: bool, put: Put) -> Tensor | None:
        assert self.x is not None and self.results is not None
        if self.grads is None:
            self.grads = torch.empty_like(self.x)
        aten.max_pool2d_with_indices_backward.grad_input(
            self._joined(grad), self.x, *self.window, self.results[1], grad_input=self.grads
        )
        return self._parted(self.grads)

    def _joined(self, x: Tensor) -> Tensor:
        return positions_first(x).flatten(2).unsqueeze(0).permute(0, 3, 1, 2) if self.joined else x

    def _parted(self, x: Tensor) -> Tensor:
        return positions_first(x[0].permute(1, 2, 0).unflatten(2, (self.rows, -1))) if self.joined else x


class Flat:
    """Flatten all axes but the rows, as nn.Flatten does."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.copies = x.shape, not x.is_contiguous()
        if self.copies:
            self.values = torch.empty_like(x, memory_format=torch.contiguous_format)
            self.grads = torch.empty_like(x)

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor:
        return self.values.copy_(x).flatten(1) if self.copies else x.flatten(1)

    def backward(self, grad: Tensor, needs: bool, put: Put) -> Tensor | None:
        grad = grad.reshape(self.shape)
        return self.grads.copy_(grad) if self.copies else grad


class Activation:
    """Activation whose derivative follows from its result; `alone`: it may overwrite its inputs."""

    def __init__(self, layer: nn.Module, alone: bool) -> None:
        self.layer, self.alone = layer, alone
        self.values: Tensor | None = None

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor:
        plain = isinstance(self.layer, nn.ReLU)
        self.values = x.relu_() if plain and self.alone else x.relu() if plain else self.layer(x)
        return self.values

    def backward(self, grad: Tensor, needs: bool, put: Put) -> Tensor | None:
        assert self.values is not None
        if isinstance(self.layer, nn.ReLU):
            aten.threshold_backward.grad_input(grad, self.values, 0, grad_input=grad)
            return grad
        return DERIVATIVES[type(self.layer)](grad, self.values)


def held_bytes(operations: list[Operation]) -> int:
    """Return the bytes that these operations hold for their next call."""
    values = itertools.chain.from_iterable(vars(operation).values() for operation in operations)
    return sum(value.nbytes for value in values if isinstance(value, Tensor))

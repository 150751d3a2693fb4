"""Layers of a chain forwards and backwards, each for inputs of one shape, in memory that it uses again and again.

Images are [rows, channels, height, width] to those who call. In memory they are [height, width, rows, channels] after
an operation that is fastest in that order, which the next ones take as it comes.
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

Slope = Callable[[Tensor, Tensor], Tensor]
"""(derivative in the outputs, outputs) -> derivative in the inputs; may overwrite the first."""

SLOPES: dict[type[nn.Module], Slope] = {
    nn.ReLU: lambda slope, output: aten.threshold_backward(slope, output, 0),
    nn.Tanh: lambda slope, output: aten.tanh_backward(slope, output),
    nn.Sigmoid: lambda slope, output: aten.sigmoid_backward(slope, output),
    nn.Identity: lambda slope, output: slope,
}

Put = Callable[..., None]
"""(k, left, right=None, columns=ALL) takes the slope of parameter k: `left` or, where there is a `right`, left' right,
which is that of some of its columns."""


class Operation(Protocol):
    """What `forward` returns holds until its next call; `backward` may write into the slope that it is given.

    A parameter whose slope has been put is not read again.
    """

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor: ...

    def backward(self, slope: Tensor, needs: bool, put: Put) -> Tensor | None:
        """Puts the slopes of the parameters and returns those of the inputs where it `needs` them."""
        ...


def positions_first(x: Tensor) -> Tensor:
    """[N, C, H, W] as [H, W, N, C] and back."""
    return x.permute(2, 3, 0, 1)


class Direct:
    """A convolution as torch has it."""

    def __init__(self, layer: nn.Conv2d) -> None:
        self.geometry: tuple[Any, ...] = (layer.stride, layer.padding, layer.dilation, layer.groups)
        self.kept: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor:
        weight, bias = parameters if len(parameters) == 2 else (parameters[0], None)
        self.kept = (x, *parameters)
        return functional.conv2d(x, weight, bias, *self.geometry)

    def backward(self, slope: Tensor, needs: bool, put: Put) -> Tensor | None:
        (x, weight, *biases), self.kept = self.kept, ()
        if biases:
            put(1, slope.sum((0, 2, 3)))
        stride, padding, dilation, groups = self.geometry
        inner: Tensor | None
        inner, own, _ = aten.convolution_backward(
            slope, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [needs, True, False]
        )
        put(0, own)
        return inner


class Unfolded:
    """A convolution of few inputs per output as one product with all of them; for a first layer, whose inputs stay."""

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
        """Whether the convolution can be computed this way without much memory."""
        return layer.groups == 1 and layer.weight[0].numel() <= MOST_UNFOLDED

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor:
        self.inside.copy_(x.permute(1, 2, 3, 0))
        self.folded.copy_(self.windows)
        matrix = torch.cat([part.reshape(len(part), -1) for part in parameters], 1)
        torch.mm(self.patches.t(), matrix.t(), out=self.y)
        return positions_first(self.y.view(*self.ends, len(x), -1))

    def backward(self, slope: Tensor, needs: bool, put: Put) -> Tensor | None:
        assert not needs
        own = self.patches @ positions_first(slope).reshape(self.y.shape)
        inputs = self.shape[1:].numel()
        put(0, own[:inputs].t().reshape(self.shape))
        if len(own) > inputs:
            put(1, own[inputs])
        return None


class Dense:
    """A linear layer. Backwards, large weights are read once: in blocks of columns, which move as soon as they are."""

    def __init__(self) -> None:
        self.slopes: Tensor | None = None
        self.kept: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor:
        self.kept = (x, *parameters)
        return functional.linear(x, *parameters)

    def backward(self, slope: Tensor, needs: bool, put: Put) -> Tensor | None:
        (x, weight, *biases), self.kept = self.kept, ()
        rows, inputs = slope.flatten(0, -2), x.flatten(0, -2)
        if biases:
            put(1, rows.sum(0))
        if not needs:
            put(0, rows, inputs)
            return None
        if self.slopes is None:
            self.slopes = torch.empty_like(x, memory_format=torch.contiguous_format)
        inner, step = self.slopes.view(inputs.shape), max(1, CACHED // len(weight))
        for first in range(0, weight.shape[1], step):
            columns = slice(first, first + step)
            torch.mm(rows, weight[:, columns], out=inner[:, columns])
            put(0, rows, inputs[:, columns], columns)
        return self.slopes


class Pool:
    """A max pool. Images whose positions come first are one image of many channels to it."""

    def __init__(self, layer: nn.MaxPool2d, x: Tensor) -> None:
        sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        self.window: list[Any] = [list(size) if isinstance(size, tuple) else [size, size] for size in sizes]
        self.window.append(layer.ceil_mode)
        self.rows = len(x)
        self.joined = x.dim() == 4 and positions_first(x).is_contiguous()
        self.results: tuple[Tensor, Tensor] | None = None
        self.slopes: Tensor | None = None
        self.x: Tensor | None = None

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor:
        self.x = self._joined(x)
        if self.results is None:
            self.results = aten.max_pool2d_with_indices(self.x, *self.window)
        else:
            values, places = self.results
            aten.max_pool2d_with_indices.out(self.x, *self.window, out=values, indices=places)
        return self._parted(self.results[0])

    def backward(self, slope: Tensor, needs: bool, put: Put) -> Tensor | None:
        assert self.x is not None and self.results is not None
        if self.slopes is None:
            self.slopes = torch.empty_like(self.x)
        aten.max_pool2d_with_indices_backward.grad_input(
            self._joined(slope), self.x, *self.window, self.results[1], grad_input=self.slopes
        )
        return self._parted(self.slopes)

    def _joined(self, x: Tensor) -> Tensor:
        return positions_first(x).flatten(2).unsqueeze(0).permute(0, 3, 1, 2) if self.joined else x

    def _parted(self, x: Tensor) -> Tensor:
        return positions_first(x[0].permute(1, 2, 0).unflatten(2, (self.rows, -1))) if self.joined else x


class Flat:
    """nn.Flatten of everything but the rows."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.copies = x.shape, not x.is_contiguous()
        if self.copies:
            self.values = torch.empty_like(x, memory_format=torch.contiguous_format)
            self.slopes = torch.empty_like(x)

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor:
        return self.values.copy_(x).flatten(1) if self.copies else x.flatten(1)

    def backward(self, slope: Tensor, needs: bool, put: Put) -> Tensor | None:
        slope = slope.reshape(self.shape)
        return self.slopes.copy_(slope) if self.copies else slope


class Activation:
    """A function of each value whose slope follows from its result; `alone` has the values for itself."""

    def __init__(self, layer: nn.Module, alone: bool) -> None:
        self.layer, self.alone = layer, alone
        self.values: Tensor | None = None

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor:
        plain = isinstance(self.layer, nn.ReLU)
        self.values = x.relu_() if plain and self.alone else x.relu() if plain else self.layer(x)
        return self.values

    def backward(self, slope: Tensor, needs: bool, put: Put) -> Tensor | None:
        assert self.values is not None
        if isinstance(self.layer, nn.ReLU):
            aten.threshold_backward.grad_input(slope, self.values, 0, grad_input=slope)
            return slope
        return SLOPES[type(self.layer)](slope, self.values)


def held_bytes(operations: list[Operation]) -> int:
    """Memory that these operations keep for their next call."""
    values = itertools.chain.from_iterable(vars(operation).values() for operation in operations)
    return sum(value.nbytes for value in values if isinstance(value, Tensor))

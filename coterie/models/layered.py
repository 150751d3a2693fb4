"""Gradients of one client of a chain of convolutions, max pools, dense layers and activations, written out.

No graph is built. Images have their channels last in memory, the order in which a processor convolves and pools
fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.models.chain import SLOPES
from coterie.models.skeleton import Skeleton, channels_last

aten = torch.ops.aten

Residuals = Callable[[Tensor], Tensor]
"""Outputs [B, outputs] -> derivatives of the loss in them."""

Put = Callable[..., None]
"""(k, left, right=None) takes the slope of parameter k: `left` or, where there is a `right`, left' right."""


class Layered:
    """A chain of layers as a function of its parameters; what comes before the first of them may be anything."""

    def __init__(self, skeleton: Skeleton) -> None:
        assert skeleton.sequence is not None
        self.skeleton = skeleton
        self.before, layers = _cut(skeleton.sequence)
        self.layers = _pools_first(layers)

    @staticmethod
    def knows(skeleton: Skeleton) -> bool:
        """Whether the module is such a chain."""
        if skeleton.sequence is None:
            return False
        before, layers = _cut(skeleton.sequence)
        return not any(list(layer.buffers()) for layer in before) and all(_written(layer) for layer in layers)

    def gradient(self, w: Tensor, x: Tensor, residuals: Residuals) -> Tensor:
        """[d] for w [d] and rows x [B, ...]."""
        result = torch.empty_like(w.detach())
        places = self.skeleton.parts(result)

        def put(k: int, left: Tensor, right: Tensor | None = None) -> None:
            if right is None:
                places[k].copy_(left)
            else:
                torch.mm(left.t(), right, out=places[k])

        parts = [channels_last(part) for part in self.skeleton.parts(w.detach())]
        self._slopes(parts, x, residuals, put)
        return result

    def descend(
        self,
        w: Tensor,
        batches: Iterable[tuple[Tensor, Residuals]],
        lr: float,
        l2: float = 0.0,
        pull: float = 0.0,
        towards: Tensor | None = None,
    ) -> Tensor:
        """`w` [d] after a step w <- w - lr (gradient(w) + l2 w + pull (w - towards)) on each of these batches.

        Parameters are moved in their places: a step reads and writes no more than it must.
        """
        w = w.clone()
        places = self.skeleton.parts(w)
        parts = [channels_last(part) for part in places]
        centre = self.skeleton.parts(towards) if towards is not None and pull else []
        stays = 1 - lr * (l2 + (pull if centre else 0.0))

        def put(k: int, left: Tensor, right: Tensor | None = None) -> None:
            if right is None:
                parts[k].mul_(stays).sub_(left, alpha=lr)
            else:
                parts[k].addmm_(left.t(), right, beta=stays, alpha=-lr)
            if centre:
                parts[k].add_(centre[k], alpha=lr * pull)

        for x, residuals in batches:
            self._slopes(parts, x, residuals, put)
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)
        return w

    def _slopes(self, parts: Sequence[Tensor], x: Tensor, residuals: Residuals, put: Put) -> None:
        """Forwards and backwards; a parameter whose slope has been put is not read again."""
        value, at = x.to(parts[0].dtype) if x.is_floating_point() else x, 0
        for layer in self.before:
            value = layer(value)
        steps = []
        for layer in self.layers:
            inputs, kept, mine = value, value, parts[at : at + len(list(layer.parameters()))]
            if isinstance(layer, nn.Conv2d):
                bias = None if layer.bias is None else mine[1]
                value = functional.conv2d(inputs, mine[0], bias, *_geometry(layer))
            elif isinstance(layer, nn.Linear):
                value = functional.linear(inputs, *mine)
            elif isinstance(layer, nn.MaxPool2d):
                value, kept = functional.max_pool2d_with_indices(inputs, *_pooling(layer))
            else:
                value = kept = layer(inputs)
            steps.append((layer, inputs, kept, at))
            at += len(mine)
        slope = residuals(value)
        while steps:
            layer, inputs, kept, at = steps.pop()
            if isinstance(layer, nn.Conv2d):
                if layer.bias is not None:
                    put(at + 1, slope.sum((0, 2, 3)))
                stride, padding, dilation, groups = _geometry(layer)
                needs = [bool(steps), True, False]
                slope, own, _ = aten.convolution_backward(
                    slope, inputs, parts[at], None, stride, padding, dilation, False, [0, 0], groups, needs
                )
                put(at, own)
            elif isinstance(layer, nn.Linear):
                rows = slope.flatten(0, -2)
                if layer.bias is not None:
                    put(at + 1, rows.sum(0))
                if steps:
                    slope = slope @ parts[at]
                put(at, rows, inputs.flatten(0, -2))
            elif isinstance(layer, nn.MaxPool2d):
                slope = aten.max_pool2d_with_indices_backward(slope, inputs, *_pooling(layer), kept)
            elif isinstance(layer, nn.Flatten):
                slope = channels_last(slope.reshape(inputs.shape))
            else:
                slope = SLOPES[type(layer)](slope, kept)


def _cut(layers: list[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Before and from the first layer with parameters."""
    first = next(k for k, layer in enumerate(layers) if any(True for _ in layer.parameters()))
    return layers[:first], layers[first:]


def _written(layer: nn.Module) -> bool:
    if type(layer) is nn.Conv2d:
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if type(layer) is nn.MaxPool2d:
        return not layer.return_indices
    if type(layer) is nn.Flatten:
        return (layer.start_dim, layer.end_dim) == (1, -1)
    return type(layer) is nn.Linear or type(layer) in SLOPES


def _pools_first(layers: list[nn.Module]) -> list[nn.Module]:
    """The largest positive part is the positive part of the largest, and there are fewer of them to take."""
    layers = list(layers)
    for k in range(len(layers) - 1):
        if isinstance(layers[k], nn.ReLU) and isinstance(layers[k + 1], nn.MaxPool2d):
            layers[k], layers[k + 1] = layers[k + 1], layers[k]
    return layers


def _geometry(layer: nn.Conv2d) -> tuple[Any, ...]:
    return layer.stride, layer.padding, layer.dilation, layer.groups


def _pooling(layer: nn.MaxPool2d) -> tuple[Any, ...]:
    sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return *(list(size) if isinstance(size, tuple) else [size, size] for size in sizes), layer.ceil_mode

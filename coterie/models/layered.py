"""Gradients of one client of a chain of convolutions, max pools, dense layers and activations, written out.

No graph is built, and memory is used again from step to step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from coterie.models.operations import (
    ALL,
    SLOPES,
    Activation,
    Dense,
    Direct,
    Flat,
    Operation,
    Pool,
    Put,
    Unfolded,
    held_bytes,
)
from coterie.models.skeleton import Skeleton, channels_last
from coterie.models.winograd import Winograd

Residuals = Callable[[Tensor], Tensor]
"""Outputs [B, outputs] -> derivatives of the loss in them."""

KEPT_SHAPES = 2  # of inputs for which a thread holds memory: those of full minibatches and of the last one
KEPT_BYTES = 2**28  # that a thread holds at most for one of them
WORTHWHILE = 0.9  # of the time of torch's convolution: the other one rounds more
TURNS = 4
MEASURING = threading.Lock()


class Layered:
    """A chain of layers as a function of its parameters; what comes before the first of them may be anything."""

    def __init__(self, skeleton: Skeleton, decisions: dict[str, str]) -> None:
        """`decisions` remembers what was measured."""
        assert skeleton.sequence is not None
        self.skeleton, self.decisions = skeleton, decisions
        self.operations: dict[int, dict[Any, list[Operation]]] = {}
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

        def put(k: int, left: Tensor, right: Tensor | None = None, columns: slice = ALL) -> None:
            if right is None:
                places[k].copy_(left)
            else:
                torch.mm(left.t(), right, out=places[k][:, columns])

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

        def put(k: int, left: Tensor, right: Tensor | None = None, columns: slice = ALL) -> None:
            if right is None:
                parts[k].mul_(stays).sub_(left, alpha=lr)
            else:
                parts[k][:, columns].addmm_(left.t(), right, beta=stays, alpha=-lr)
            if centre:
                part = (slice(None), columns) if right is not None else ...
                parts[k][part].add_(centre[k][part], alpha=lr * pull)

        for x, residuals in batches:
            self._slopes(parts, x, residuals, put)
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)
        return w

    @torch.no_grad()
    def _slopes(self, parts: Sequence[Tensor], x: Tensor, residuals: Residuals, put: Put) -> None:
        """Forwards and backwards; a parameter whose slope has been put is not read again."""
        value, at = x.to(parts[0].dtype) if x.is_floating_point() else x, 0
        for layer in self.before:
            value = layer(value)
        mine = self.operations.setdefault(threading.get_ident(), {})
        key = (value.shape, value.stride(), value.dtype, value.device)
        operations, places = mine.pop(key, []), []
        known = bool(operations)
        for k, layer in enumerate(self.layers):
            own = parts[at : at + len(list(layer.parameters()))]
            if not known:
                operations.append(self._operation(k, value, own, operations))
            value = operations[k].forward(value, *own)
            places.append(at)
            at += len(own)
        slope: Tensor | None = residuals(value)
        for k in reversed(range(len(operations))):
            assert slope is not None
            slope = operations[k].backward(slope, k > 0, _onwards(put, places[k]))
        if known or held_bytes(operations) <= KEPT_BYTES:
            mine[key] = operations
            for oldest in list(mine)[:-KEPT_SHAPES]:
                del mine[oldest]

    def _operation(self, k: int, x: Tensor, parts: Sequence[Tensor], before: list[Operation]) -> Operation:
        layer = self.layers[k]
        if isinstance(layer, nn.Conv2d):
            return self._convolution(k, x, parts)
        if isinstance(layer, nn.Linear):
            return Dense()
        if isinstance(layer, nn.MaxPool2d):
            convolved = before[k - 1] if k else None
            if isinstance(convolved, Winograd) and convolved.pooled:
                return Activation(nn.Identity(), alone=False)
            return Pool(layer, x)
        if isinstance(layer, nn.Flatten):
            return Flat(x)
        return Activation(layer, alone=type(self.layers[k - 1]) in (nn.Conv2d, nn.Linear, nn.MaxPool2d))

    def _convolution(self, k: int, x: Tensor, parts: Sequence[Tensor]) -> Operation:
        """The fastest for these inputs, measured once."""
        layer, after = self.layers[k], self.layers[k + 1 : k + 2]
        assert isinstance(layer, nn.Conv2d)
        if x.device.type == "cpu" and k == 0 and Unfolded.takes(layer):
            return Unfolded(layer, x)
        if x.device.type != "cpu" or k == 0 or not Winograd.takes(layer, x):
            return Direct(layer)
        scale = f"2^{len(x).bit_length()} rows {tuple(x.shape[1:])}"
        key = f"conv {layer.out_channels} {layer.padding} {scale} {x.dtype} {torch.get_num_threads()} threads"
        with MEASURING:
            if key not in self.decisions:
                ways: tuple[Operation, ...] = (Direct(layer), Winograd(layer, x))
                direct, tiled = _seconds(ways, x, parts)
                self.decisions[key] = "winograd" if tiled < WORTHWHILE * direct else "direct"
        if self.decisions[key] == "direct":
            return Direct(layer)
        return Winograd(layer, x, pooled=any(Winograd.pools(layer) for layer in after))


def _onwards(put: Put, at: int) -> Put:
    return lambda k, *slope: put(at + k, *slope)


def _seconds(ways: Sequence[Operation], x: Tensor, parts: Sequence[Tensor]) -> list[float]:
    """Of each forwards and backwards, the least of a few turns."""
    least = [float("inf") for _ in ways]
    for _ in range(TURNS):
        for k, way in enumerate(ways):
            start = time.perf_counter()
            way.backward(way.forward(x, *parts), True, lambda *slope: None)
            least[k] = min(least[k], time.perf_counter() - start)
    return least


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

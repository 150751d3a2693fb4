"""Fast path: gradients and SGD of one client of a chain of convolutions, max pools, dense layers and activations.

The derivatives are written out: no graph is built, and memory is reused from step to step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from coterie.models.fast.operations import (
    ALL,
    DERIVATIVES,
    Activation,
    Dense,
    Direct,
    Flat,
    MaxPool,
    Operation,
    Put,
    Unfolded,
    held_bytes,
)
from coterie.models.fast.winograd import Winograd
from coterie.models.flat_module import FlatModule, channels_last
from coterie.models.measuring import is_untimed

if TYPE_CHECKING:
    from coterie.data.rows import Batch
    from coterie.models.network import Network

Residuals = Callable[[Tensor], Tensor]
"""Outputs [B, outputs] -> derivatives of the loss in them."""

KEPT_SHAPES = 2  # of inputs for which a thread holds memory: those of full minibatches and of the last one
KEPT_BYTES = 2**28  # that a thread holds at most for one of them
WORTHWHILE = 0.9  # of the time of torch's convolution: the other one rounds more
TURNS = 4
MEASURING = threading.Lock()


def supports(model: Network, w: Tensor) -> bool:
    """Return True if the derivatives of the module and its loss are written out here."""
    return w.device.type == "cpu" and written_out(model) is not None


def gradient(model: Network, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient [d] of one client."""
    found = written_out(model)
    assert found is not None
    return found.gradient(w, x, model.residuals(y, weight))


def supports_sgd(model: Network) -> bool:
    """Return True if steps of one client can be taken without a graph."""
    return written_out(model) is not None


def sgd(
    model: Network,
    w: Tensor,
    batches: Iterable[Batch],
    lr: float,
    prox: float,
    anchor: Tensor | None,
    linear: Tensor | None = None,
) -> Tensor:
    """Return `w` [d] after a step w <- w - lr (grad(w) + prox (w - anchor) + linear) on each of these minibatches."""
    found = written_out(model)
    assert found is not None
    rows = ((batch.x, model.residuals(batch.y, batch.weight.to(w.dtype))) for batch in batches)
    return found.descend(w, rows, lr, model.l2, prox, anchor, linear)


_made: WeakKeyDictionary[Network, ManualBackprop | None] = WeakKeyDictionary()


def written_out(model: Network) -> ManualBackprop | None:
    """Return the chain of a model, or None if it cannot be written out."""
    if model not in _made:
        plain = isinstance(model.criterion, str) and model.precision == "full" and not model.compiled
        known = plain and ManualBackprop.knows(model.flat_module)
        _made[model] = ManualBackprop(model.flat_module, model.decisions) if known else None
    return _made[model]


class ManualBackprop:
    """Chain of layers as a function of its parameters; layers before the first parameter may be of any type."""

    def __init__(self, flat_module: FlatModule, decisions: dict[str, str]) -> None:
        """Prepare the chain; `decisions` stores the measured choices."""
        assert flat_module.sequence is not None
        self.flat_module, self.decisions = flat_module, decisions
        self.operations: dict[int, dict[Any, list[Operation]]] = {}
        self.before, layers = _cut(flat_module.sequence)
        self.layers = _pools_first(layers)

    @staticmethod
    def knows(flat_module: FlatModule) -> bool:
        """Return True if the module is such a chain."""
        if flat_module.sequence is None:
            return False
        before, layers = _cut(flat_module.sequence)
        return not any(list(layer.buffers()) for layer in before) and all(_written(layer) for layer in layers)

    def gradient(self, w: Tensor, x: Tensor, residuals: Residuals) -> Tensor:
        """Return the gradient [d] for w [d] and rows x [B, ...]."""
        result = torch.empty_like(w.detach())
        places = self.flat_module.parts(result)

        def put(k: int, left: Tensor, right: Tensor | None = None, columns: slice = ALL) -> None:
            if right is None:
                places[k].copy_(left)
            else:
                torch.mm(left.t(), right, out=places[k][:, columns])

        parts = [channels_last(part) for part in self.flat_module.parts(w.detach())]
        self._backward(parts, x, residuals, put)
        return result

    def descend(
        self,
        w: Tensor,
        batches: Iterable[tuple[Tensor, Residuals]],
        lr: float,
        l2: float = 0.0,
        prox: float = 0.0,
        anchor: Tensor | None = None,
        linear: Tensor | None = None,
    ) -> Tensor:
        """Return `w` [d] after steps w <- w - lr (gradient(w) + l2 w + prox (w - anchor) + linear), one for each batch.

        Parameters are updated in place.
        """
        w = w.clone()
        places = self.flat_module.parts(w)
        parts = [channels_last(part) for part in places]
        centre = self.flat_module.parts(anchor) if anchor is not None and prox else []
        stays, pulled = 1 - lr * (l2 + (prox if centre else 0.0)), lr * prox
        if linear is not None:
            centre, pulled = self.flat_module.parts(linear), -lr

        def put(k: int, left: Tensor, right: Tensor | None = None, columns: slice = ALL) -> None:
            if right is None:
                parts[k].mul_(stays).sub_(left, alpha=lr)
            else:
                parts[k][:, columns].addmm_(left.t(), right, beta=stays, alpha=-lr)
            if centre:
                part = (slice(None), columns) if right is not None else ...
                parts[k][part].add_(centre[k][part], alpha=pulled)

        for x, residuals in batches:
            self._backward(parts, x, residuals, put)
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)
        return w

    @torch.no_grad()
    def _backward(self, parts: Sequence[Tensor], x: Tensor, residuals: Residuals, put: Put) -> None:
        """Run forward and backward; a parameter is not read after its gradient was put."""
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
        grad: Tensor | None = residuals(value)
        for k in reversed(range(len(operations))):
            assert grad is not None
            grad = operations[k].backward(grad, k > 0, _onwards(put, places[k]))
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
            return MaxPool(layer, x)
        if isinstance(layer, nn.Flatten):
            return Flat(x)
        return Activation(layer, alone=type(self.layers[k - 1]) in (nn.Conv2d, nn.Linear, nn.MaxPool2d))

    def _convolution(self, k: int, x: Tensor, parts: Sequence[Tensor]) -> Operation:
        """Return the fastest convolution for these inputs, measured once."""
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
                if is_untimed():
                    return Direct(layer)
                backends: tuple[Operation, ...] = (Direct(layer), Winograd(layer, x))
                direct, tiled = _seconds(backends, x, parts)
                self.decisions[key] = "winograd" if tiled < WORTHWHILE * direct else "direct"
        if self.decisions[key] == "direct":
            return Direct(layer)
        return Winograd(layer, x, pooled=any(Winograd.pools(layer) for layer in after))


def _onwards(put: Put, at: int) -> Put:
    return lambda k, *grad: put(at + k, *grad)


def _seconds(backends: Sequence[Operation], x: Tensor, parts: Sequence[Tensor]) -> list[float]:
    """Return the seconds of a forward and backward pass of each operation, the least of a few runs."""
    least = [float("inf") for _ in backends]
    for _ in range(TURNS):
        for k, way in enumerate(backends):
            start = time.perf_counter()
            way.backward(way.forward(x, *parts), True, lambda *grad: None)
            least[k] = min(least[k], time.perf_counter() - start)
    return least


def _cut(layers: list[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the layers before the first one with parameters, and the others."""
    first = next(k for k, layer in enumerate(layers) if any(True for _ in layer.parameters()))
    return layers[:first], layers[first:]


def _written(layer: nn.Module) -> bool:
    if type(layer) is nn.Conv2d:
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if type(layer) is nn.MaxPool2d:
        return not layer.return_indices
    if type(layer) is nn.Flatten:
        return (layer.start_dim, layer.end_dim) == (1, -1)
    return type(layer) is nn.Linear or type(layer) in DERIVATIVES


def _pools_first(layers: list[nn.Module]) -> list[nn.Module]:
    """Move ReLU behind max pooling, which gives the same values with fewer operations."""
    layers = list(layers)
    for k in range(len(layers) - 1):
        if isinstance(layers[k], nn.ReLU) and isinstance(layers[k + 1], nn.MaxPool2d):
            layers[k], layers[k + 1] = layers[k + 1], layers[k]
    return layers

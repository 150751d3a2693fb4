"""Fast path: gradients of a stack on a GPU as replays of CUDA graphs, several clients side by side on streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from coterie.models.cuda_replay import SHAPES, recorded

if TYPE_CHECKING:
    from coterie.models.network import Network

STREAMS = 4  # clients computed side by side; eight were no faster on an H200
LARGEST = 8  # clients in one graph; the rest take further replays

Gradient = Callable[..., Tensor]
"""(w [d], x [B, ...], y [B], weight [B]) -> gradient [d] of one client."""


def supports(model: Network, w: Tensor, *rows: Tensor) -> bool:
    """Return True if rows of this shape have graphs, or may still get some."""
    if not w.is_cuda or rows[0].shape[1] > model.backends.row_limit(w):
        return False
    return captured(model).takes(w, *rows)


def run(model: Network, w: Tensor, *rows: Tensor) -> Tensor:
    """Return gradients [k, d] of a stack."""
    return captured(model)(w, *rows)


_captured: WeakKeyDictionary[Network, Captured] = WeakKeyDictionary()


def captured(model: Network) -> Captured:
    """Return the graphs of a model."""
    if model not in _captured:
        _captured[model] = Captured(model.backends.whole_gradient)
    return _captured[model]


class Captured:
    """Gradients of many clients by replaying CUDA graphs, several clients side by side on streams.

    Each shape of rows has graphs for 1, 2, 4 and 8 clients, from which a stack of any size is composed. The kernels
    of a client are those of a plain loop, so its gradient is bit for bit the same.
    """

    def __init__(self, gradient: Gradient) -> None:
        self.gradient = gradient
        self.shapes: dict[tuple[Any, ...], _Shape] = {}

    def __call__(self, w: Tensor, *rows: Tensor) -> Tensor:
        shape = _shape(w, *rows)
        if shape not in self.shapes:
            self.shapes[shape] = _Shape(self.gradient, w, *rows)
        return self.shapes[shape](w, *rows)

    def takes(self, w: Tensor, *rows: Tensor) -> bool:
        """Return True if rows of this shape have graphs, or may still get some."""
        return len(self.shapes) < SHAPES or _shape(w, *rows) in self.shapes


def _shape(*inputs: Tensor) -> tuple[Any, ...]:
    """Return the key of a client's graphs, which does not depend on the number of clients."""
    return (inputs[0].device, *((part.dtype, part.shape[1:]) for part in inputs))


class _Shape:
    """Graphs for one shape of rows; they share inputs, outputs and memory."""

    def __init__(self, gradient: Gradient, *inputs: Tensor) -> None:
        self.gradient = gradient
        self.inputs = [
            torch.zeros(LARGEST, *part.shape[1:], dtype=part.dtype, device=part.device) for part in inputs
        ]
        self.outputs = torch.empty_like(self.inputs[0])
        self.streams = [torch.cuda.Stream(inputs[0].device) for _ in range(STREAMS)]
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        result = torch.empty(inputs[0].shape, dtype=inputs[0].dtype, device=inputs[0].device)
        first = 0
        while first < len(result):
            size = min(LARGEST, 1 << ((len(result) - first).bit_length() - 1))
            for held, given in zip(self.inputs, inputs, strict=True):
                held[:size].copy_(given[first : first + size])
            self._graph(size).replay()
            result[first : first + size].copy_(self.outputs[:size])
            first += size
        return result

    def _graph(self, size: int) -> torch.cuda.CUDAGraph:
        if size not in self.graphs:
            self.graphs[size], _ = recorded(lambda: self._compute(size), self.pool, self.outputs.device)
        return self.graphs[size]

    def _compute(self, size: int) -> None:
        main = torch.cuda.current_stream()
        used = self.streams[:size]
        for stream in used:
            stream.wait_stream(main)
        for k in range(size):
            with torch.cuda.stream(used[k % len(used)]):
                self.outputs[k].copy_(self.gradient(*(part[k] for part in self.inputs)))
        for stream in used:
            main.wait_stream(stream)

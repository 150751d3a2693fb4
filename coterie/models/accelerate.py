"""What makes the gradients of a stack of networks fast: mixed precision, compiled code, captured graphs."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie.errors import SettingError

PRECISIONS = ("full", "bf16")
STREAMS = 4  # clients computed side by side; eight were no faster on an H200
LARGEST = 8  # clients in one graph; the rest take further replays
SHAPES = 8  # shapes of rows that get graphs; with more of them none is worth its own
ROUNDING = 1e-3  # how far compiled gradients may be off, relative to the gradient, at full precision

Gradient = Callable[..., Tensor]
"""(w [d], x [B, ...], y [B], weight [B]) -> gradient [d] of one client."""


def computing_in(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Matrix products and convolutions in bfloat16 where asked for; parameters and sums keep their type."""
    if precision == "full":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def fastest(ways: dict[str, Gradient], prepares: bool, w: Tensor, *rows: Tensor) -> tuple[str, Tensor]:
    """The name of the fastest of several ways to compute the same, and its result.

    "looped" always works; another way that raises is out. `prepares`: the first call of a way prepares it and does
    not count. Small differences are measured again.
    """
    ways["looped"](w[:1], *(part[:1] for part in rows))
    results, seconds = {}, {}
    for way, compute in ways.items():
        try:
            if way != "looped" and prepares:
                compute(w, *rows)
            seconds[way], results[way] = _timed(compute, w, *rows)
        except (RuntimeError, SettingError):
            if way == "looped":
                raise
    for _ in range(4):
        if max(seconds.values()) > 4 * min(seconds.values()) or sum(seconds.values()) > 0.2:
            break
        seconds = {way: min(seconds[way], _timed(ways[way], w, *rows)[0]) for way in seconds}
    best = min(seconds, key=seconds.__getitem__)
    return best, results[best]


def _timed(function: Gradient, *arguments: Tensor) -> tuple[float, Tensor]:
    start = time.perf_counter()
    result = function(*arguments)
    if result.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def compiled(function: Callable[..., Tensor], exact: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` compiled for each shape, if its gradient in the first argument is right for the first inputs.

    Right is what lies no further from the gradient of `exact`, the function at full precision, than rounding or
    than twice as far as the gradient of `function` itself. A compiler that fails or errs is not used.
    """
    fast = torch.compile(function, dynamic=False)
    trusted: dict[tuple[Any, ...], bool] = {}

    def call(w: Tensor, *rows: Tensor) -> Tensor:
        shape = (w.dtype, w.device, *(part.shape for part in (w, *rows)))
        if shape not in trusted:
            trusted[shape] = _agree(fast, function, exact, w, *rows)
        return (fast if trusted[shape] else function)(w, *rows)

    return call


def _agree(fast: Gradient, plain: Gradient, exact: Gradient, w: Tensor, *rows: Tensor) -> bool:
    def slope(function: Gradient) -> Tensor:
        leaf = w.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(function(leaf, *rows), leaf)[0]

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = slope(fast)
    except Exception as problem:  # a compiler fails in ways of its own
        warnings.warn(f"torch.compile failed and is not used: {first_line(problem)}", stacklevel=4)
        return False
    true = slope(exact)
    wrong, usual = ((part - true).norm() / true.norm().clamp_min(1e-30) for part in (found, slope(plain)))
    if not wrong <= max(ROUNDING, 2 * float(usual)):
        warnings.warn(
            f"compiled gradients are off by {float(wrong):.1e}, plain ones by {float(usual):.1e}: "
            "compiled code is not used",
            stacklevel=4,
        )
        return False
    return True


def first_line(problem: Exception) -> str:
    """What kind of problem, and the beginning of what it says."""
    return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"


class Captured:
    """Gradients of many clients as replays of CUDA graphs, several clients side by side on streams.

    There is a graph for 1, 2, 4 and 8 clients of each shape of rows, so that a stack of any size is served
    without waste. Each client's kernels are those of a plain loop, and so are the bits of its gradient.
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
        """Whether rows of this shape have graphs, or may still get some."""
        return len(self.shapes) < SHAPES or _shape(w, *rows) in self.shapes


def _shape(*inputs: Tensor) -> tuple[Any, ...]:
    """What the graphs of one client depend on, however many clients there are."""
    return (inputs[0].device, *((part.dtype, part.shape[1:]) for part in inputs))


class _Shape:
    """The graphs for one shape of rows; they share inputs, outputs and memory."""

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
            self.graphs[size], _ = _recorded(lambda: self._compute(size), self.pool, self.outputs.device)
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


class Replayed:
    """A function of tensors as replays of CUDA graphs, one for each shape of its inputs; they share their memory.

    What the function reads besides its inputs must stay where it is. Beyond `SHAPES` shapes it is called.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.pool: Any = None
        self.graphs: dict[tuple[Any, ...], tuple[list[Tensor], torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        shape = tuple((part.device, part.dtype, part.shape) for part in inputs)
        if shape not in self.graphs:
            if len(self.graphs) == SHAPES:
                return self.function(*inputs)
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            held = [part.clone() for part in inputs]
            self.graphs[shape] = (held, *_recorded(lambda: self.function(*held), self.pool, held[0].device))
        held, graph, output = self.graphs[shape]
        for kept, given in zip(held, inputs, strict=True):
            kept.copy_(given)
        graph.replay()
        return output.clone()


def _recorded(
    compute: Callable[[], Any], pool: Any, device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The kernels of `compute` as a graph, and what it returns, which a replay writes anew."""
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            compute()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = compute()
    return graph, result

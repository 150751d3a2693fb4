"""Functions of tensors as replays of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SHAPES = 8  # shapes of rows that get graphs; with more of them none is worth its own


class Replayed:
    """Function of tensors computed by replaying CUDA graphs, one for each shape of its inputs, in shared memory.

    Other tensors that the function reads must keep their addresses. After `SHAPES` shapes it is called directly.
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
            self.graphs[shape] = (held, *recorded(lambda: self.function(*held), self.pool, held[0].device))
        held, graph, output = self.graphs[shape]
        for kept, given in zip(held, inputs, strict=True):
            kept.copy_(given)
        graph.replay()
        return output.clone()


def recorded(compute: Callable[[], Any], pool: Any, device: torch.device) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record `compute` as a graph; return the graph and the output, which each replay overwrites."""
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

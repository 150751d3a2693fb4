"""Steps of generalised linear models for clients of different sizes: rows [start, start + size) of one flat array.

A Python loop over operations of a few microseconds holds the interpreter lock, so threads wait for each other. If torch
can script a function, the loop runs in torch without the lock; otherwise the same function runs in Python.
"""

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Starts of the rows of k clients in the whole array, and offsets in an array of their `length` rows only."""

    start: Tensor
    offset: Tensor
    size: Tensor
    starts: list[int]
    sizes: list[int]
    length: int


def layout(start: Tensor, size: Tensor) -> Layout:
    """Return the layout of clients whose rows start here and are so many."""
    offset, sizes = size.cumsum(0) - size, size.tolist()
    return Layout(start, offset, size, start.tolist(), sizes, sum(sizes))


def cuts(sizes: Tensor, count: int) -> list[slice]:
    """Split clients with sizes [k] into at most `count` parts with about as many rows each."""
    until = sizes.cumsum(0)
    ends = torch.searchsorted(until, until[-1] * torch.arange(1, count + 1) // count).add_(1).tolist()
    return [slice(*cut) for cut in itertools.pairwise(sorted({0, *ends}))]


def score(tables: Tensor, rows: Tensor, layout: Layout) -> Tensor:
    """Return the scores [outputs, length] of rows, each with the table [outputs, columns] of its client."""
    scores = torch.empty((tables.size(1), layout.length), dtype=tables.dtype)
    offset = 0
    for k in range(len(layout.sizes)):
        count = layout.sizes[k]
        torch.mm(tables[k], rows.narrow(0, layout.starts[k], count).t(), out=scores.narrow(1, offset, count))
        offset += count
    return scores


def combine_rows(
    result: Tensor,
    tables: Tensor,
    share: float,
    centre: Tensor | None,
    centre_share: float,
    shares: Tensor,
    rows: Tensor,
    layout: Layout,
) -> Tensor:
    """Write share tables[k] + centre_share centre[k] + shares_k X_k to result[k]; `shares` are [outputs, length]."""
    offset = 0
    for k in range(len(layout.sizes)):
        count = layout.sizes[k]
        whole = result[k]
        torch.mul(tables[k], share, out=whole)
        if centre is not None:
            whole.add_(centre[k], alpha=centre_share)
        whole.addmm_(shares.narrow(1, offset, count), rows.narrow(0, layout.starts[k], count))
        offset += count
    return result


def add_rows(shares: Tensor, weights: Tensor, rows: Tensor, layout: Layout) -> Tensor:
    """Return the sum [outputs, columns] of weights[k] shares_k X_k."""
    shares = shares * torch.repeat_interleave(weights, layout.size, output_size=layout.length)
    total = torch.zeros((shares.size(0), rows.size(1)), dtype=shares.dtype)
    offset = 0
    for k in range(len(layout.sizes)):
        count = layout.sizes[k]
        total.addmm_(shares.narrow(1, offset, count), rows.narrow(0, layout.starts[k], count))
        offset += count
    return total


@functools.cache
def stepper(residuals: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the scripted steps of a stack for a model with these residuals (scores [k, outputs, B], labels [k, B])."""

    def steps(
        scores: Tensor,
        middle: Tensor | None,
        drawn: Tensor,
        paces: Tensor,
        y: Tensor,
        layout: Layout,
        kernels: Tensor,
        kernel: Tensor,
        keeps: float,
        pulled: float,
    ) -> tuple[Tensor, Tensor]:
        """Return shares [outputs, length] of the rows in the models after steps on the rows `drawn` [k, steps, B].

        `scores` and `middle` [outputs, length] are the scores of all rows at the start and at the anchor; `kernels`
        holds the inner products of the rows of client k from row kernel[k] on. The second value is finite only if all
        numbers are.
        """
        count, every, batch = drawn.shape
        outputs, length = scores.shape
        width = kernels.size(1)
        offset = layout.offset.view(-1, 1)
        inside = (drawn - layout.start.view(-1, 1, 1)).transpose(0, 1).contiguous()  # [steps, k, B]
        spread = (offset + torch.arange(width)).clamp_(max=length - 1).flatten()
        now = scores.index_select(1, spread).view(outputs, count, width).transpose(0, 1).contiguous()
        centre, witness = now, scores.sum()
        if middle is not None:
            centre = middle.index_select(1, spread).view(outputs, count, width).transpose(0, 1)
            witness = witness + middle.sum()
        labels = y.index_select(0, drawn.transpose(0, 1).flatten()).view(every, count, batch).unbind(0)
        near = (inside + kernel.view(-1, 1)).flatten(1).unbind(0)
        columns = inside.unsqueeze(2).expand(every, count, outputs, batch).unbind(0)
        pace = paces.transpose(0, 1).unsqueeze(2).unbind(0)
        grads = torch.empty((every, count, outputs, batch), dtype=scores.dtype)
        grad = grads.unbind(0)
        for t in range(every):
            if t > 0:
                if keeps != 1.0:
                    now.mul_(keeps)
                if middle is not None:
                    now.add_(centre, alpha=pulled)
                products = kernels.index_select(0, near[t - 1]).view(count, batch, width)
                now.baddbmm_(grad[t - 1], products)
            torch.mul(residuals(now.gather(2, columns[t]), labels[t]), pace[t], out=grad[t])
        if keeps != 1.0:
            for t in range(every - 1):
                grad[t].mul_(keeps ** (every - 1 - t))
        places = (inside + offset).flatten()
        of_rows = grads.permute(2, 0, 1, 3).reshape(outputs, places.size(0))
        shares = torch.zeros((outputs, length), dtype=scores.dtype)
        shares.scatter_add_(1, places.expand(outputs, places.size(0)), of_rows)
        return shares, witness + of_rows.sum()

    return scripted(steps)


@functools.cache
def scripted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function scripted by torch, which runs without Python's lock, or itself if that fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled: Callable[..., Any] = torch.jit.script(function)
            return compiled
        except Exception:  # a torch without scripts, or a Python it does not know
            return function

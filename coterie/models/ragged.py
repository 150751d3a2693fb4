"""Steps of generalised linear models on ragged clients: rows [start, start + size) of one flat array.

A loop in Python holds its lock between operations of a few microseconds, so threads wait for each other. Where torch
can still script a function the loop runs in torch, without the lock; elsewhere the same function runs in Python.
"""

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor


def score_together(scores: Tensor, table: Tensor, x: Tensor, start: int, block: int) -> Tensor:
    """scores [outputs, rows] <- table X' of the rows from `start` on, all with the same table."""
    total = scores.size(1)
    for first in range(0, total, block):
        count = min(block, total - first)
        torch.mm(table, x.narrow(0, start + first, count).t(), out=scores.narrow(1, first, count))
    return scores


def score_rows(scores: Tensor, tables: Tensor, x: Tensor, start: list[int], size: list[int]) -> Tensor:
    """scores [outputs, rows] <- tables[k] X_k' [outputs, size of k], side by side."""
    offset = 0
    for k in range(len(size)):
        torch.mm(tables[k], x.narrow(0, start[k], size[k]).t(), out=scores.narrow(1, offset, size[k]))
        offset += size[k]
    return scores


def combine_rows(
    result: Tensor,
    tables: Tensor,
    share: float,
    centre: Tensor | None,
    centre_share: float,
    shares: Tensor,
    x: Tensor,
    start: list[int],
    size: list[int],
) -> Tensor:
    """result[k] <- share tables[k] + centre_share centre[k] + shares[k] X_k.

    `shares` [k, outputs, most rows] are zero beyond a client's rows. The last rows come first: a cache may hold them.
    """
    for k in range(len(size) - 1, -1, -1):
        whole = result[k]
        torch.mul(tables[k], share, out=whole)
        if centre is not None:
            whole.add_(centre[k], alpha=centre_share)
        whole.addmm_(shares[k].narrow(1, 0, size[k]), x.narrow(0, start[k], size[k]))
    return result


def add_rows(total: Tensor, shares: Tensor, x: Tensor, start: list[int], size: list[int]) -> Tensor:
    """total <- total + the sum of shares[k] X_k; the last come first, as above."""
    for k in range(len(size) - 1, -1, -1):
        total.addmm_(shares[k].narrow(1, 0, size[k]), x.narrow(0, start[k], size[k]))
    return total


@functools.cache
def stepper(residuals: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """All steps of a stack, scripted, for a model with these residuals (scores [k, outputs, B], labels [k, B])."""

    def steps(
        scores: Tensor,
        middle: Tensor | None,
        drawn: Tensor,
        paces: Tensor,
        y: Tensor,
        start: Tensor,
        size: Tensor,
        kernels: Tensor,
        kernel: Tensor,
        keeps: float,
        pulled: float,
    ) -> Tensor:
        """Shares [k, outputs, most rows] of the rows in the models after steps on the rows `drawn` [k, steps, B].

        `scores` and `middle` [outputs, rows] are those of all rows, client after client, at the start and at what
        models are pulled towards; `kernels` has the inner products of the rows of client k from row kernel[k] on.
        """
        count, every, batch = drawn.shape
        outputs, width = scores.size(0), kernels.size(1)
        inside = (drawn - start.view(-1, 1, 1)).transpose(0, 1).contiguous()  # [steps, k, B]
        near = inside + kernel.view(-1, 1)
        packed = (inside + (size.cumsum(0) - size).view(-1, 1)).flatten()
        order = (outputs, every, count, batch)
        begun = scores.index_select(1, packed).view(order).permute(1, 2, 0, 3)
        between = begun if middle is None else middle.index_select(1, packed).view(order).permute(1, 2, 0, 3)
        labels = y.index_select(0, drawn.transpose(0, 1).flatten()).view(every, count, batch)
        shares = torch.zeros((count, outputs, width), dtype=scores.dtype)
        share, centre_share = 1.0, 0.0
        for t in range(every):
            here = begun[t]
            if share != 1.0:
                here = here * share
            if t > 0:
                if middle is not None:
                    here = here.add(between[t], alpha=centre_share)
                products = kernels.index_select(0, near[t].flatten()).view(count, batch, width)
                here = torch.baddbmm(here, shares, products.transpose(1, 2))
                if keeps != 1.0:
                    shares.mul_(keeps)
            slopes = residuals(here, labels[t]).mul_(paces[:, t].unsqueeze(1))
            shares.scatter_add_(2, inside[t].unsqueeze(1).expand(count, outputs, batch), slopes)
            share, centre_share = share * keeps, centre_share * keeps + pulled
        return shares

    return scripted(steps)


@functools.cache
def scripted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function without Python's lock where torch offers that, else itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.jit.script(function)
        except Exception:  # a torch without scripts, or a Python it does not know
            return function

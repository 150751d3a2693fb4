"""Products of clients' tables with their rows, client by client: rows [start, start + size) of one flat array.

A loop in Python holds its lock between products of a few microseconds, so workers wait for each other. Where torch can
still script a function the loop runs in torch, without the lock; elsewhere the same function runs in Python.
"""

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor


def score_rows(scores: Tensor, tables: Tensor, x: Tensor, start: list[int], size: list[int]) -> Tensor:
    """scores [outputs, rows] <- tables[k] X_k' [outputs, size of k], side by side."""
    offset = 0
    for k in range(len(size)):
        place = scores.narrow(1, offset, size[k])
        torch.mm(tables[k], x.narrow(0, start[k], size[k]).t(), out=place)
        offset += size[k]
    return scores


def combine_rows(
    result: Tensor, base: Tensor, shares: Tensor, x: Tensor, start: list[int], size: list[int]
) -> Tensor:
    """result[k] <- base[k] + shares[k] X_k, where shares [k, outputs, most rows] are zero beyond a client's rows."""
    for k in range(len(size)):
        own = x.narrow(0, start[k], size[k])
        torch.addmm(base[k], shares[k].narrow(1, 0, size[k]), own, out=result[k])
    return result


@functools.cache
def scripted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function without Python's lock where torch offers that, else itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.jit.script(function)
        except Exception:  # a torch without scripts, or a Python it does not know
            return function

"""Which clients go to which worker, and sums that do not depend on the number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

EXACT_BLOCKS = 64  # blocks of clients that stay together whatever the number of workers is
Node = tuple[int, int]
"""Blocks first..last - 1 of a summation tree."""


@dataclass(frozen=True)
class Shards:
    """Clients in blocks, and blocks on workers.

    Attributes
    ----------
    place : Tensor
        Block of each client, [n].
    position : Tensor
        Place of each client in its block, [n].
    ids : list of Tensor
        Clients of each block, ascending.
    workers : int
        Number of workers; worker k has the blocks `range(*cuts(k))`.
    """

    place: Tensor
    position: Tensor
    ids: list[Tensor]
    workers: int

    @classmethod
    def of(cls, cost: Tensor, workers: int, exact: bool = False) -> Shards:
        """Share clients of these costs [n] among workers: a block for each, or `EXACT_BLOCKS` if sums must not differ.

        Examples
        --------
        >>> import torch
        >>> shards = Shards.of(torch.tensor([9, 1, 1, 1, 5, 5]), workers=2)
        >>> [ids.tolist() for ids in shards.ids]
        [[0, 1, 2], [3, 4, 5]]
        """
        blocks = min(len(cost), EXACT_BLOCKS if exact else workers)
        place = dealt(cost, blocks)
        ids = [(place == block).nonzero().squeeze(-1) for block in range(blocks)]
        position = torch.empty_like(place)
        for own in ids:
            position[own] = torch.arange(len(own))
        return cls(place, position, ids, workers)

    def cuts(self, worker: int) -> Node:
        """Return the first block of a worker and the one after its last."""
        count = len(self.ids)
        return worker * count // self.workers, (worker + 1) * count // self.workers


def dealt(cost: Tensor, bins: int) -> Tensor:
    """Return the bin of each client, [n]: as many clients in each bin, and nearly the same cost.

    Methods that read all rows take time by the rows, others by the number of clients; both are balanced. Of every
    `bins` clients in the order of their cost, the dearest goes to the bin that has the least so far. Clients that cost
    the same stay neighbours.

    Parameters
    ----------
    cost
        Cost of each client, [n], such as its number of rows.
    bins
        Number of bins.
    """
    n = len(cost)
    if n == 0 or int(cost.min()) == int(cost.max()):
        return torch.arange(n) * bins // max(1, n)
    costs = cost.cpu().double().numpy()
    order = np.argsort(-costs, kind="stable")
    load, place = np.zeros(bins), np.empty(n, dtype=np.int64)
    for first in range(0, n, bins):
        dearest = order[first : first + bins]
        emptiest = np.argsort(load, kind="stable")[: len(dearest)]
        place[dearest] = emptiest
        load[emptiest] += costs[dearest]
    return torch.from_numpy(place)


def tree_nodes(count: int, first: int, end: int) -> Iterator[Node]:
    """Yield the largest nodes of the tree over blocks 0..count - 1 that lie within first..end - 1.

    Examples
    --------
    >>> list(tree_nodes(8, 2, 8)), list(tree_nodes(8, 0, 3))
    ([(2, 4), (4, 8)], [(0, 2), (2, 3)])
    """
    waiting = [(0, count)] if end > first else []
    while waiting:
        low, high = waiting.pop()
        if first <= low and high <= end:
            yield low, high
        elif low < end and first < high:
            middle = (low + high) // 2
            waiting += [(middle, high), (low, middle)]


def tree_sum(parts: Mapping[Node, Tensor], node: Node) -> Tensor | None:
    """Return the sum at a node of the tree from the sums at some nodes below; None if there is nothing below.

    The order of additions is that of the tree, whoever has computed the parts.
    """
    if node in parts:
        return parts[node]
    low, high = node
    if high - low <= 1:
        return None
    middle = (low + high) // 2
    left, right = tree_sum(parts, (low, middle)), tree_sum(parts, (middle, high))
    if left is None or right is None:
        return right if left is None else left
    return left + right

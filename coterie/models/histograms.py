"""Sums of derivatives over the rows of tree nodes, and the leaf of each row: in torch, or in C where it is compiled."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from coterie.models import fast
from coterie.models.tree_walk import FEATURE, MISSING, PARENT, THRESHOLD

CELLS = 1 << 24  # that are added at once, of rows x features
used: Counter[str] = Counter()  # how often each way to sum was taken, in this process


def assign(bins: Tensor, splits: Tensor, categorical: Tensor, missing: int) -> Tensor:
    """Return the leaf of each row in each tree, int32 [rows, trees].

    Parameters
    ----------
    bins
        Binned features, uint8 [rows, features].
    splits
        Trees whose thresholds are bins, [trees, splits, 5].
    categorical
        Which features are categories, bool [features].
    missing
        The bin of missing values.
    """
    path = fast.find("tree leaves", bins)
    if path is not None:
        found: Tensor = path.run(bins, splits, categorical, missing)
        return found
    leaf = torch.zeros(len(bins), len(splits), dtype=torch.int32, device=bins.device)
    for tree, rows in enumerate(splits.tolist()):
        for s, split in enumerate(rows):
            if split[PARENT] < 0:
                break
            own = bins[:, int(split[FEATURE])].long()
            if categorical[int(split[FEATURE])]:
                right = (int(split[THRESHOLD]) >> own.clamp(max=62)) & 1 == 1
            else:
                right = own > split[THRESHOLD]
            right = torch.where(own == missing, split[MISSING] > 0.5, right)
            leaf[(leaf[:, tree] == int(split[PARENT])) & right, tree] = s + 1
    return leaf


def histograms(bins: Tensor, pairs: Tensor, leaf: Tensor, nodes: Tensor, count: int) -> Tensor:
    """Return the sums of pairs over rows, by client, tree, node, feature and bin.

    Parameters
    ----------
    bins
        Binned features of k clients, uint8 [k, B, features].
    pairs
        First and second derivatives, and perhaps the first with the sign of the client, float64 [k, B, trees, 2 or 3],
        zero on padding.
    leaf
        Leaf of each row, int32 [k, B, trees].
    nodes
        Leaves that are asked for, [trees, asked]; -1: none.
    count
        Number of bins.

    Returns
    -------
    Tensor
        [k, trees, asked, features, bins, 2 or 3].
    """
    path = fast.find("tree histograms", bins)
    used["plain histograms" if path is None else path.name] += 1
    if path is not None:
        found: Tensor = path.run(bins, pairs, leaf, nodes, count)
        return found
    k, rows, features = bins.shape
    trees, asked = nodes.shape
    sums = pairs.new_zeros(k * trees * asked * features * count, pairs.shape[-1])
    client = torch.arange(k, device=bins.device).repeat_interleave(rows)
    columns = torch.arange(features, device=bins.device)
    wide = bins.reshape(-1, features)
    for tree in range(trees):
        own = leaf[..., tree].reshape(-1, 1) == nodes[tree]  # at most one node of a row, and -1 is no leaf
        mine, place = own.nonzero(as_tuple=True)
        start = ((client[mine] * trees + tree) * asked + place) * features * count
        added = pairs[..., tree, :].reshape(-1, pairs.shape[-1])[mine]
        for some in columns.split(max(1, CELLS // max(1, len(mine)))):
            cell = start.unsqueeze(-1) + some * count + wide[mine][:, some].long()
            sums.index_add_(0, cell.reshape(-1), added.repeat_interleave(len(some), 0))
    return sums.view(k, trees, asked, features, count, pairs.shape[-1])

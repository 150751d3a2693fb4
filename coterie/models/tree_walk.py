"""Decision trees as sequences of splits, and the way of a row from the root to its leaf.

A tree with L leaves is a list of L - 1 splits. Split s turns leaf `parent` into two: rows that go left stay in it, rows
that go right form the new leaf s + 1. A row goes right if its value exceeds the threshold or, for a category, if its
code is one of the bits of the threshold; a missing value goes right if `missing` is one. `share` is the part of the
training rows (of their curvature) in the parent that went right. A split with parent -1 is void.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coterie.models import fast

PARENT, FEATURE, THRESHOLD, MISSING, SHARE = range(5)
COLUMNS = 5
MOST_LEVELS = 48  # of a category: a set of codes is the bits of one number, which float64 holds exactly
WALKED = 1 << 22  # rows times trees at once


def void(*shape: int, like: Tensor) -> Tensor:
    """Return splits [*shape, 5] that split nothing."""
    splits = like.new_zeros((*shape, COLUMNS))
    splits[..., PARENT] = -1
    return splits


def trees_in_use(splits: Tensor, values: Tensor) -> int:
    """Return how many rounds of trees there are up to the last one that some model uses, of [..., T, C, L - 1, 5]."""
    used = ((splits[..., PARENT] >= 0).any(-1) | (values != 0).any(-1)).any(-1)
    used = used.reshape(-1, used.shape[-1]).any(0)
    return int(used.nonzero()[-1]) + 1 if bool(used.any()) else 0


def children(splits: Tensor) -> Tensor:
    """Return what is left and right of each split, int64 [trees, splits, 2]: a split, or -1 - leaf.

    Parameters
    ----------
    splits
        [trees, splits, 5].
    """
    trees, count, _ = splits.shape
    child = torch.full((trees, count, 2), -1, dtype=torch.long, device=splits.device)
    hangs = torch.full((trees, count + 1, 2), -1, dtype=torch.long, device=splits.device)  # split, side
    which = torch.arange(trees, device=splits.device)
    for s in range(count):
        here = which[splits[:, s, PARENT] >= 0]
        leaf = splits[here, s, PARENT].long()
        above = hangs[here, leaf]
        below = above[:, 0] >= 0
        child[here[below], above[below, 0], above[below, 1]] = s
        for side, fresh in ((0, leaf), (1, torch.full_like(leaf, s + 1))):
            hangs[here, fresh] = torch.tensor([s, side], device=splits.device)
            child[here, s, side] = -1 - fresh
    return child


def depth(child: Tensor) -> int:
    """Return the largest number of splits on the way to a leaf."""
    level = torch.zeros(child.shape[:2], dtype=torch.long, device=child.device)
    which = torch.arange(len(child), device=child.device)
    for s in range(child.shape[1]):  # a split comes after the one above it
        for side in (0, 1):
            below = child[:, s, side]
            inner = below >= 0
            level[which[inner], below[inner]] = level[inner, s] + 1
    return int(level.max()) + 1 if child.numel() else 0


def tables(splits: Tensor, categorical: Tensor, child: Tensor) -> dict[str, Tensor]:
    """Return what a walk needs, by name, flat over trees and splits.

    Parameters
    ----------
    splits
        [trees, splits, 5].
    categorical
        Which features are categories, bool [features].
    child
        What `children` gives for these splits.
    """
    return {
        "feature": splits[..., FEATURE].long().flatten(),
        "threshold": splits[..., THRESHOLD].flatten(),
        "missing": splits[..., MISSING].flatten() > 0.5,
        "child": child.flatten(),
        "first": torch.where(splits[:, 0, PARENT] < 0, -1, 0),
        "categorical": categorical.to(splits.device),
    }


class Walk(nn.Module):
    """Finds the leaves of rows in several trees; tensors are buffers, so that exporters can write them.

    Parameters
    ----------
    splits
        [trees, splits, 5].
    categorical
        Which features are categories, bool [features].
    """

    feature: Tensor
    threshold: Tensor
    missing: Tensor
    child: Tensor
    first: Tensor
    offset: Tensor
    categorical: Tensor

    def __init__(self, splits: Tensor, categorical: Tensor) -> None:
        super().__init__()
        trees, count, _ = splits.shape
        child = children(splits)
        self.depth = depth(child)
        buffers = tables(splits, categorical, child)
        buffers["offset"] = torch.arange(trees, device=splits.device) * count
        for name, value in buffers.items():
            self.register_buffer(name, value.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """Return the leaf of each row in each tree, int64 [rows, trees], for x [rows, features]."""
        node = self.first.expand(x.shape[0], -1)
        for _ in range(self.depth):
            at = node.clamp(min=0) + self.offset
            feature, threshold = self.feature[at], self.threshold[at]
            value = x.gather(1, feature)
            gone = torch.isnan(value)
            known = torch.where(gone, torch.zeros_like(value), value)
            bit = torch.floor(threshold * torch.exp2(-known.clamp(0, MOST_LEVELS))) % 2 > 0.5
            kind = self.categorical[feature]
            right = (kind & bit) | (~kind & (known > threshold))
            right = (gone & self.missing[at]) | (~gone & right)
            node = torch.where(node >= 0, self.child[2 * at + right.long()], node)
        return -1 - node


def leaves(splits: Tensor, categorical: Tensor, x: Tensor, child: Tensor | None = None) -> Tensor:
    """Return the leaf of each row in each tree, int64 [rows, trees].

    Parameters
    ----------
    splits
        [trees, splits, 5].
    categorical
        Which features are categories, bool [features].
    x
        [rows, features], NaN where a value is missing.
    child
        What `children` gives for these splits, if it is known.
    """
    path = fast.find("tree walk", x)
    if path is not None:
        known = tables(splits, categorical, children(splits) if child is None else child)
        found: Tensor = path.run(x, known, len(splits))
        return found
    walk, step = Walk(splits, categorical), max(1, WALKED // max(1, len(splits)))
    parts = [walk(part) for part in x.split(step)]
    return torch.cat(parts) if parts else torch.zeros(0, len(splits), dtype=torch.long, device=x.device)


def leaves_of_stack(splits: Tensor, categorical: Tensor, x: Tensor) -> Tensor:
    """Return the leaf of each row in each tree of its own stack, int64 [stack, rows, trees].

    Parameters
    ----------
    splits
        [stack, trees, splits, 5].
    categorical
        Which features are categories, bool [features].
    x
        [stack, rows, features].
    """
    if bool((splits == splits[:1]).all()):
        return leaves(splits[0], categorical, x.flatten(0, 1)).view(*x.shape[:-1], splits.shape[1])
    parents = splits[..., PARENT]
    child = children(splits[0]) if bool((parents == parents[:1]).all()) else None
    each = zip(splits, x, strict=True)
    return torch.stack([leaves(own, categorical, rows, child) for own, rows in each])

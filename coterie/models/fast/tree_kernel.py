"""Fast path: leaves, histograms and best splits of boosted trees in C, features or rows shared out among threads."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie._core import threads
from coterie._core.native import trees as native

COLUMNS = 4  # of a split, in the C code
MOST_BINS = 256  # with that of missing values, in the C code
MOST_SUMS = 3  # of a bin, in the C code


def supports(bins: Tensor) -> bool:
    """Return True if the C code is there and the rows are in this machine's memory."""
    return native.available and bins.device.type == "cpu" and bins.dtype == torch.uint8


def leaves(bins: Tensor, splits: Tensor, categorical: Tensor, missing: int) -> Tensor:
    """Return the leaf of each row in each tree, int32 [rows, trees]."""
    splits = splits[..., :COLUMNS].double().contiguous()
    if splits.shape[1] > native.MOST_SPLITS:
        raise ValueError(f"a tree may have {native.MOST_SPLITS + 1} leaves")
    parent, feature = splits[..., 0], splits[..., 1]  # from a server that may lie
    if not bool(((parent < 0) | ((feature >= 0) & (feature < bins.shape[1]))).all()):
        raise IndexError("a split names a feature that the rows do not have")
    if not bool((parent <= torch.arange(splits.shape[1])).all()):
        raise IndexError("a split names a leaf that is not there")
    leaf = torch.empty(len(bins), len(splits), dtype=torch.int32)
    native.leaves(bins.contiguous(), splits, categorical.to(torch.uint8), missing, leaf)
    return leaf


def histograms(bins: Tensor, pairs: Tensor, leaf: Tensor, nodes: Tensor, count: int) -> Tensor:
    """Return the sums of pairs, [k, trees, asked, features, bins, 2 or 3]; each thread has features of its own."""
    (k, rows, features), (trees, asked) = bins.shape, nodes.shape
    most = max(int(leaf.max()) if leaf.numel() else 0, int(nodes.max())) + 1
    place = torch.full((trees, most), -1, dtype=torch.int32)
    tree, at = (nodes >= 0).nonzero(as_tuple=True)
    place[tree, nodes[tree, at]] = at.to(torch.int32)
    if bins.numel() and int(bins.max()) >= count:
        raise IndexError("a bin is out of range")
    sums = torch.zeros(k, trees, asked, features, count, pairs.shape[-1], dtype=torch.float64)
    given = (bins.contiguous(), pairs.double().contiguous(), leaf.contiguous(), place, sums)

    def part(columns: slice) -> None:
        native.histograms(*given, columns.start, columns.stop)

    threads.shared_out(part, features, k * rows * features * trees)
    return sums


def supports_splits(sums: Tensor, signs: Tensor) -> bool:
    """Return True if the C code is there, takes so many bins, and no score has to be monotone in a feature."""
    here = sums.device.type == "cpu" and sums.dtype == torch.float64
    fits = 2 <= sums.shape[2] <= MOST_BINS and sums.shape[3] <= MOST_SUMS
    return native.available and here and fits and not bool(signs.any())


def splits(
    sums: Tensor,
    total: Tensor,
    parent: Tensor,
    categorical: Tensor,
    limits: tuple[float, float, float, float],
    levels: int,
) -> tuple[Tensor, ...]:
    """Return gain, feature, threshold, missing and left sums of the best split of each node."""
    nodes, width = len(sums), sums.shape[-1]
    gain, threshold = sums.new_empty(2, nodes)
    feature, missing = torch.empty(2, nodes, dtype=torch.long)
    found = gain, feature, threshold, missing, sums.new_empty(nodes, width)
    kinds = categorical.to(torch.uint8).contiguous()
    native.splits(sums.contiguous(), total.contiguous(), parent.contiguous(), kinds, limits, levels, found)
    return found


def supports_walk(x: Tensor) -> bool:
    """Return True if the C code is there and the rows are in this machine's memory."""
    return native.available and x.device.type == "cpu"


def walk(x: Tensor, tables: dict[str, Tensor], trees: int) -> Tensor:
    """Return the leaves of rows in trees, int64 [rows, trees]; each thread has rows of its own."""
    feature = tables["feature"]
    if feature.numel() and (int(feature.min()) < 0 or int(feature.max()) >= x.shape[1]):
        raise IndexError("a split names a feature that the rows do not have")
    leaf = torch.empty(len(x), trees, dtype=torch.long)
    gone, kinds = (tables[name].to(torch.uint8).contiguous() for name in ("missing", "categorical"))
    threshold = tables["threshold"].double().contiguous()
    given = (
        feature.contiguous(),
        threshold,
        gone,
        tables["child"].contiguous(),
        tables["first"].contiguous(),
        kinds,
    )
    rows = x.double().contiguous()
    threads.shared_out(
        lambda part: native.walk(rows, given, leaf, part.start, part.stop), len(x), 8 * len(x) * trees
    )
    return leaf

"""Leaves, histograms and best splits of binned rows, in C."""

from __future__ import annotations

import ctypes

from torch import Tensor

from coterie._core.native import library

MOST_SPLITS = 256  # of a tree, in the C code

available = library is not None and hasattr(library, "coterie_tree_splits")


def leaves(bins: Tensor, splits: Tensor, categorical: Tensor, missing: int, leaf: Tensor) -> None:
    """Write the leaf of each row in each tree to int32 [rows, trees]; tensors are contiguous."""
    assert library is not None
    numbers = (ctypes.c_int64(value) for value in (*bins.shape,))
    library.coterie_tree_leaves(
        _at(bins),
        *numbers,
        _at(splits),
        ctypes.c_int64(splits.shape[0]),
        ctypes.c_int64(splits.shape[1]),
        _at(categorical),
        ctypes.c_int64(missing),
        _at(leaf),
    )


def walk(x: Tensor, tables: tuple[Tensor, ...], leaf: Tensor, first: int, last: int) -> None:
    """Write the leaves of rows first..last of x, float64 [rows, features], to int64 [rows, trees].

    `tables` are feature, threshold, missing, child, start and categorical, as `tree_walk.Walk` has them.
    """
    assert library is not None
    (rows, features), trees = x.shape, leaf.shape[1]
    sizes = (rows, features, trees, tables[0].numel() // max(1, trees))
    library.coterie_tree_walk(
        _at(x),
        *(ctypes.c_int64(value) for value in sizes),
        *(_at(table) for table in tables),
        ctypes.c_int64(first),
        ctypes.c_int64(last),
        _at(leaf),
    )


def histograms(
    bins: Tensor, pairs: Tensor, leaf: Tensor, place: Tensor, sums: Tensor, first: int, last: int
) -> None:
    """Add the derivatives of all rows to sums [clients, trees, asked, features, bins, 2 or 3], for some features."""
    assert library is not None
    clients, trees, asked, features, count, width = sums.shape
    sizes = (clients, bins.shape[1], features, trees, place.shape[1], asked, count, width, first, last)
    library.coterie_tree_histograms(
        _at(bins), _at(pairs), _at(leaf), _at(place), *(ctypes.c_int64(value) for value in sizes), _at(sums)
    )


def splits(
    sums: Tensor,
    total: Tensor,
    parent: Tensor,
    categorical: Tensor,
    limits: tuple[float, float, float, float],
    levels: int,
    found: tuple[Tensor, ...],
) -> None:
    """Write gain, feature, threshold, missing and left sums of the best split of each node to `found`.

    `limits` are smoothing, least curvature, curvature added to order categories, and the tie; tensors are contiguous.
    """
    assert library is not None
    _, features, bins, _ = sums.shape
    work = sums.new_empty(2 * features * (bins - 1))
    library.coterie_tree_splits(
        _at(sums),
        *(ctypes.c_int64(value) for value in sums.shape),
        *(_at(part) for part in (total, parent, categorical)),
        *(ctypes.c_double(value) for value in limits),
        ctypes.c_int64(levels),
        _at(work),
        *(_at(part) for part in found),
    )


def _at(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())

"""Bins of features for histograms: cut points from counts on a grid, which narrows where the rows are.

The server sends a grid of numbers for each feature, and a client answers how many of its values lie in each cell
(a, b]. Counts of clients add up, and no value leaves a client. The next grid divides the cells that hold too much. A
cell that fewer than `LEAST` rows of all clients share is not divided.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

COUNTED = 1 << 14  # rows of a client that are counted, at most
CELLS = 8  # of a grid, for each bin
GRIDS = 6  # at most, one after the other
LEAST = 5  # rows in a cell that is divided
SMALLEST = 2.0**-100  # of the numbers that the first grid tells from zero
NO_EDGE = torch.finfo(torch.float32).max  # stands for no cut point: no value exceeds it

Numbers = NDArray[Any]


def cell_counts(x: Tensor, weight: Tensor, grid: Tensor) -> Tensor:
    """Return how many values of each feature lie in each cell, [..., features, numbers of the grid + 1].

    Parameters
    ----------
    x
        Rows [..., B, features]; NaN is missing and not counted.
    weight
        Weights [..., B] of the rows, 0 on padding, which comes last.
    grid
        Increasing numbers of each feature [features, numbers]: a value is in cell c if c of them are below it.
    """
    if x.shape[-2] > COUNTED:
        own = (weight > 0).sum(-1, keepdim=True).clamp(min=COUNTED)
        rows = torch.arange(COUNTED, device=x.device) * own // COUNTED
        x = x.gather(-2, rows.unsqueeze(-1).expand(*rows.shape, x.shape[-1]))
        weight = weight.gather(-1, rows) * own / COUNTED
    columns = x.movedim(-1, 0).contiguous()  # [features, ..., B]
    found = torch.searchsorted(grid, columns.reshape(len(grid), -1)).view(columns.shape).movedim(0, -2)
    weights = torch.where(x.mT.isnan(), 0.0, weight.unsqueeze(-2))
    counts = torch.zeros(*found.shape[:-1], grid.shape[-1] + 1, dtype=weights.dtype, device=x.device)
    return counts.scatter_add_(-1, found, weights)


class GridSearch:
    """Search for the cut points of features, one grid after the other.

    Ask clients for their counts on `grid` of the features `asked` and call `learn` with the sum, until nothing is asked
    or `GRIDS` were. Then `edges` returns the cut points.

    Parameters
    ----------
    features
        Which features, int64.
    bins
        Bins of a feature, the one for missing values included.
    dtype
        Type of the features.
    """

    def __init__(self, features: Tensor, bins: int, dtype: torch.dtype) -> None:
        self.bins, self.dtype = bins, dtype
        self._next = {int(k): _first_grid(grid_size(bins), dtype) for k in features}
        self._known: dict[int, tuple[Numbers, Numbers]] = {}

    @property
    def asked(self) -> Tensor:
        """The features whose counts are needed, int64."""
        return torch.tensor(list(self._next), dtype=torch.long)

    @property
    def grid(self) -> Tensor:
        """The grids of these features, [features, numbers]."""
        return torch.from_numpy(np.stack(list(self._next.values()))).to(self.dtype)

    def learn(self, counts: Tensor) -> None:
        """Take the counts of all clients on the grids, and ask for narrower ones where cells hold too much."""
        grids, self._next = self._next, {}
        for (feature, grid), count in zip(grids.items(), counts.double().cpu().numpy(), strict=True):
            self._known[feature] = grid, count
            finer = _narrowed(grid, count, self.bins)
            if finer is not None:
                self._next[feature] = finer

    def edges(self, features: int) -> Tensor:
        """Return the cut points [features, bins - 2] of all features; `NO_EDGE` stands for none."""
        edges = np.full((features, self.bins - 2), NO_EDGE)
        for feature, (grid, count) in self._known.items():
            found = cut_points(grid, count, self.bins - 2)
            edges[feature, : len(found)] = found
        return torch.from_numpy(edges).to(self.dtype)


def grid_size(bins: int) -> int:
    """Return how many numbers a grid has."""
    return CELLS * bins


def cut_points(grid: Numbers, counts: Numbers, most: int) -> Numbers:
    """Return at most `most` increasing cut points between the cells that hold values.

    They lie in the middle of empty cells where there are some. If there are not enough for all cells, they split the
    rows evenly.
    """
    low, high, mass = _occupied(grid, counts)
    between = high[:-1] + 0.5 * (low[1:] - high[:-1])
    if len(between) <= most:
        return between
    ranks = mass.cumsum()
    aims = ranks[-1] * np.arange(1, most + 1) / (most + 1)
    above = np.searchsorted(ranks[:-1], aims).clip(1, len(between) - 1)
    nearer = aims - ranks[above - 1] < ranks[above] - aims
    chosen: Numbers = between[np.unique(above - nearer)]
    return chosen


def _first_grid(size: int, dtype: torch.dtype) -> Numbers:
    """Return numbers that are even on a logarithmic scale on both sides of zero, which has a cell of its own."""
    ends: Numbers = np.array([SMALLEST, NO_EDGE], dtype=np.float64 if dtype == torch.float64 else np.float32)
    low, high = _ranks(ends).tolist()
    above = _values(np.linspace(low, high, size // 2 - 1).astype(np.int64), ends.dtype).clip(*ends)
    return np.concatenate([-above[::-1], [-torch.finfo(dtype).tiny, 0], above]).astype(ends.dtype)


def _narrowed(grid: Numbers, counts: Numbers, bins: int) -> Numbers | None:
    """Return the next grid of a feature, or None if no cell needs to be divided.

    Cells that hold values keep their ends, and share the room that is left by the roots of their counts.
    """
    low, high, mass = _occupied(grid, counts)
    limit = 0.5 * mass.sum() / bins if len(mass) > bins else 0.0  # few cells: each may get bins of its own
    if len(mass) > len(grid) // 4:  # more than there will be bins: those that hold little go together
        first = _first_of_groups(mass, limit)
        low, mass = low[first], np.add.reduceat(mass, first)
        high = np.append(low[1:], high[-1])
    ranks = _ranks(low), _ranks(high)
    width = (ranks[1] - ranks[0]).view(np.uint64)  # which has room for the whole range
    divided = (mass > limit) & (mass >= LEAST) & (width > 1) & (high - low > np.finfo(low.dtype).tiny)
    if not divided.any():
        return None
    kept = np.unique(np.concatenate(ranks))
    start, width, share = ranks[0][divided], width[divided], np.sqrt(mass[divided])
    inside = ((len(grid) - len(kept)) * share / share.sum()).astype(int)
    place = np.arange(inside.sum()) - np.repeat(inside.cumsum() - inside, inside) + 1
    steps = place / np.repeat(inside + 1, inside) * np.repeat(width, inside)
    new = np.repeat(start, inside) + steps.astype(np.uint64).view(np.int64)
    found = np.unique(np.concatenate([kept, new]))
    finer = np.full_like(grid, NO_EDGE)
    finer[: len(found)] = _values(found, grid.dtype)
    return finer


def _occupied(grid: Numbers, counts: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return both ends and the counts of the cells that hold values; nothing is known of the end beyond a grid."""
    here = counts > 0
    low, high = np.concatenate([grid[:1], grid]), np.concatenate([grid, grid[-1:]])
    return low[here], high[here], counts[here]


def _first_of_groups(mass: Numbers, limit: float) -> NDArray[np.intp]:
    """Return the first of each group of neighbours; a group of several holds at most `limit`."""
    first, total = [0], 0.0
    for k, own in enumerate(mass.tolist()):
        if k and total + own > limit:
            first.append(k)
            total = 0.0
        total += own
    return np.array(first)


def _ranks(values: Numbers) -> NDArray[np.int64]:
    """Return how many floats lie between zero and each: even steps are even ratios, or even steps in an octave."""
    bits: Numbers = values.view(np.int64 if values.dtype == np.float64 else np.int32)
    return _flipped(bits).astype(np.int64)


def _values(ranks: NDArray[np.int64], dtype: np.dtype[Any]) -> Numbers:
    """Return the floats whose ranks are given."""
    return _flipped(ranks.astype(np.int64 if dtype == np.float64 else np.int32)).view(dtype)


def _flipped(bits: Numbers) -> Numbers:
    """Return ranks for bits of floats, or bits for ranks: below zero one rises as the other falls."""
    return np.where(bits < 0, np.iinfo(bits.dtype).min - bits, bits)


def to_bins(x: Tensor, edges: Tensor, categorical: Tensor) -> Tensor:
    """Return the bin of each value, uint8 [..., B, features]; the last bin, edges.shape[-1] + 1, is for missing values.

    Parameters
    ----------
    x
        [..., B, features].
    edges
        Cut points [features, count]: a value is in bin b if b of them are below it.
    categorical
        Features whose values are their bins, bool [features].
    """
    columns = x.reshape(-1, x.shape[-1]).t().contiguous()
    found = torch.searchsorted(edges, torch.where(columns.isnan(), 0.0, columns))
    codes = torch.where(columns.isnan(), 0.0, columns).long().clamp(0, edges.shape[-1])
    found = torch.where(categorical.unsqueeze(-1), codes, found)
    found = torch.where(columns.isnan(), edges.shape[-1] + 1, found)
    return found.to(torch.uint8).t().reshape(x.shape).contiguous()

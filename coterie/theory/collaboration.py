"""Weights between clients: which pairs are looked at, how models are mixed, how near the truth the weights are."""

from __future__ import annotations

import ctypes
import functools
import math

import torch
from torch import Tensor

from coterie import native
from coterie.runtime.workers import shared_out


class _Mixture(ctypes.Structure):
    """`struct mixture` of coterie/native/chain_work.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("to", "start", "weights", "models")),
        *((name, ctypes.c_int64) for name in ("rows", "length", "columns")),
        ("factor", ctypes.c_float),
    )


@functools.lru_cache(maxsize=8)
def all_pairs(n: int, ordered: bool = False) -> tuple[Tensor, Tensor]:
    """Both ends of every pair of n clients, i < j or (ordered) i != j."""
    i, j = torch.triu_indices(n, n, 1).unbind()
    return (torch.cat([i, j]), torch.cat([j, i])) if ordered else (i, j)


def degrees(weights: Tensor) -> Tensor:
    """Sums of the weights to others, [n]."""
    return weights.sum(-1) - weights.diagonal()


def pulled(weights: Tensor, degree: Tensor, pull: Tensor | float) -> Tensor:
    """1 - pull L, which moves models towards each other, with the Laplacian L = diag(degree) - W."""
    result = weights * pull
    result.diagonal().copy_(1 - pull * degree)
    return result


def mixed(weights: Tensor, models: Tensor, slopes: Tensor | None = None, lr: float = 0.0) -> Tensor:
    """weights [m, n] times models [n, d], minus lr slopes [m, d]."""
    weights = weights.to(models.dtype)
    if not native.takes(models):
        result = weights @ models
        return result if slopes is None else result.sub_(lr * slopes)
    assert native.library is not None
    compute, result = native.library.coterie_mixture, models.new_empty(len(weights), models.shape[1])
    weights, models = weights.contiguous(), models.contiguous()
    slopes = None if slopes is None else slopes.contiguous()
    work = _Mixture(
        *(0 if part is None else part.data_ptr() for part in (result, slopes, weights, models)),
        *(*weights.shape, models.shape[1], -lr),
    )

    def mix(columns: slice) -> None:
        if compute(ctypes.byref(work), ctypes.c_int64(columns.start), ctypes.c_int64(columns.stop)):
            raise MemoryError("no room to mix models")

    shared_out(mix, models.shape[1], weights.numel() * models.shape[1])
    return result


def midpoints(models: Tensor, ends: Tensor) -> Tensor:
    """(x_i + x_j)/2 of pairs whose first ends i are the first half of `ends` [2 P], for both ends, [2 P, d]."""
    if not native.takes(models):
        first, second = models.index_select(0, ends).chunk(2)
        return torch.lerp(first, second, 0.5).repeat(2, 1)
    assert native.library is not None
    models, ends, result = (
        models.contiguous(),
        ends.contiguous(),
        models.new_empty(len(ends), models.shape[1]),
    )
    places = (ctypes.c_void_p(part.data_ptr()) for part in (result, models, ends))
    sizes = (ctypes.c_int64(size) for size in (len(ends) // 2, *models.shape))
    if native.library.coterie_midpoints(*places, *sizes):
        raise IndexError(f"a pair has an end that is not one of {len(models)} models")
    return result


def both_ends(ends: Tensor, answered: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which pairs have both answers, and where: `ends` [2 P] were asked in this order, `answered` replied.

    A client that left some of its visits unanswered is not believed in any, since which ones it left out is not
    known. Returns the pairs [k] and the rows of both answers [k].
    """
    whole = torch.bincount(ends, minlength=n) == torch.bincount(answered, minlength=n)
    usable = whole[ends]
    row_of_usable = whole[answered].nonzero().squeeze(-1)
    place = usable.cumsum(0) - 1
    first, second = usable.chunk(2)
    pairs = (first & second).nonzero().squeeze(-1)
    return pairs, row_of_usable[place[pairs]], row_of_usable[place[pairs + len(first)]]


def weight_quality(weights: Tensor, truth: Tensor | None, simplex: bool = False) -> dict[str, Tensor]:
    """Mean weight inside and between true clusters, and recovery, which is 1 when W is the truth.

    Recovery is 1 - mean |w_ij - w*_ij| over pairs, w* being 1 inside a cluster and 0 outside; on the simplex it
    is the mass of a row that stays inside its cluster, oneself included.
    """
    if truth is None or len(weights) < 2:
        return {}
    truth = truth.to(weights.device)
    same = truth.unsqueeze(1) == truth
    other = ~torch.eye(len(weights), dtype=torch.bool, device=weights.device)
    inside, outside = weights[same & other], weights[~same]
    right = weights.masked_fill(~same, 0).sum() / len(weights)
    if not simplex:
        right = 1 - (weights - same.to(weights.dtype))[other].abs().mean()
    return {"inside": inside.mean(), "between": outside.mean(), "recovery": right}


def refreshes_until_cut(gamma: float, curvature: float, distance: float) -> int:
    """How often a pair at its own optima, that far apart, is looked at until its weight has gone from 1 to 0."""
    return math.ceil(4 / (gamma * curvature**2 * distance**2))


def stationary_consensus(lr: float, curvature: float, pull: float, noise: float) -> float:
    """E |x_i - x_j|^2 of two clients of a cluster with equal losses curvature/2 |x - mu|^2, in the long run.

    `pull` is rho c, c the size of the cluster; `noise` is E |noise|^2 of a gradient, all coordinates together.
    """
    return 2 * lr**2 * noise / (1 - (1 - lr * (curvature + pull)) ** 2)


def theorem_one(
    lr: float, rounds: int, smoothness: float, pull: float, noise: float, unlikeness: float, gap: float
) -> tuple[float, float]:
    """Bounds on the mean of |grad f~_ij(z_ij)|^2 and of |x_i - x_j|^2 inside a cluster whose weights are known.

    CoBo's Theorem 1 as it can be proved: `pull` = rho c >= sqrt(3) L, lr rho c <= 1, lr <= 1/(2 L), `unlikeness` M <=
    1/5 in |grad f_i - grad f_j| <= M |grad f_i + grad f_j|, a common start, `gap` = c^-2 sum_ij (f~_ij(z^0) - f~*_ij).
    """
    slope = 5.6 * gap / (lr * rounds) + 2.8 * lr * noise * (smoothness + 8 / 3 * pull)
    return slope, 24 * unlikeness**2 / pull**2 * slope + 4 * lr * noise / pull

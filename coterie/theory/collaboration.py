"""Weights between clients: choose pairs, mix models, and measure how near the truth the weights are."""

from __future__ import annotations

import ctypes
import functools
import math

import torch
from torch import Tensor

from coterie._core import native
from coterie._core.threads import shared_out


class _Mixture(ctypes.Structure):
    """The struct `mixture` of coterie/_core/native/mlp_work.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("to", "start", "weights", "models")),
        *((name, ctypes.c_int64) for name in ("rows", "length", "columns")),
        ("factor", ctypes.c_float),
    )


@functools.lru_cache(maxsize=8)
def all_pairs(n: int, ordered: bool = False) -> tuple[Tensor, Tensor]:
    """Return both ends of every pair of n clients, i < j or, if `ordered`, i != j.

    Examples
    --------
    >>> from coterie.theory.collaboration import all_pairs
    >>> [end.tolist() for end in all_pairs(3)]
    [[0, 0, 1], [1, 2, 2]]
    """
    i, j = torch.triu_indices(n, n, 1).unbind()
    return (torch.cat([i, j]), torch.cat([j, i])) if ordered else (i, j)


def degrees(weights: Tensor) -> Tensor:
    """Return the sum of each client's weights to others, [n], from weights [n, n].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.collaboration import degrees
    >>> degrees(torch.tensor([[5.0, 1.0], [2.0, 5.0]])).tolist()
    [1.0, 2.0]
    """
    return weights.sum(-1) - weights.diagonal()


def pulled(weights: Tensor, degree: Tensor, prox: Tensor | float) -> Tensor:
    """Return 1 - prox L, which moves models towards each other, with the Laplacian L = diag(degree) - W.

    Parameters
    ----------
    weights
        W, [n, n].
    degree
        Sums of its rows without the diagonal, [n].
    prox
        Strength of the proximal term.

    Returns
    -------
    Tensor
        The matrix to multiply the models by, [n, n].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.collaboration import degrees, pulled
    >>> weights = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> pulled(weights, degrees(weights), 0.25).tolist()
    [[0.75, 0.25], [0.25, 0.75]]
    """
    result = weights * prox
    result.diagonal().copy_(1 - prox * degree)
    return result


def mixed(weights: Tensor, models: Tensor, grads: Tensor | None = None, lr: float = 0.0) -> Tensor:
    """Return weights times models, minus lr times gradients; in C where the kernels support it.

    Parameters
    ----------
    weights
        Mixing weights, [m, n].
    models
        Models, [n, d].
    grads
        Gradients, [m, d], or None.
    lr
        Step size.

    Returns
    -------
    Tensor
        [m, d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.collaboration import mixed
    >>> mixed(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0]]), lr=0.5).tolist()
    [[1.5]]
    """
    weights = weights.to(models.dtype)
    if not native.takes(models):
        result = weights @ models
        return result if grads is None else result.sub_(lr * grads)
    assert native.library is not None
    compute, result = native.library.coterie_mixture, models.new_empty(len(weights), models.shape[1])
    weights, models = weights.contiguous(), models.contiguous()
    grads = None if grads is None else grads.contiguous()
    work = _Mixture(
        *(0 if part is None else part.data_ptr() for part in (result, grads, weights, models)),
        *(*weights.shape, models.shape[1], -lr),
    )

    def mix(columns: slice) -> None:
        if compute(ctypes.byref(work), ctypes.c_int64(columns.start), ctypes.c_int64(columns.stop)):
            raise MemoryError("no room to mix models")

    shared_out(mix, models.shape[1], weights.numel() * models.shape[1])
    return result


def midpoints(models: Tensor, ends: Tensor) -> Tensor:
    """Return (x_i + x_j)/2 of pairs (i, j), once for each end.

    Parameters
    ----------
    models
        Models, [n, d].
    ends
        First ends i of all pairs, then second ends j, int64 [2 P].

    Returns
    -------
    Tensor
        [2 P, d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.collaboration import midpoints
    >>> midpoints(torch.tensor([[0.0], [2.0], [6.0]]), torch.tensor([0, 0, 1, 2])).tolist()
    [[1.0], [3.0], [1.0], [3.0]]
    """
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
    """Find the pairs of which both ends answered.

    A client that left some of its visits unanswered is ignored in all of them, because which ones it left out is
    unknown.

    Parameters
    ----------
    ends
        First ends of all pairs, then second ends, in the order in which they were asked, [2 P].
    answered
        Clients that answered, in that order.
    n
        Number of clients.

    Returns
    -------
    tuple of Tensor
        The pairs [k], and the rows of `answered` with the answers of their first and second ends, [k] each.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.collaboration import both_ends
    >>> pairs, first, second = both_ends(torch.tensor([0, 0, 1, 2]), torch.tensor([0, 0, 2]), n=3)
    >>> pairs.tolist(), first.tolist(), second.tolist()
    ([1], [1], [2])
    """
    whole = torch.bincount(ends, minlength=n) == torch.bincount(answered, minlength=n)
    usable = whole[ends]
    row_of_usable = whole[answered].nonzero().squeeze(-1)
    place = usable.cumsum(0) - 1
    first, second = usable.chunk(2)
    pairs = (first & second).nonzero().squeeze(-1)
    return pairs, row_of_usable[place[pairs]], row_of_usable[place[pairs + len(first)]]


def weight_quality(weights: Tensor, truth: Tensor | None, simplex: bool = False) -> dict[str, Tensor]:
    """Measure how near weights are to the true clusters.

    Parameters
    ----------
    weights
        Weights between clients, [n, n].
    truth
        True cluster of each client, [n], or None.
    simplex
        Whether every row of weights sums to one.

    Returns
    -------
    dict of Tensor
        Mean weight `inside` and `between` true clusters, and `recovery`, which is 1 when the weights are the truth:
        1 - mean |w_ij - w*_ij| over pairs, w* being 1 inside a cluster and 0 outside; on the simplex, the mass of a row
        that stays inside its cluster, oneself included. Empty if the truth is unknown.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.collaboration import weight_quality
    >>> weights = torch.tensor([[0.0, 0.8, 0.1], [0.8, 0.0, 0.1], [0.1, 0.1, 0.0]])
    >>> {name: round(value.item(), 2) for name, value in weight_quality(weights, torch.tensor([0, 0, 1])).items()}
    {'inside': 0.8, 'between': 0.1, 'recovery': 0.87}
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
    """Return how often a pair of clients at their own optima is looked at until its weight has gone from 1 to 0.

    Parameters
    ----------
    gamma
        Step size of the weights.
    curvature
        Curvature of both losses.
    distance
        Distance between the optima.

    Returns
    -------
    int
        Number of refreshes.

    Examples
    --------
    >>> from coterie.theory.collaboration import refreshes_until_cut
    >>> refreshes_until_cut(gamma=0.1, curvature=1.0, distance=2.0)
    10
    """
    return math.ceil(4 / (gamma * curvature**2 * distance**2))


def stationary_consensus(lr: float, curvature: float, prox: float, noise: float) -> float:
    """Return E |x_i - x_j|^2, in the long run, of two clients of a cluster with equal losses curvature/2 |x - mu|^2.

    Parameters
    ----------
    lr
        Step size.
    curvature
        Curvature of the losses.
    prox
        rho c, where c is the size of the cluster.
    noise
        E |noise|^2 of a gradient, all coordinates together.

    Returns
    -------
    float
        The expected squared distance.

    Examples
    --------
    >>> from coterie.theory.collaboration import stationary_consensus
    >>> round(stationary_consensus(lr=0.1, curvature=1.0, prox=2.0, noise=1.0), 4)
    0.0392
    """
    return 2 * lr**2 * noise / (1 - (1 - lr * (curvature + prox)) ** 2)


def theorem_one(
    lr: float, rounds: int, smoothness: float, prox: float, noise: float, unlikeness: float, gap: float
) -> tuple[float, float]:
    """Bound the means of |grad f~_ij(z_ij)|^2 and of |x_i - x_j|^2 inside a cluster whose weights are known.

    CoBo's Theorem 1 as it can be proved. It needs prox >= sqrt(3) L, lr prox <= 1, lr <= 1/(2 L), unlikeness <=
    1/5 and a common start.

    Parameters
    ----------
    lr
        Step size.
    rounds
        Number of rounds.
    smoothness
        Smoothness L of the losses.
    prox
        rho c, where c is the size of the cluster.
    noise
        E |noise|^2 of a gradient.
    unlikeness
        M in |grad f_i - grad f_j| <= M |grad f_i + grad f_j|.
    gap
        c^-2 sum_ij (f~_ij(z^0) - f~*_ij).

    Returns
    -------
    tuple of float
        Bounds on the squared gradient and on the squared distance.

    Examples
    --------
    >>> from coterie.theory.collaboration import theorem_one
    >>> bounds = theorem_one(lr=0.1, rounds=1000, smoothness=1.0, prox=2.0, noise=0.01, unlikeness=0.1, gap=1.0)
    >>> [round(bound, 4) for bound in bounds]
    [0.0737, 0.0064]
    """
    grad_bound = 5.6 * gap / (lr * rounds) + 2.8 * lr * noise * (smoothness + 8 / 3 * prox)
    return grad_bound, 24 * unlikeness**2 / prox**2 * grad_bound + 4 * lr * noise / prox

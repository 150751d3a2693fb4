"""Exact estimators of linear models to compare with: alone, one for all, one centre, BLUE, James-Stein.

Lyu, Hanzely, Kolar, "Personalized Federated Learning with Multiple Known Clusters" (2022). A is X'X and b is X'y
of a client's rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie._core.randomness import key, permutation
from coterie.theory.groups import group_sum
from coterie.theory.hierarchical import pseudo_solve, times


def local_least_squares(a: Tensor, b: Tensor) -> Tensor:
    """Fit every client alone: A^+ b, which is X^+ y.

    Parameters
    ----------
    a
        A of each client, [n, d, d].
    b
        b of each client, [n, d].

    Returns
    -------
    Tensor
        [n, d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.linear_estimators import local_least_squares
    >>> local_least_squares(torch.ones(2, 1, 1), torch.tensor([[0.0], [4.0]])).tolist()
    [[0.0], [4.0]]
    """
    return pseudo_solve(a, b)


def single_least_squares(a: Tensor, b: Tensor) -> Tensor:
    """Fit one model for all clients: (sum A)^+ sum b.

    Parameters
    ----------
    a
        A of each client, [n, d, d].
    b
        b of each client, [n, d].

    Returns
    -------
    Tensor
        [d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.linear_estimators import single_least_squares
    >>> single_least_squares(torch.ones(2, 1, 1), torch.tensor([[0.0], [4.0]])).tolist()
    [2.0]
    """
    return pseudo_solve(a.sum(0), b.sum(0))


def one_centre(a: Tensor, b: Tensor, prox: float) -> Tensor:
    """Return personal models with a proximal term to one common centre, [n, d]: the single-cluster closed form.

    Parameters
    ----------
    a
        A of each client, [n, d, d].
    b
        b of each client, [n, d].
    prox
        Strength of the proximal term.

    Returns
    -------
    Tensor
        [n, d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.linear_estimators import one_centre
    >>> one_centre(torch.ones(2, 1, 1), torch.tensor([[0.0], [4.0]]), prox=1.0).tolist()
    [[1.0], [3.0]]
    """
    if not 0 < prox < math.inf:
        raise SettingError(f"prox = {prox}; the strength of the proximal term must be above 0 and finite")
    values, vectors = torch.linalg.eigh(a)
    return _one_centre(values, vectors, times(vectors.mT, b), prox)


def _one_centre(values: Tensor, vectors: Tensor, right: Tensor, prox: float) -> Tensor:
    """Compute `one_centre` from A = V diag(values) V' and V'b, so that many strengths share one decomposition."""
    kept = values.clamp(min=0.0) + prox
    stretched = vectors * (prox * (1 - prox / kept)).unsqueeze(-2)
    h = stretched.transpose(0, 1).flatten(1) @ vectors.transpose(0, 1).flatten(1).T
    centre = pseudo_solve(h, times(vectors, prox * right / kept).sum(0))
    return times(vectors, (right + prox * times(vectors.mT, centre)) / kept)


def cross_validated_pull(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    folds: int = 5,
    seed: int = 0,
    range_: tuple[float, float] = (1e-3, 1e3),
) -> float:
    """Return the strength of `one_centre` with the least squared error on held-out rows.

    Parameters
    ----------
    xs
        Inputs of each client, [rows, d].
    ys
        Targets of each client, [rows].
    folds
        Parts into which every client's rows are cut.
    seed
        Seed of the cut.
    range_
        Smallest and largest strength to consider.

    Returns
    -------
    float
        The strength, to within one percent.

    Examples
    --------
    >>> from coterie.data import generate
    >>> from coterie.theory.linear_estimators import cross_validated_pull
    >>> data = generate.hierarchical_linear(clusters=1, clients=10, features=3, rows=10, within=0.1)
    >>> cross_validated_pull(data.xs, data.ys) > 10
    True
    """
    sums = [fold_sums(x, y, folds, seed + i) for i, (x, y) in enumerate(zip(xs, ys, strict=True))]
    a, b = (torch.stack(part, 1) for part in zip(*sums, strict=True))  # [folds, n, ...]
    values, vectors = torch.linalg.eigh(a.sum(0) - a)
    right = times(vectors.mT, b.sum(0) - b)

    def error(log_prox: float) -> float:
        total = 0.0
        for fold in range(folds):
            t = _one_centre(values[fold], vectors[fold], right[fold], math.exp(log_prox))
            total += float((t * (times(a[fold], t) - 2 * b[fold])).sum())
        return total

    return math.exp(_golden_section(error, math.log(range_[0]), math.log(range_[1]), 0.01))


def _golden_section(function: Callable[[float], float], low: float, high: float, width: float) -> float:
    """Return the minimiser of a function that falls and then rises, to within `width`."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > width:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return 0.5 * (low + high)


def fold_sums(x: Tensor, y: Tensor, folds: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return X'X [folds, d, d] and X'y [folds, d] of each part of the rows, dealt out at random.

    Parameters
    ----------
    x
        Inputs, [rows, d].
    y
        Targets, [rows].
    folds
        Number of parts.
    seed
        Seed of the draws.

    Returns
    -------
    tuple of Tensor
        X'X and X'y of each part.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.linear_estimators import fold_sums
    >>> fold_sums(torch.ones(4, 1), torch.ones(4), folds=2, seed=0)[0].flatten().tolist()
    [2.0, 2.0]
    """
    part = torch.empty(len(y), dtype=torch.long)
    part[permutation(key(seed, "folds"), len(y))] = torch.arange(len(y)) % folds
    inside = torch.nn.functional.one_hot(part, folds).to(x.dtype).t().unsqueeze(-1)  # [folds, rows, 1]
    masked = x * inside
    return masked.mT @ x, (masked * y.unsqueeze(-1)).sum(1)


def scalar_blue(local: Tensor, precision: Tensor, clusters: Tensor, within: Tensor, between: float) -> Tensor:
    """Return best linear unbiased estimators when X'X is a multiple beta_i of the identity, [n, d].

    Each estimator weighs the client's own fit against those of the others.

    Parameters
    ----------
    local
        Least-squares fit of each client, [n, d].
    precision
        beta_i / sigma_i^2, [n, 1].
    clusters
        Cluster of each client, [n].
    within
        Variance s_j^2 inside each cluster, [k, 1].
    between
        Variance s0^2 between clusters.

    Returns
    -------
    Tensor
        [n, d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.linear_estimators import scalar_blue
    >>> fits, one = torch.tensor([[0.0], [4.0]]), torch.ones(2, 1)
    >>> scalar_blue(fits, one, torch.tensor([0, 0]), within=one[:1], between=1.0).tolist()
    [[1.0], [3.0]]
    """
    k = len(within)
    weight = 1 / (1 / precision + within[clusters])
    total, summed = group_sum(weight, clusters, k), group_sum(weight * local, clusters, k)
    use = total / (1 + between * total)
    mean = summed / total
    mine, own_use = weight, use[clusters]
    others, others_sum = total[clusters] - mine, summed[clusters] - mine * local
    outside = use.sum() - own_use
    outside_sum = (use * mean).sum(0) - own_use * mean[clusters]
    trust = outside / (1 + between * outside)  # Q
    outside_mean = outside_sum / outside.where(outside > 0, 1.0)
    known = others + trust
    prior = (others_sum + trust * outside_mean) / known.where(known > 0, 1.0)
    prior_precision = known / (1 + within[clusters] * known)  # B
    return (precision * local + prior_precision * prior) / (precision + prior_precision)


def james_stein(y: Tensor, noise: float = 1.0, within: float = 1.0, positive: bool = True) -> Tensor:
    """Shrink the estimators of one cluster in the point model y_i = t_i + noise, [..., n, d].

    The BLUE with the others' mean shrunk to zero by 1 - (d-2) v / |mean|^2, where v is the variance of that mean; it
    lowers the risk for every centre when d >= 3.

    Parameters
    ----------
    y
        One observation per client, [..., n, d].
    noise
        Variance of the noise.
    within
        Variance inside the cluster.
    positive
        Whether negative shrinkage becomes 0.

    Returns
    -------
    Tensor
        [..., n, d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.linear_estimators import james_stein
    >>> james_stein(torch.ones(2, 3, dtype=torch.float64))[0].round(decimals=3).tolist()
    [0.833, 0.833, 0.833]
    """
    n, d = y.shape[-2:]
    if d < 3 or n < 2:
        raise SettingError(
            f"y is {n} clients by {d} coordinates; James-Stein needs 2 clients and 3 coordinates"
        )
    mean = (y.sum(-2, keepdim=True) - y) / (n - 1)
    variance = (noise + within) / (n - 1)
    shrink = 1 - (d - 2) * variance / mean.square().sum(-1, keepdim=True)
    if positive:
        shrink = shrink.clamp(min=0.0)
    prior_precision = 1 / (variance + within)
    return (y / noise + prior_precision * shrink * mean) / (1 / noise + prior_precision)

"""Centres from which threshold clustering starts: K-means++, or groups found before."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from coterie._core import randomness
from coterie._core.errors import SettingError

FAR = 5.0  # times the distance that three quarters of the points have to their nearest neighbour
SMALL = 1 << 20  # elements below which scikit-learn gets one thread


def seed_weights(
    points: Tensor, k: int, *, lloyd: int = 5, tries: int = 1, far: bool = False, seed: int = 0
) -> Tensor:
    """Return starting centres as weights of the points: K-means++ (scikit-learn's), then steps of K-means.

    Parameters
    ----------
    points
        Points, [N, d].
    k
        Number of centres.
    lloyd
        Steps of K-means after each draw.
    tries
        Draws, of which the best is used.
    far
        Leave out points without neighbours (`stray`); K-means++ would otherwise spend its centres on them.
    seed
        Seed of the draws.

    Returns
    -------
    Tensor
        Weights, [k, N].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.threshold_starts import seed_weights
    >>> seed_weights(torch.tensor([[0.0], [1.0], [9.0]]), 2).sum(1).tolist()
    [1.0, 1.0]
    """
    points = points.detach().double()
    if not 1 <= k <= len(points):
        raise SettingError(f"k = {k} centres cannot be drawn from {len(points)} points; give 1 <= k <= N")
    if far:
        near = ~stray(points)
        if k <= int(near.sum()) < len(points):
            weights = points.new_zeros(k, len(points))
            weights[:, near] = seed_weights(points[near], k, lloyd=lloyd, tries=tries, seed=seed)
            return weights
    squares = (points * points).sum(1)
    best, lowest = None, float("inf")
    for attempt in range(tries):
        weights = _drawn(points, k, int(randomness.key(seed, "k-means++", attempt)) & 0x7FFFFFFF)
        for _ in range(lloyd):
            weights = _lloyd(weights, points, squares)
        inertia = float(squared_distances(weights @ points, points, squares).min(0).values.sum())
        if best is None or inertia < lowest:
            best, lowest = weights, inertia
    assert best is not None
    return best


def stray(points: Tensor, piece: int = 1 << 24) -> Tensor:
    """Return which points have no neighbour: the nearest is more than five times as far as is usual.

    A whole cluster far from the others is not stray, however far it is; a lone point is.

    Parameters
    ----------
    points
        Points, [N, d].
    piece
        Distances computed at once.

    Returns
    -------
    Tensor
        bool [N].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.threshold_starts import stray
    >>> stray(torch.tensor([[0.0], [0.1], [0.2], [50.0], [50.1], [-9.0]])).tolist()
    [False, False, False, False, False, True]
    """
    if len(points) < 3:
        return torch.zeros(len(points), dtype=torch.bool, device=points.device)
    nearest = torch.cat(
        [
            torch.cdist(part, points).topk(2, largest=False).values[:, 1]
            for part in points.split(max(1, piece // len(points)))
        ]
    )
    usual = nearest.quantile(0.75) if len(points) < 1 << 24 else nearest.median()
    return nearest > FAR * usual


def _drawn(points: Tensor, k: int, draw: int) -> Tensor:
    """Draw k different rows of the points by D^2 sampling, as weights."""
    from sklearn.cluster import kmeans_plusplus

    with few_threads(points.numel()):
        _, chosen = kmeans_plusplus(points.cpu().numpy(), k, random_state=draw)
    weights = points.new_zeros(k, len(points))
    weights[torch.arange(k), torch.as_tensor(chosen, dtype=torch.long)] = 1.0
    return weights


def group_weights(points: Tensor, labels: Tensor, k: int) -> Tensor:
    """Return starting centres from groups found before: the mean of the half nearest to the group's median.

    Less than half of a group cannot drag such a centre away.

    Parameters
    ----------
    points
        Points, [N, d].
    labels
        Group of each point, [N].
    k
        Number of groups; one without points starts at the mean of all.

    Returns
    -------
    Tensor
        Weights, [k, N].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.threshold_starts import group_weights
    >>> group_weights(torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([0, 0, 1]), 2).tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    weights = points.new_full((k, len(points)), 1.0 / len(points), dtype=torch.float64)
    for group in labels.unique().tolist():
        members = (labels == group).nonzero().squeeze(1)
        if not 0 <= group < k:
            continue
        own = points[members].double()
        length = torch.linalg.vector_norm(own - own.median(0).values, dim=1)
        near = members[length.argsort(stable=True)[: (len(members) + 1) // 2]]
        weights[group] = 0.0
        weights[group, near] = 1.0 / len(near)
    return weights


def _lloyd(weights: Tensor, points: Tensor, squares: Tensor) -> Tensor:
    """Make one step of K-means; a centre without points stays."""
    nearest = squared_distances(weights @ points, points, squares).argmin(0)
    own = torch.zeros_like(weights)
    own[nearest, torch.arange(len(points), device=points.device)] = 1.0
    total = own.sum(1, keepdim=True)
    return torch.where(total > 0, own / total.clamp(min=1.0), weights)


def squared_distances(centres: Tensor, points: Tensor, squares: Tensor) -> Tensor:
    """Return |centre - point|^2 as [K, N] through one matrix product."""
    own = (centres * centres).sum(1, keepdim=True)
    return (own + squares - 2 * centres @ points.T).clamp_(min=0.0)


@functools.cache
def _thread_pools() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def few_threads(elements: int) -> AbstractContextManager[Any]:
    """Limit small arrays to one thread: waking a second one costs more than it saves, most of all beside other work."""
    if elements > SMALL:
        return nullcontext()
    limited: AbstractContextManager[Any] = _thread_pools().limit(limits=1)
    return limited

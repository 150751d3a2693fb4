"""Estimate how many clusters there are: silhouettes of K-means, compared with clouds that have no clusters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie._core.randomness import key, normal, slots
from coterie.theory.threshold_starts import few_threads, seed_weights, stray

DRAWS = 5  # clouds without clusters that every number of clusters is held against
MARGIN = 0.1  # by which the silhouette must exceed the best of theirs
SMALLEST = 0.25  # of an equal share: fewer points are no cluster but stray points


def estimate_clusters(points: Any, most: int = 10, *, seed: int = 0) -> int:
    """Guess the number of clusters of points; 1 if no partition stands out.

    K clusters differ in K - 1 directions at most. So for K = 2..most the mean silhouette of K-means is taken in the
    first K - 1 principal components, where noise in many dimensions does not drown it, less the mean silhouette of
    Gaussian clouds with the same variances there (a gap statistic: Tibshirani, Walther, Hastie 2001). The largest
    difference wins if the silhouette also exceeds the best of those clouds by 0.1. Partitions with a part below a
    quarter of an equal share do not count.

    Parameters
    ----------
    points
        Points, [N, d]; those that are not finite or have no neighbour are left out.
    most
        Largest number of clusters to try.
    seed
        Seed of K-means++ and of the clouds.

    Returns
    -------
    int
        The number of clusters.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.cluster_count import estimate_clusters
    >>> draw = torch.Generator().manual_seed(0)
    >>> centres = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]]).repeat(20, 1)
    >>> estimate_clusters(centres + torch.randn(60, 2, generator=draw))
    3
    """
    points = torch.as_tensor(points)
    points = points[torch.isfinite(points).all(1)].double()
    if len(points) < 4:
        return 1
    points = points[~stray(points)]
    points = points - points.mean(0)
    left, values, _ = torch.linalg.svd(points, full_matrices=False)
    scale = values / len(points) ** 0.5
    best, gain = 1, 0.0
    for k in range(2, min(most, len(points) // 2, int((values > 1e-9 * values[:1]).sum()) + 1) + 1):
        found, smallest = _silhouette(left[:, : k - 1] * values[: k - 1], k, seed)
        if smallest < max(2.0, SMALLEST * len(points) / k):
            continue
        draws = [
            normal(slots(key(seed, "no clusters", draw, torch.arange(len(points))), k - 1))
            for draw in range(DRAWS)
        ]
        chance = [_silhouette(draw.to(points) * scale[: k - 1], k, seed)[0] for draw in draws]
        if found > max(chance) + MARGIN and found - sum(chance) / DRAWS > gain:
            best, gain = k, found - sum(chance) / DRAWS
    return best


def _silhouette(points: Tensor, k: int, seed: int) -> tuple[float, int]:
    """Return the mean silhouette of K-means with k centres, and the size of the smallest part."""
    from sklearn.metrics import silhouette_score

    weights = seed_weights(points, k, lloyd=10, tries=3, seed=seed)
    labels = torch.cdist(weights @ points, points).argmin(0)
    if len(labels.unique()) < 2:
        return 0.0, 0
    with few_threads(points.numel()):
        score = float(silhouette_score(points.cpu().numpy(), labels.cpu().numpy()))
    return score, int(torch.bincount(labels, minlength=k).min())

"""Partitions in which clusters of clients see the same classes in other features: turned or coloured images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coterie._core.errors import DataError, SettingError
from coterie.data.clients import Clients, Pool
from coterie.data.partition import equal_shares_at_random

TURNS = 4


def rotated(pool: Pool, cluster_sizes: Sequence[int], seed: int = 0) -> Clients:
    """Deal images out equally at random; cluster k turns all of its images by k quarters of a circle.

    Rotated MNIST of Ghosh et al. 2020, arXiv:2006.04088. Quarter turns move pixels and compute nothing.

    Parameters
    ----------
    pool
        Square images, [rows, side, side] or flat [rows, side^2].
    cluster_sizes
        Number of clients in each cluster, at most four clusters.
    seed
        Seed of the draws.

    Returns
    -------
    Clients
        Clients with known clusters; the images keep their shape.

    Examples
    --------
    >>> import torch
    >>> from coterie.data import Pool
    >>> from coterie.data.feature_shift import rotated
    >>> clients = rotated(Pool(torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(2, 1), torch.zeros(2)), [1, 1])
    >>> [x.tolist() for x in clients.xs]
    [[[1.0, 2.0, 3.0, 4.0]], [[2.0, 4.0, 1.0, 3.0]]]
    """
    if len(cluster_sizes) > TURNS:
        raise SettingError(f"{len(cluster_sizes)} clusters; a circle has {TURNS} quarter turns")
    images = _squares(pool.x)

    def turned(x: Tensor, cluster: int) -> Tensor:
        return torch.rot90(x.reshape(-1, *images), cluster, (1, 2)).reshape(x.shape)

    return _shifted(pool, cluster_sizes, seed, turned)


def coloured(pool: Pool, cluster_sizes: Sequence[int], seed: int = 0) -> Clients:
    """Deal grey images out equally at random; cluster k paints all of its images in channel k of as many colours.

    After the coloured digits of Arjovsky et al. 2019, arXiv:1907.02893, with the colour a property of the client.

    Parameters
    ----------
    pool
        Grey images, [rows, ...].
    cluster_sizes
        Number of clients in each cluster.
    seed
        Seed of the draws.

    Returns
    -------
    Clients
        Clients with known clusters; rows are flat, [rows, colours * pixels], zero in all channels but the cluster's.

    Examples
    --------
    >>> import torch
    >>> from coterie.data import Pool
    >>> from coterie.data.feature_shift import coloured
    >>> clients = coloured(Pool(torch.ones(2, 2), torch.zeros(2)), [1, 1])
    >>> [x.tolist() for x in clients.xs]
    [[[1.0, 1.0, 0.0, 0.0]], [[0.0, 0.0, 1.0, 1.0]]]
    """
    colours = len(cluster_sizes)

    def painted(x: Tensor, cluster: int) -> Tensor:
        channels = x.new_zeros(len(x), colours, x[0].numel())
        channels[:, cluster] = x.flatten(1)
        return channels.flatten(1)

    return _shifted(pool, cluster_sizes, seed, painted)


def _shifted(
    pool: Pool, cluster_sizes: Sequence[int], seed: int, change: Callable[[Tensor, int], Tensor]
) -> Clients:
    """Deal rows out and let each cluster change its inputs."""
    clients = equal_shares_at_random(pool, cluster_sizes, seed)
    assert clients.clusters is not None
    xs = [change(x, k) for x, k in zip(clients.xs, clients.clusters.tolist(), strict=True)]
    return Clients(xs, clients.ys, clients.names, clients.clusters, clients.cluster_names)


def _squares(x: Tensor) -> tuple[int, int]:
    """Return height and width of square images."""
    if x.dim() == 3 and x.shape[1] == x.shape[2]:
        return x.shape[1], x.shape[2]
    side = math.isqrt(x[0].numel())
    if x.dim() != 2 or side * side != x.shape[1]:
        raise DataError(f"rows of shape {list(x.shape[1:])} are not square images, so they cannot be turned")
    return side, side

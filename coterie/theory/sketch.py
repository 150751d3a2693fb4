"""Which part of a long vector clusters are found in: all of it, a random projection, or the last layer."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie._core.randomness import integers, key, slots

PARTS = ("all", "projection", "last-layer")


def clustered_part(points: Tensor, on: str, last: int, width: int, seed: int) -> Tensor:
    """Return the part [N, p] of vectors that clusters are found in.

    Parameters
    ----------
    points
        Vectors, [N, d].
    on
        One of `PARTS`: "all", "projection" or "last-layer".
    last
        Number of parameters of the last layer.
    width
        Length of a projection.
    seed
        Seed of a projection.

    Returns
    -------
    Tensor
        [N, p].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.sketch import clustered_part
    >>> clustered_part(torch.tensor([[1.0, 2.0, 3.0]]), "last-layer", last=2, width=8, seed=0).tolist()
    [[2.0, 3.0]]
    """
    if on == "projection":
        return project(points, width, seed)
    return points[:, -last:] if on == "last-layer" else points


def project(points: Tensor, width: int, seed: int) -> Tensor:
    """Project [N, d] to [N, width]: add every coordinate, with a random sign, to a random bucket (CountSketch).

    Charikar, Chen, Farach-Colton (2002): inner products are kept in expectation, with variance below
    2 |x|^2 |y|^2 / width. The cost is N d, and no matrix is stored.

    Parameters
    ----------
    points
        Vectors, [N, d].
    width
        Number of buckets; vectors that are no longer than this stay as they are.
    seed
        Seed of signs and buckets.

    Returns
    -------
    Tensor
        [N, width], or the points themselves.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.sketch import project
    >>> project(torch.ones(3, 1000), width=64, seed=0).shape
    torch.Size([3, 64])
    """
    d = points.shape[1]
    if d <= width:
        return points
    place, sign = slots(key(seed, "projection", torch.arange(d, device=points.device)), 2).unbind(-1)
    signed = points * (2 * integers(sign, 2) - 1).to(points.dtype)
    return points.new_zeros(len(points), width).index_add_(1, integers(place, width), signed)

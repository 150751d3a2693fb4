"""What of a long vector is looked at for clustering: all of it, a random projection, or the last layer."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.federation.randomness import integers, key, slots
from coterie.models.base import Model

PARTS = ("all", "projection", "last-layer")


def clustered_part(points: Tensor, on: str, model: Model, width: int, seed: int) -> Tensor:
    """The part [N, p] of vectors [N, d] that clusters are found in."""
    if on == "projection":
        return project(points, width, seed)
    return points[:, -last_layer(model) :] if on == "last-layer" else points


def project(points: Tensor, width: int, seed: int) -> Tensor:
    """[N, d] to [N, width]: every coordinate is added, with a random sign, to a random bucket (CountSketch).

    Charikar, Chen, Farach-Colton (2002): inner products are kept in expectation, with variance below
    2 |x|^2 |y|^2 / width. Costs N d and no matrix; vectors that are no longer than `width` stay as they are.
    """
    d = points.shape[1]
    if d <= width:
        return points
    place, sign = slots(key(seed, "projection", torch.arange(d, device=points.device)), 2).unbind(-1)
    signed = points * (2 * integers(sign, 2) - 1).to(points.dtype)
    return points.new_zeros(len(points), width).index_add_(1, integers(place, width), signed)


def last_layer(model: Model) -> int:
    """How many of a model's last parameters belong to its last layer (weight and bias); all for a linear one."""
    skeleton = getattr(model, "skeleton", None)
    if skeleton is None:
        return model.d
    owner = [name.rpartition(".")[0] for name in skeleton.names]
    return sum(size for name, size in zip(owner, skeleton.sizes, strict=True) if name == owner[-1])

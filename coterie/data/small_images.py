"""Images made small, for experiments that are to take minutes on a laptop."""

from __future__ import annotations

from pathlib import Path

from torch.nn import functional

from coterie.data.clients import Pool
from coterie.data.images import idx
from coterie.errors import SettingError


def small_idx(images: str | Path, labels: str | Path, side: int = 8) -> Pool:
    """Images of a pair of idx files averaged over the cells of a side x side grid, as rows of side^2 numbers."""
    pool = idx(images, labels)
    if not 1 <= side <= min(pool.x.shape[2:]):
        raise SettingError(f"side={side}; the images are {pool.x.shape[2]} x {pool.x.shape[3]}")
    return Pool(functional.adaptive_avg_pool2d(pool.x, side).flatten(1), pool.y, pool.class_names)

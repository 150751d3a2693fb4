"""Images made small, for experiments that take minutes on a laptop."""

from __future__ import annotations

from pathlib import Path

from torch.nn import functional

from coterie._core.errors import SettingError
from coterie.data.clients import Pool
from coterie.data.images import idx


def small_idx(images: str | Path, labels: str | Path, side: int = 8) -> Pool:
    """Read a pair of idx files and average each image over the cells of a `side` x `side` grid.

    Parameters
    ----------
    images
        The file of images, plain or .gz.
    labels
        The file of labels, plain or .gz.
    side
        Cells per side, at most the height and width of the images.

    Returns
    -------
    Pool
        Rows of side^2 numbers in 0..1, and labels as int64.
    """
    pool = idx(images, labels)
    if not 1 <= side <= min(pool.x.shape[2:]):
        raise SettingError(f"side={side}; the images are {pool.x.shape[2]} x {pool.x.shape[3]}")
    return Pool(functional.adaptive_avg_pool2d(pool.x, side).flatten(1), pool.y, pool.class_names)

"""Images made small, for experiments that take minutes on a laptop."""

from __future__ import annotations

from pathlib import Path

import torch
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


def digits() -> Pool:
    """Read the 1,797 handwritten digits of scikit-learn: 8 x 8 pixels in 0..1, classes 0..9.

    Returns
    -------
    Pool
        Rows of 64 numbers, and labels as int64.
    """
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return Pool(torch.from_numpy(x / 16.0), torch.from_numpy(y).long(), [str(digit) for digit in range(10)])

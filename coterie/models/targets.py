"""Checks of the targets, shared by all models: numbers for regression, 0..C-1 for classes."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie._core.errors import DataError


def check_column(y: Tensor) -> None:
    """Raise an error unless targets are one finite number per row."""
    if y.dim() != 1:
        raise DataError(f"The targets have shape {tuple(y.shape)}; give one number per row, shape [rows].")
    if y.numel() == 0:
        raise DataError("There are no rows to learn from.")
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        row = int((~torch.isfinite(y)).nonzero()[0])
        raise DataError(f"Target of row {row} is {y[row].item()}; drop such rows or fill in a number.")


def count_classes(y: Tensor, classes: int | None = None) -> int:
    """Return the number of classes C of labels 0..C-1, or `classes` if given; raise an error for labels outside."""
    check_column(y)
    if y.is_floating_point() and not bool((y == y.round()).all()):
        row = int((y != y.round()).nonzero()[0])
        raise DataError(
            f"Label of row {row} is {y[row].item():g}, which is no class number. "
            "Number the classes 0, 1, 2, ...; for numeric targets use models.linear()."
        )
    smallest, largest = int(y.min()), int(y.max())
    if smallest < 0:
        remedy = "map -1 to 0" if (smallest, largest) == (-1, 1) else "number the classes 0, 1, 2, ..."
        raise DataError(f"Label {smallest} is negative; {remedy}.")
    if classes is not None and largest >= classes:
        raise DataError(
            f"Label {largest} lies outside 0..{classes - 1}; the model was given classes={classes}."
        )
    return classes if classes is not None else largest + 1

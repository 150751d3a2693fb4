"""Fast path: sums over rows (X'X, X'y) that replace the rows of least squares."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.data.rows import Rows
from coterie.models.base import Model

MOST_ELEMENTS = 1 << 27  # largest X'X of all clients worth holding

Statistics = tuple[Tensor, ...]
"""X'X [n, d, d], X'y [n, d] and y'y [n, 1], weighted as the loss is."""


def supports(model: Model, rows: Rows) -> bool:
    """Return True if the model has such sums and they take less memory than the rows."""
    if not model.has_statistics:
        return False
    d, clients = model.d, len(rows)
    return clients * d * d <= MOST_ELEMENTS and clients * d <= 4 * len(rows.x)


def run(model: Model, rows: Rows) -> Statistics:
    """Return the sums of all clients."""
    dtype, device = rows.x.dtype, rows.x.device
    parts = [
        torch.zeros(len(rows), *shape, dtype=dtype, device=device)
        for shape in ((model.d, model.d), (model.d,), (1,))
    ]
    for place, batch in rows.full(None):
        size = rows.size if place is None else rows.size[place]
        weight = batch.weight if model.reduction == "mean" else batch.weight * size.unsqueeze(-1)
        for whole, part in zip(parts, model.statistics(batch.x, batch.y, weight), strict=True):
            whole[slice(None) if place is None else place] = part
    return tuple(parts)

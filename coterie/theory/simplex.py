"""Euclidean projection on the probability simplex."""

from __future__ import annotations

import torch
from torch import Tensor


def onto_simplex(rows: Tensor) -> Tensor:
    """Project every row on the probability simplex {w >= 0, sum w = 1}, exactly (Held, Wolfe, Crowder 1974).

    Parameters
    ----------
    rows
        Points, [..., n].

    Returns
    -------
    Tensor
        The nearest point of the simplex to each, [..., n].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.simplex import onto_simplex
    >>> onto_simplex(torch.tensor([[0.5, 0.5, 0.5], [2.0, 0.0, -1.0]], dtype=torch.float64))
    tensor([[0.3333, 0.3333, 0.3333],
            [1.0000, 0.0000, 0.0000]], dtype=torch.float64)
    """
    ordered = rows.sort(-1, descending=True).values
    count = torch.arange(1, rows.shape[-1] + 1, dtype=rows.dtype, device=rows.device)
    level = (ordered.cumsum(-1) - 1) / count
    support = (ordered > level).sum(-1, keepdim=True).clamp(min=1)
    return (rows - level.gather(-1, support - 1)).clamp(min=0)

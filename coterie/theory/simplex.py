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


def best_mixtures(means: Tensor, variances: Tensor, steps: int = 500, start: Tensor | None = None) -> Tensor:
    """Return for each client the mixture of all clients with the least error as an estimate of its own mean.

    Row i minimises sum_j a_j^2 variances_j + |sum_j a_j means_j - means_i|^2 over the simplex, by accelerated projected
    gradients (Beck, Teboulle 2009) that begin anew where they turn round (O'Donoghue, Candes 2015), in float64: the
    first term is the variance of the mixture, the second its squared bias.

    Parameters
    ----------
    means
        What each client is described by, [n, m].
    variances
        Variance of each estimate, [n].
    steps
        At most so many gradient steps; they end when no weight moves by 1e-9.
    start
        Weights to begin with, [n, n], such as those of similar means; every client's own mean if not given.

    Returns
    -------
    Tensor
        Weights, [n, n].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.simplex import best_mixtures
    >>> means = torch.tensor([[0.0], [0.0], [9.0]], dtype=torch.float64)
    >>> best_mixtures(means, torch.ones(3, dtype=torch.float64)).round(decimals=1).tolist()
    [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    """
    gram, spread = (means @ means.mT).double(), variances.double()
    curvature = torch.linalg.eigvalsh(gram)[-1] + spread.max()
    a = point = (
        torch.eye(len(means), dtype=gram.dtype, device=gram.device) if start is None else start.double()
    )
    speed = torch.ones_like(a[:, :1])
    for _ in range(steps if float(curvature) > 0 else 0):
        slope = point * spread + point @ gram - gram
        moved = onto_simplex(point - slope / curvature)
        change = moved - a
        turned = ((point - moved) * change).sum(-1, keepdim=True) > 0
        speed = torch.where(turned, 1.0, speed)
        faster = (1 + (1 + 4 * speed**2).sqrt()) / 2
        point, a, speed = moved + (speed - 1) / faster * change, moved, faster
        if float(change.abs().max()) < 1e-9:
            break
    return a.to(means.dtype)

"""Search for the minimum of a smooth function of few numbers whose values are costly and come without derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_STEP, _WIDE = 2e-2, 0.1  # of first and second differences, in logarithms of variances
_LOWEST, _HIGHEST = -12.0, 8.0


def minimum(function: Callable[[Tensor], float], start: Tensor) -> tuple[Tensor, float, Tensor]:
    """Return the point with the smallest value, that value, and half the second derivative there.

    Parameters
    ----------
    function
        The function, of logarithms of variances.
    start
        Where to begin, [k].

    Returns
    -------
    tuple of Tensor, float and Tensor
        The point [k], the value, and the information [k, k].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.laplace import minimum
    >>> def bowl(point):
    ...     return float((point - torch.tensor([1.0, -2.0])).square().sum())
    >>> point, value, information = minimum(bowl, torch.zeros(2).double())
    >>> [round(number, 3) for number in point.tolist()], round(information[0, 0].item(), 2)
    ([1.0, -2.0], 1.0)
    """
    from scipy.optimize import minimize

    def both(point: Any) -> tuple[float, Any]:
        here = torch.tensor(point, dtype=torch.float64)
        slope = [
            (function(here + move) - function(here - move)) / (2 * _STEP)
            for move in _STEP * torch.eye(len(here), dtype=torch.float64)
        ]
        return function(here), torch.tensor(slope).numpy()

    found = minimize(
        both,
        start.numpy(),
        jac=True,
        method="L-BFGS-B",
        bounds=[(_LOWEST, _HIGHEST)] * len(start),
        options={"ftol": 1e-7, "gtol": 1e-2},
    )
    point, value = torch.tensor(found.x, dtype=torch.float64), float(found.fun)
    slope, bent = _quadratic(function, point, value)
    inside = ((point > _LOWEST + 1) & (bent.diagonal() > 1e-6)).nonzero().squeeze(-1)
    move = torch.linalg.lstsq(bent[inside[:, None], inside], -slope[inside].unsqueeze(-1)).solution.squeeze(
        -1
    )
    there = point.index_add(0, inside, move.clamp(-0.5, 0.5))
    lower = function(there)
    kept = torch.zeros_like(bent)
    kept[inside[:, None], inside] = 0.5 * bent[inside[:, None], inside]
    return (there, lower, kept) if lower < value else (point, value, kept)


def _quadratic(function: Callable[[Tensor], float], point: Tensor, value: float) -> tuple[Tensor, Tensor]:
    """Return first and second derivatives by differences."""
    count, moves = len(point), _WIDE * torch.eye(len(point), dtype=torch.float64)
    up, down = ([function(point + sign * move) for move in moves] for sign in (1.0, -1.0))
    slope = torch.tensor([(a - b) / (2 * _WIDE) for a, b in zip(up, down, strict=True)], dtype=torch.float64)
    bent = torch.diag(
        torch.tensor([(a + b - 2 * value) / _WIDE**2 for a, b in zip(up, down, strict=True)]).double()
    )
    for i in range(count):
        for j in range(i):
            corner = function(point + moves[i] + moves[j])
            bent[i, j] = bent[j, i] = (corner - up[i] - up[j] + value) / _WIDE**2
    return slope, bent

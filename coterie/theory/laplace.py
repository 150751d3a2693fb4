"""Search for the minimum of a smooth function of few numbers whose values are costly and come without derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_STEP = 2e-2  # of differences, in logarithms of variances
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

    def value(point: Any) -> float:
        return function(torch.tensor(point, dtype=torch.float64))

    def slope(point: Any) -> Any:
        return _slope(function, torch.tensor(point, dtype=torch.float64)).numpy()

    found = minimize(
        value,
        start.numpy(),
        jac=slope,
        method="L-BFGS-B",
        bounds=[(_LOWEST, _HIGHEST)] * len(start),
        options={"ftol": 1e-9, "gtol": 1e-3},
    )
    best = torch.tensor(found.x, dtype=torch.float64)
    return best, float(found.fun), _information(function, best)


def _slope(function: Callable[[Tensor], float], point: Tensor) -> Tensor:
    """Return central differences."""
    moves = _STEP * torch.eye(len(point), dtype=torch.float64)
    return torch.tensor(
        [(function(point + move) - function(point - move)) / (2 * _STEP) for move in moves], dtype=torch.float64
    )


def _information(function: Callable[[Tensor], float], point: Tensor) -> Tensor:
    """Return half the second derivative by differences."""
    moves = 0.1 * torch.eye(len(point), dtype=torch.float64)
    rows = [(_slope(function, point + move) - _slope(function, point - move)) / 0.2 for move in moves]
    return 0.25 * (torch.stack(rows) + torch.stack(rows).mT)

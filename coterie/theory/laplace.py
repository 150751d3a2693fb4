"""Search for the minimum of a smooth function of few numbers whose values are costly and come without derivatives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_STEP, _WIDE = 2e-2, 0.1  # of first and second differences, in logarithms of variances
_LOWEST, _HIGHEST = -12.0, 8.0
_LONGEST = 2.0  # of a step, in any coordinate
_MOST_STEPS, _HALVINGS = 60, 12
_CLOSE = 1e-4  # decrease that a step promises which ends the search
_LEAST_CURVATURE = 0.1


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
    point, value = descend(function, start)
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


def descend(function: Callable[[Tensor], float], start: Tensor) -> tuple[Tensor, float]:
    """Return a point near the minimum and the value there, by BFGS from differences.

    Parameters
    ----------
    function
        The function, of logarithms of variances.
    start
        Where to begin, [k].

    Returns
    -------
    tuple of Tensor and float
        The point [k], and a value less than 1e-4 above the smallest.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.laplace import descend
    >>> point, value = descend(lambda at: float((at - 1).square().sum()), torch.zeros(2).double())
    >>> [round(number, 2) for number in point.tolist()], value < 1e-4
    ([1.0, 1.0], True)
    """
    point = start.double().clamp(_LOWEST, _HIGHEST)
    value = function(point)
    slope, curved = _slopes(function, point, value)
    matrix = torch.diag(curved.clamp(min=_LEAST_CURVATURE))
    for _ in range(_MOST_STEPS):
        blocked = ((point <= _LOWEST) & (slope > 0)) | ((point >= _HIGHEST) & (slope < 0))
        free = (~blocked).nonzero().squeeze(-1)
        step = torch.zeros_like(point)
        step[free] = -torch.linalg.solve(matrix[free[:, None], free], slope[free])
        step = step * min(1.0, _LONGEST / max(float(step.abs().max()), 1e-300))
        promise = -float(slope @ step)
        if promise < _CLOSE:
            break
        for halvings in range(_HALVINGS):
            there = (point + 0.5**halvings * step).clamp(_LOWEST, _HIGHEST)
            lower = function(there)
            if lower < value - 1e-4 * 0.5**halvings * promise:
                break
        else:
            break
        before, moved = slope, there - point
        point, value = there, lower
        slope, _ = _slopes(function, point, value)
        turn = slope - before
        if float(moved @ turn) > 1e-8 * float(moved @ moved):
            pushed = matrix @ moved
            matrix = (
                matrix
                - torch.outer(pushed, pushed) / (moved @ pushed)
                + torch.outer(turn, turn) / (moved @ turn)
            )
    return point, value


def _slopes(function: Callable[[Tensor], float], point: Tensor, value: float) -> tuple[Tensor, Tensor]:
    """Return first derivatives, and second ones in each coordinate, by central differences."""
    moves = _STEP * torch.eye(len(point), dtype=torch.float64)
    pairs = [[function(point + move), function(point - move)] for move in moves]
    ends = torch.tensor(pairs, dtype=torch.float64).view(-1, 2)
    return (ends[:, 0] - ends[:, 1]) / (2 * _STEP), (ends.sum(1) - 2 * value) / _STEP**2


def _quadratic(function: Callable[[Tensor], float], point: Tensor, value: float) -> tuple[Tensor, Tensor]:
    """Return first and second derivatives by differences."""
    count, moves = len(point), _WIDE * torch.eye(len(point), dtype=torch.float64)
    up, down = ([function(point + sign * move) for move in moves] for sign in (1.0, -1.0))
    slope = torch.tensor([(a - b) / (2 * _WIDE) for a, b in zip(up, down, strict=True)], dtype=torch.float64)
    twice = [(a + b - 2 * value) / _WIDE**2 for a, b in zip(up, down, strict=True)]
    bent = torch.diag(torch.tensor(twice, dtype=torch.float64))
    for i in range(count):
        for j in range(i):
            corner = function(point + moves[i] + moves[j])
            bent[i, j] = bent[j, i] = (corner - up[i] - up[j] + value) / _WIDE**2
    return slope, bent

"""Search for the variances with the smallest deviance: L-BFGS-B, then Newton steps for the last digits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coterie._core.threads import one_scipy_thread

MOST_SHARPENED = 40  # numbers up to which the second derivative is worth its evaluations
_STEP = 1e-3  # of differences of the slope, in logarithms of variances
_NEWTON_STEPS = 5
_RETURNS = 20  # from trials where a deviance cannot be computed
_SETTLED = 1e-9  # change of a number that ends them

Deviance = Callable[[Tensor], Tensor]


def lowest(
    deviance: Deviance,
    start: Tensor,
    fixed: Mapping[int, float] | None,
    bounds: Sequence[tuple[float, float]],
    steps: int = 15000,
    tolerance: float = 1e-13,
) -> tuple[Tensor, float]:
    """Return the point with the smallest deviance, and that, by L-BFGS-B.

    Parameters
    ----------
    deviance
        Function of a point, which autograd differentiates.
    start
        Where the search begins, [p].
    fixed
        Numbers of the point that are kept as given, by place.
    bounds
        Least and largest value of each number.
    steps
        Most steps.
    tolerance
        Relative decrease that ends the search.

    Returns
    -------
    tuple of Tensor and float
        The point, and its deviance.

    Examples
    --------
    >>> point, value = lowest(lambda x: ((x - 3) ** 2).sum(), torch.zeros(2).double(), {1: 5.0}, [(-9.0, 9.0)] * 2)
    >>> point.round(decimals=3).tolist(), round(value, 3)
    ([3.0, 5.0], 4.0)
    """
    from scipy.optimize import minimize

    fixed = fixed or {}
    free = torch.tensor([k for k in range(len(start)) if k not in fixed], dtype=torch.long)
    base = start.clone()
    for place, value in fixed.items():
        base[place] = value

    trial = here = base[free].numpy()

    def objective(values: Any) -> tuple[float, Any]:
        nonlocal trial, here
        trial = values.copy()
        part = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        value = deviance(base.index_copy(0, free, part))
        value.backward()
        assert part.grad is not None
        here = trial
        return float(value.detach()), part.grad.nan_to_num().numpy()

    limits = wide = [bounds[k] for k in free]
    before = float("inf")
    for tries in range(_RETURNS + 1):
        try:
            with one_scipy_thread():
                found = minimize(
                    objective,
                    here,
                    jac=True,
                    method="L-BFGS-B",
                    bounds=limits,
                    options={"ftol": tolerance, "maxiter": steps},
                )
            if limits == wide or not found.fun < before - 1e-6:
                break
            limits, here, before = wide, found.x, float(found.fun)  # and on from there
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # singular so far off: stay nearer
            if tries == _RETURNS:
                raise
            reach = [max(0.5 * abs(float(far - near)), 1e-3) for far, near in zip(trial, here, strict=True)]
            limits = [
                (max(low, float(near) - room), min(high, float(near) + room))
                for (low, high), near, room in zip(limits, here, reach, strict=True)
            ]
    return base.index_copy(0, free, torch.tensor(found.x)), float(found.fun)


def slope_of(deviance: Deviance, point: Tensor) -> Tensor:
    """Return the derivative of a deviance.

    Parameters
    ----------
    deviance
        Function of a point, which autograd differentiates.
    point
        Where, [p].

    Returns
    -------
    Tensor
        [p]; 0 where it is not a number.

    Examples
    --------
    >>> slope_of(lambda x: (x**2).sum(), torch.tensor([1.0, 3.0])).tolist()
    [2.0, 6.0]
    """
    point = point.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(deviance(point), point)
    return found.nan_to_num()


def information_of(deviance: Deviance, point: Tensor, free: Sequence[int]) -> Tensor:
    """Return half the second derivative of a deviance, by differences of its slope.

    Parameters
    ----------
    deviance
        Function of a point, which autograd differentiates.
    point
        Where, [p].
    free
        Numbers of the point that vary; rows and columns of the others are 0.

    Returns
    -------
    Tensor
        [p, p].

    Examples
    --------
    >>> information_of(lambda x: 3 * (x**2).sum(), torch.zeros(2).double(), [1]).round(decimals=4).tolist()
    [[0.0, 0.0], [0.0, 3.0]]
    """
    found = torch.zeros(len(point), len(point), dtype=torch.float64)
    for k in free:
        move = torch.zeros_like(point)
        move[k] = _STEP
        found[k] = (slope_of(deviance, point + move) - slope_of(deviance, point - move)) / (4 * _STEP)
    kept, at = torch.zeros_like(found), torch.tensor(list(free), dtype=torch.long)
    kept[at[:, None], at] = (0.5 * (found + found.mT))[at[:, None], at]
    return kept


def sharpened(deviance: Deviance, point: Tensor, free: Sequence[int]) -> Tensor:
    """Return a point after Newton steps with one second derivative, since L-BFGS leaves the fifth digit undecided.

    Parameters
    ----------
    deviance
        Function of a point, which autograd differentiates.
    point
        Near the minimum, [p].
    free
        Numbers of the point that vary.

    Returns
    -------
    Tensor
        The point with the smaller deviance, [p].

    Examples
    --------
    >>> point = sharpened(lambda x: x[0].exp() - x[0], torch.tensor([0.01]).double(), [0])
    >>> abs(point.item()) < 1e-8
    True
    """
    if not 0 < len(free) <= MOST_SHARPENED:
        return point
    at = torch.tensor(list(free), dtype=torch.long)
    bent = 2 * information_of(deviance, point, free)[at[:, None], at]
    values, vectors = torch.linalg.eigh(bent)
    if not bool(values[0] > 1e-9 * values[-1]):
        return point
    inverse, best = vectors @ torch.diag(1 / values) @ vectors.mT, float(deviance(point))
    for _ in range(_NEWTON_STEPS):
        move = -inverse @ slope_of(deviance, point)[at]
        there = point.index_add(0, at, move)
        value = float(deviance(there))
        if not value <= best + 1e-9 * (1 + abs(best)):
            break
        point, best = there, min(value, best)
        if float(move.abs().max()) < _SETTLED:
            break
    return point

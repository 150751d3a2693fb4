"""Rules that integrate against the standard normal density in a few dimensions."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from coterie._core.errors import SettingError

POINTS = {
    1: 9,
    2: 7,
    3: 5,
    4: 4,
}  # Gauss-Hermite points per dimension; more dimensions take evenly spread points
MOST_DIMENSIONS = 16
_SPREAD = 256  # points in more than four dimensions
_WIDTH = 1.15  # by how much they reach further than the normal density, whose tails are too thin


@dataclass(frozen=True)
class QuadratureRule:
    """Points and weights with sum_k weight_k f(point_k) close to the mean of f under the standard normal density.

    Parameters
    ----------
    points
        [K, q].
    weights
        Positive, [K].

    Examples
    --------
    >>> from coterie.theory.quadrature import rule
    >>> normal = rule(1)
    >>> round(float((normal.weights * normal.points[:, 0] ** 4).sum()), 6)
    3.0
    """

    points: Tensor
    weights: Tensor


@functools.cache
def rule(q: int, points: int | None = None) -> QuadratureRule:
    """Return a rule for q dimensions.

    Up to four dimensions it is a product of Gauss-Hermite rules. From five on it is importance sampling with 256 evenly
    spread points (a Kronecker sequence and its mirror image) from a normal density that is a little too wide.

    Parameters
    ----------
    q
        Number of dimensions, 1 to 16.
    points
        Points per dimension of a product rule, instead of the usual number.

    Returns
    -------
    Rule
        The rule.

    Examples
    --------
    >>> from coterie.theory.quadrature import rule
    >>> [len(rule(q).weights) for q in (1, 2, 3, 4, 5)]
    [9, 49, 125, 256, 256]
    """
    if not 1 <= q <= MOST_DIMENSIONS:
        raise SettingError(f"{q} random effects: quadrature takes 1 to {MOST_DIMENSIONS}")
    if points is not None or q in POINTS:
        nodes, weights = np.polynomial.hermite_e.hermegauss(points or POINTS[q])
        weights = weights / weights.sum()
        grid = torch.tensor(list(product(nodes.tolist(), repeat=q)), dtype=torch.float64)
        mass = torch.tensor(list(product(weights.tolist(), repeat=q)), dtype=torch.float64).prod(-1)
        return QuadratureRule(grid, mass)
    half = normal_points(_SPREAD // 2, q)
    places = torch.cat([half, -half])
    thinned = torch.exp(-0.5 * (_WIDTH**2 - 1) * places.square().sum(-1))
    return QuadratureRule(_WIDTH * places, thinned / thinned.sum())


def normal_points(count: int, q: int) -> Tensor:
    """Return evenly spread points of the standard normal density, [count, q], the same on every machine.

    The k-th is the normal quantile of the fractional parts of k / g^j, where g solves g^(q+1) = g + 1 (Roberts 2018).

    Parameters
    ----------
    count
        Number of points.
    q
        Number of dimensions.

    Returns
    -------
    Tensor
        float64 [count, q].

    Examples
    --------
    >>> from coterie.theory.quadrature import normal_points
    >>> normal_points(1000, 2).std(0).round(decimals=1).tolist()
    [1.0, 1.0]
    """
    golden = 2.0
    for _ in range(64):
        golden = (1 + golden) ** (1 / (q + 1))
    steps = golden ** -torch.arange(1, q + 1, dtype=torch.float64)
    even = (0.5 + torch.arange(1, count + 1, dtype=torch.float64).unsqueeze(-1) * steps) % 1.0
    points: Tensor = torch.special.ndtri(even.clamp(1e-9, 1 - 1e-9))
    return points

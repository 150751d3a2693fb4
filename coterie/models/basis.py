"""Functions of the features that a linear model takes instead: every method for linear models then fits curves.

A basis needs nothing but the standardised columns of a table: its knots and frequencies are fixed in these units, so no
client sends more than the means and spreads that every model needs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from coterie._core import randomness
from coterie._core.errors import SettingError

KNOTS = 6  # of a column's smooth function
SMOOTHNESS = 0.02  # of a curve: its penalty is that of a slope times this
WAVES = 100  # random Fourier features


@dataclass(frozen=True)
class Basis:
    """Columns that are computed from the features: these themselves, and functions of them.

    Attributes
    ----------
    kind : str
        'splines': a smooth function of each number. 'rff': waves in all features, a kernel in disguise.
    levels : tuple of int
        Levels of each feature; one with levels is an indicator, which has no curve. Empty: all are numbers.
    """

    kind: str
    levels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("splines", "rff"):
            raise SettingError(f"no basis {self.kind!r}; there are 'splines' and 'rff'")

    def with_levels(self, levels: Sequence[int]) -> Self:
        """Return a copy that knows which features are indicators."""
        return replace(self, levels=tuple(levels))

    def numbers(self, features: int) -> list[int]:
        """Return which of the features are numbers."""
        return [k for k in range(features) if not (self.levels and self.levels[k])]

    def width(self, features: int) -> int:
        """Return the number of columns for so many features."""
        added = (KNOTS - 1) * len(self.numbers(features)) if self.kind == "splines" else WAVES
        return features + added

    def names(self, features: Sequence[str]) -> list[str]:
        """Return a name for each column, such as 'age' and 'age, curve 2'."""
        if self.kind == "rff":
            return [*features, *(f"wave {k + 1}" for k in range(WAVES))]
        curves = [(features[k], j) for k in self.numbers(len(features)) for j in range(KNOTS - 1)]
        return [*features, *(f"{name}, curve {j + 1}" for name, j in curves)]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the columns [..., width] for features [..., features]."""
        added = smooth(x[..., self.numbers(x.shape[-1])]) if self.kind == "splines" else waves(x)
        return torch.cat([x, added], -1)


def smooth(x: Tensor) -> Tensor:
    """Return functions of each standardised number, [..., 5 * numbers], whose ridge penalty is that of a cubic spline.

    With u = Phi(x), the normal distribution function, the columns are R(u, knots) S^(-1/2) for S = R(knots, knots)
    without its smallest eigenvalue, where R is the kernel of cubic splines (Gu 2002), divided by sqrt(0.02): a curve
    with coefficients c has |c|^2 = 0.02 times the integral of its squared second derivative in u, which is what
    smoothing splines penalise. Straight lines have none: they are the features themselves.

    Examples
    --------
    >>> smooth(torch.zeros(4, 3)).shape
    torch.Size([4, 15])
    """
    knots, root = (torch.from_numpy(part).to(x) for part in _spline())
    u = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return (_kernel(u.unsqueeze(-1), knots) @ root).flatten(-2)


@functools.cache
def _spline() -> tuple[np.ndarray, np.ndarray]:
    """Return the knots and S^(-1/2), as arrays so that exported graphs hold them as numbers."""
    knots = (torch.arange(KNOTS, dtype=torch.float64) + 0.5) / KNOTS
    values, vectors = torch.linalg.eigh(_kernel(knots.unsqueeze(1), knots))
    return knots.numpy(), (vectors[:, 1:] / values[1:].sqrt() / math.sqrt(SMOOTHNESS)).numpy()


def _kernel(u: Tensor, z: Tensor) -> Tensor:
    """Return the reproducing kernel of functions on [0, 1] by their squared second derivative, without lines."""
    a = (u - z).abs() - 0.5
    first = ((u - 0.5).square() - 1 / 12) * ((z - 0.5).square() - 1 / 12) / 4
    return first - (a**4 - a.square() / 2 + 7 / 240) / 24


def waves(x: Tensor) -> Tensor:
    """Return random Fourier features [..., 100] of a Gaussian kernel (Rahimi and Recht, NIPS 2007).

    sqrt(2/100) cos(w'x + b) with w normal of variance 1/(number of features), the same on every machine.

    Examples
    --------
    >>> waves(torch.zeros(4, 3)).shape
    torch.Size([4, 100])
    """
    frequency, phase = (torch.from_numpy(part).to(x) for part in _drawn(x.shape[-1]))
    return math.sqrt(2 / WAVES) * torch.cos(x @ frequency.mT + phase)


@functools.cache
def _drawn(features: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the frequencies [100, features] and phases [100]."""
    keys = randomness.key(0, "wave", torch.arange(WAVES * features))
    frequency = randomness.normal(keys).view(WAVES, features) / math.sqrt(features)
    phase = 2 * math.pi * randomness.uniform(randomness.key(0, "phase", torch.arange(WAVES)))
    return frequency.numpy(), phase.numpy()

"""Limits of ridge regression around a centre, as features and rows grow together: bias, variance, best penalty.

`coterie.theory.risk` says what the letters stand for, and makes risks of estimators of these terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie._core.errors import SettingError
from coterie.theory.spectrum import IDENTITY, Array, Spectrum


@dataclass(frozen=True)
class Risk:
    """Expected squared error of predictions beyond the noise.

    Parameters
    ----------
    bias
        The part that heterogeneity causes, a number or an array.
    variance
        The part that noise causes.

    Examples
    --------
    >>> from coterie.theory.ridge_limits import Risk
    >>> Risk(0.5, 0.25).risk
    0.75
    """

    bias: Any
    variance: Any

    @property
    def risk(self) -> Any:
        """Bias plus variance."""
        return self.bias + self.variance


def optimal_lambda(*, gamma: Any, r2: Any, sigma2: Any, spectrum: Any = None) -> Any:
    """Return the ridge penalty of smallest risk around a centre at squared distance r2.

    It is sigma2 gamma / r2 for every covariance while the deviation has no preferred direction; golden section finds it
    otherwise.

    Parameters
    ----------
    gamma
        Features per row.
    r2
        Squared distance of the clients' parameters from the centre.
    sigma2
        Variance of the noise.
    spectrum
        Covariance of the features, by default the identity.

    Returns
    -------
    float or array
        The penalty.

    Examples
    --------
    >>> from coterie.theory import ridge_limits
    >>> ridge_limits.optimal_lambda(gamma=2.0, r2=1.0, sigma2=0.25)
    0.5
    """
    gamma, r2, sigma2 = numbers(gamma=gamma, r2=r2, sigma2=sigma2)
    sigma = spectrum_of(spectrum)
    with np.errstate(divide="ignore", invalid="ignore"):
        isotropic = np.where(r2 > 0, sigma2 * gamma / r2, np.inf)
    if sigma.signal is None or sigma.is_identity():
        return plain(isotropic)

    def height(u: Array) -> Array:
        bias, variance = ridge_factors(sigma, gamma, np.exp(u))
        found: Array = r2 * bias + sigma2 * variance
        return found

    middle = np.log(np.where(np.isfinite(isotropic) & (isotropic > 0), isotropic, 1.0))
    best = np.exp(golden(height, middle - 12, middle + 12))
    return plain(np.where((r2 > 0) & (sigma2 > 0), best, isotropic))


def ridge_factors(sigma: Spectrum, gamma: Array, lam: Array) -> tuple[Array, Array]:
    """Return bias per r2 and variance per sigma2 of ridge around a centre."""
    gamma, lam = np.broadcast_arrays(gamma, lam)
    passed = passed_on(sigma, gamma, lam)
    v = np.asarray(sigma.companion(gamma, lam))
    finite = np.where(np.isfinite(v) & (v > 0), v, 1.0)[..., None]
    t = 1 / (1 + sigma.values * finite)
    derivative = lam + gamma * ((sigma.values * t * t) @ sigma.weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = gamma * ((sigma.values * t) ** 2 @ sigma.weights) * finite[..., 0] / derivative
        taken = gamma * sigma.rank
        least_squares = np.where(taken < 1, taken / (1 - taken), np.inf)
    variance = np.where(np.isinf(v), least_squares, np.where(np.isinf(lam), 0.0, variance))
    return passed @ sigma.signal_weights, variance


def passed_on(sigma: Spectrum, gamma: Array, lam: Array) -> Array:
    """Return (v'/v^2) s / (1 + s v)^2 for every eigenvalue: the error that an error of the centre there leaves."""
    gamma, lam = np.broadcast_arrays(gamma, lam)
    v = np.asarray(sigma.companion(gamma, lam))
    finite = np.where(np.isfinite(v), v, 1.0)[..., None]
    t = 1 / (1 + sigma.values * finite)
    s_t, s_t2 = (sigma.values * t) @ sigma.weights, (sigma.values * t * t) @ sigma.weights
    with np.errstate(invalid="ignore"):
        ratio = np.where(np.isinf(lam), 1.0, (lam + gamma * s_t) / (lam + gamma * s_t2))
    return np.where(np.isinf(v)[..., None], 0.0, ratio[..., None] * sigma.values * t * t)


def golden(height: Any, low: Array, high: Array, steps: int = 80) -> Array:
    """Return the minimiser of a function with one valley, for every entry of the arrays."""
    ratio = (np.sqrt(5) - 1) / 2
    for _ in range(steps):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        down = height(left) < height(right)
        low, high = np.where(down, low, left), np.where(down, right, high)
    return (low + high) / 2


def spectrum_of(given: Any) -> Spectrum:
    """Return the spectrum that is given, or that of the identity."""
    return IDENTITY if given is None else Spectrum.of(given)


def numbers(**given: Any) -> list[Array]:
    """Return the numbers as arrays, checked and broadcast against each other."""
    arrays = {name: np.asarray(value, dtype=float) for name, value in given.items()}
    for name, value in arrays.items():
        positive = name in ("gamma", "clients")
        if not (np.isfinite(value).all() and ((value > 0) if positive else (value >= 0)).all()):
            raise SettingError(f"{name} must be finite and {'above' if positive else 'at least'} 0")
    return [np.array(value) for value in np.broadcast_arrays(*arrays.values())]


def as_risk(bias: Array, variance: Array) -> Risk:
    """Return a `Risk`, of plain numbers where the arrays have no dimensions."""
    return Risk(plain(bias), plain(variance))


def plain(value: Any) -> Any:
    """Return an array without dimensions as a number."""
    value = np.asarray(value)
    return float(value) if value.ndim == 0 else value

"""Eigenvalues of a feature covariance, and what random-matrix theory derives from them.

Part of the theory of Cheng, Chadha, Duchi, "Federated Asymptotics" (2022), with its printed formulas corrected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie._core.errors import SettingError

Array = npt.NDArray[np.float64]
_NEWTON_STEPS = 400
_NODES = 4096


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of a covariance.

    Parameters
    ----------
    values
        The eigenvalues.
    weights
        Their weights, which sum to one.
    signal
        Weights of the squared coordinates of the deviation from the centre along the eigenvectors; by default the
        deviation has no preferred direction.

    Examples
    --------
    >>> from coterie.theory.spectrum import Spectrum
    >>> Spectrum.of([1.0, 3.0]).mean
    2.0
    """

    values: Array
    weights: Array
    signal: Array | None = None

    @classmethod
    def of(cls, values: Any, weights: Any = None, signal: Any = None) -> Spectrum:
        """Return the spectrum of eigenvalues, or a spectrum as it is.

        Parameters
        ----------
        values
            Eigenvalues, none negative, or a `Spectrum`.
        weights
            Their weights, by default equal.
        signal
            Weights of the deviation along the eigenvectors.

        Returns
        -------
        Spectrum
            With weights that sum to one.

        Raises
        ------
        SettingError
            If a number is negative or not finite, or all are zero.
        """
        if isinstance(values, Spectrum):
            return values
        s = np.atleast_1d(np.asarray(values, dtype=float))
        if s.ndim != 1 or not (np.isfinite(s).all() and (s >= 0).all() and s.max() > 0):
            raise SettingError("spectrum must be a list of finite eigenvalues, none negative, not all zero")
        return cls(
            s,
            _shares("weights", np.ones_like(s) if weights is None else weights, s),
            None if signal is None else _shares("signal", signal, s),
        )

    @classmethod
    def from_rows(cls, xs: Any) -> Spectrum:
        """Estimate the spectrum from rows [n, d], or from the rows of several clients, pooled.

        The eigenvalues of X'X/N spread more than the true ones; they are shrunk towards their mean so that the
        second moment is right for normal rows (Ledoit and Wolf, 2004, with a spherical target).

        Parameters
        ----------
        xs
            Rows, or a list of the rows of each client.

        Returns
        -------
        Spectrum
            The estimate.
        """
        parts = xs if isinstance(xs, Sequence) else [xs]
        parts = [np.asarray(part, dtype=float) for part in parts]
        rows, d = sum(len(part) for part in parts), parts[0].shape[1]
        s = np.linalg.eigvalsh(sum(part.T @ part for part in parts) / rows).clip(0.0)
        mean, spread = s.mean(), s.var()
        true = max(0.0, spread - d / rows * mean**2)
        shrink = np.sqrt(true / spread) if spread > 0 else 0.0
        return cls.of(mean + shrink * (s - mean))

    @property
    def mean(self) -> float:
        """Mean eigenvalue."""
        return float(self.values @ self.weights)

    @property
    def rank(self) -> float:
        """Share of eigenvalues that are not zero."""
        return float(self.weights[self.values > 0].sum())

    @property
    def signal_weights(self) -> Array:
        """Weights of the deviation along the eigenvectors."""
        return self.weights if self.signal is None else self.signal

    def is_identity(self) -> bool:
        """Return True if every eigenvalue is one."""
        return bool((self.values == 1.0).all())

    def companion(self, gamma: Array, lam: Array) -> Array:
        """Return v(-lam) > 0 with 1/v = lam + gamma int s/(1 + s v) dH; infinite at lam = 0, gamma <= 1.

        Newton's method on the concave lam v + gamma - 1 - gamma int 1/(1 + s v) dH, from the left, where it is
        monotone; written so that nothing cancels near gamma = 1.

        Parameters
        ----------
        gamma
            Features per row.
        lam
            Ridge penalties, which broadcast against gamma.

        Returns
        -------
        Array
            v for each pair.
        """
        if self.is_identity():
            return _companion_identity(gamma, lam)
        endless = np.isinf(lam)
        gamma, lam = np.broadcast_arrays(gamma, np.where(endless, 1.0, lam))
        solvable = (lam > 0) | (gamma * self.rank > 1)
        v = 1 / (lam + gamma * self.mean)
        for _ in range(_NEWTON_STEPS):
            t = 1 / (1 + self.values * v[..., None])
            height = lam * v + (gamma - 1) - gamma * (t @ self.weights)
            derivative = lam + gamma * ((self.values * t * t) @ self.weights)
            step = np.where(solvable, -height / derivative, 0.0)
            v = v + np.maximum(step, 0.0)
            if (step <= 1e-15 * v).all():
                break
        return np.where(endless, 0.0, np.where(solvable, v, np.inf))

    def transformed(
        self, gamma: float, function: Callable[[Array], Array], pole: float | None = None
    ) -> Array:
        """Return the limit of v'phi(X'X/n) v for the eigenvector v of every eigenvalue, for phi that is 0 at 0.

        By Cauchy's formula on a circle around the spectrum of X'X/n, where v'(z - X'X/n)^-1 v tends to 1/(z (1 + s
        c(z))) with the companion transform c.

        Parameters
        ----------
        gamma
            Features per row.
        function
            phi of complex arrays, analytic around [0, largest eigenvalue].
        pole
            phi may have a singularity at -pole, and has none elsewhere.

        Returns
        -------
        Array
            One number per eigenvalue.

        Examples
        --------
        >>> from coterie.theory.spectrum import Spectrum
        >>> Spectrum.of([0.5, 1.5]).transformed(2.0, lambda s: s).round(6).tolist()
        [0.5, 1.5]
        """
        top = float(self.values.max()) * (1 + np.sqrt(gamma)) ** 2
        room = 0.1 * top if pole is None else min(0.1 * top, 0.5 * pole)
        radius = 0.5 * top + room
        count = int(min(2**17, max(512, 40 * radius / room)))
        turn = np.exp(2j * np.pi * (np.arange(count) + 0.5) / count)
        z = 0.5 * top + radius * turn
        c = self._companion_around(gamma, 0.5 * top, radius * turn)
        inside = radius * turn / count * function(z) / z
        found: Array = (inside[:, None] / (1 + c[:, None] * self.values)).sum(0).real
        return found

    def _companion_around(self, gamma: float, middle: float, offset: Any) -> Any:
        """Return the companion transform outside the spectrum, by Newton's method from far away inwards."""
        c = np.zeros_like(offset)
        for scale in np.geomspace(50.0, 1.0, 40):
            z = middle + scale * offset
            c = -1 / z if scale == 50.0 else c
            for _ in range(3 if scale > 1 else 12):
                t = 1 / (1 + c[:, None] * self.values)
                height = 1 + z * c - gamma * (1 - t @ self.weights)
                c = c - height / (z - gamma * ((self.values * t * t) @ self.weights))
        return c


IDENTITY = Spectrum(np.ones(1), np.ones(1))


def _companion_identity(gamma: Array, lam: Array) -> Array:
    """Return the companion transform in closed form for the identity covariance."""
    a = lam + gamma - 1
    root = np.sqrt(a * a + 4 * lam)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(a > 0, 2 / (a + root), np.where(lam > 0, (root - a) / (2 * lam), np.inf))


def _shares(name: str, given: Any, values: Array) -> Array:
    share = np.asarray(given, dtype=float)
    if share.shape != values.shape or not ((share >= 0).all() and 0 < share.sum() < np.inf):
        raise SettingError(f"{name} must be {len(values)} numbers, none negative, not all zero")
    normalised: Array = share / share.sum()
    return normalised


def marchenko_pastur(gamma: float, function: Callable[[Array], Array], at_zero: float = 0.0) -> float:
    """Return the mean of a function over the d eigenvalues of X'X/n, X ~ N(0, I), d/n = gamma.

    The midpoint rule in the angle t of s = 1 + gamma + 2 sqrt(gamma) cos t converges exponentially and never
    touches the edges.

    Parameters
    ----------
    gamma
        Features per row.
    function
        A function of arrays of eigenvalues.
    at_zero
        Its value on the null space.

    Returns
    -------
    float
        The mean.

    Examples
    --------
    >>> from coterie.theory.spectrum import marchenko_pastur
    >>> round(marchenko_pastur(0.5, lambda s: s), 6), round(marchenko_pastur(0.5, lambda s: s**2), 6)
    (1.0, 1.5)
    """
    if not 0 < gamma < np.inf:
        raise SettingError(f"gamma = {gamma}; it must be positive and finite")
    t = (np.arange(_NODES) + 0.5) * (np.pi / _NODES)
    s = (1 - np.sqrt(gamma)) ** 2 + 4 * np.sqrt(gamma) * np.cos(t / 2) ** 2
    weight = 2 / _NODES * np.sin(t) ** 2 / s
    return float(weight @ function(s)) + at_zero * max(0.0, 1 - 1 / gamma)

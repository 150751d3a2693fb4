"""Risk of tuning around a learned centre: with a ridge, to interpolation, or stopped early; `risk` has estimators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from coterie._core.errors import SettingError
from coterie.theory.learned_centre import Centre, centre_moments
from coterie.theory.ridge_limits import (
    Risk,
    as_risk,
    numbers,
    optimal_lambda,
    passed_on,
    ridge_factors,
    spectrum_of,
)
from coterie.theory.spectrum import Array, Spectrum, marchenko_pastur


def tuned(
    gamma: Any,
    r2: Any,
    sigma2: Any,
    lam: Any,
    spectrum: Any,
    clients: Any,
    method: str,
    local_steps: int,
    local_lr: float,
) -> Risk:
    """Predict ridge around a centre, with the best penalty if none is given."""
    gamma, r2, sigma2 = numbers(gamma=gamma, r2=r2, sigma2=sigma2)
    sigma = spectrum_of(spectrum)
    chosen = optimal_lambda(gamma=gamma, r2=r2, sigma2=sigma2, spectrum=sigma) if lam is None else lam
    centre = Centre(method, chosen if method == "pfedme" else 0.0, local_steps, local_lr)
    return around(sigma, gamma, r2, sigma2, penalty(chosen), clients, centre)


def around(
    sigma: Spectrum, gamma: Array, distance2: Array, sigma2: Array, lam: Array, clients: Any, centre: Centre
) -> Risk:
    """Predict ridge around a centre; lam = 0 interpolates."""
    bias, variance = ridge_factors(sigma, gamma, lam)
    extra = centre_moments(sigma, gamma, distance2, sigma2, clients, centre)
    passed = passed_on(sigma, gamma, lam)
    with np.errstate(invalid="ignore"):
        noise = np.where(sigma2 > 0, sigma2 * variance, 0.0)
    return as_risk(distance2 * bias + (extra[0] * passed).sum(-1), noise + (extra[1] * passed).sum(-1))


def stopped(
    sigma: Spectrum,
    gamma: Array,
    r2: Array,
    sigma2: Array,
    lam: Array,
    clients: Any,
    centre: Centre,
    steps: int | None,
    lr: float | None,
) -> Risk:
    """Predict gradient descent from a centre on the loss with a ridge around it, stopped after some steps."""
    if steps is None or lr is None or not sigma.is_identity():
        raise SettingError("tuning that is stopped needs both steps and lr, and the identity covariance")
    kept, noise = np.empty_like(gamma), np.empty_like(gamma)
    penalties = np.broadcast_to(lam, gamma.shape)
    for at, one in np.ndenumerate(gamma):
        f = functools.partial(_stopped_filter, float(penalties[at]), steps, lr)
        kept[at] = marchenko_pastur(one, functools.partial(_left, f), at_zero=1.0)
        noise[at] = one * marchenko_pastur(one, functools.partial(_taken, f))
    extra = centre_moments(sigma, gamma, r2, sigma2, clients, centre)
    return as_risk((r2 + extra[0].sum(-1)) * kept, sigma2 * noise + extra[1].sum(-1) * kept)


def _stopped_filter(lam: float, steps: int, lr: float, s: Array) -> Array:
    """Return s/(s + lam) (1 - (1 - lr (s + lam))^steps)."""
    found: Array = s / (s + lam) * (1 - (1 - lr * (s + lam)) ** steps)
    return found


def _left(f: Callable[[Array], Array], s: Array) -> Array:
    return (1 - f(s)) ** 2


def _taken(f: Callable[[Array], Array], s: Array) -> Array:
    return f(s) ** 2 / s


def penalty(lam: Any) -> Array:
    """Return the penalty as an array; raise an error if one is negative."""
    value = np.asarray(lam, dtype=float)
    if not (value >= 0).all():
        raise SettingError(f"lam = {lam}; it must not be negative")
    return value

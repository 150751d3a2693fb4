"""Risk of FLIX's mixtures in the linear model of `coterie.theory.risk`, and the mixture of smallest risk.

On least squares FLIX's shared model does not depend on alpha: it is FedAvg's, with a ridge if the clients' losses
have one (l2). With c the shared model and x_i client i's own minimiser, T = alpha c + (1 - alpha) x_i, so the risk is
    alpha^2 |c - th_i|^2 + 2 alpha (1 - alpha) <c - th_i, x_i - th_i> + (1 - alpha)^2 |x_i - th_i|^2
in the norm of predictions. With v the companion transform at -l2, l2 (S + l2)^-1 tends to 1/(1 + s v) along the
eigenvalue s of the covariance, which gives the inner product; the squares are known from ridge regression. This is
not in either paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie._core.errors import SettingError
from coterie.theory.learned_centre import Centre, centre_moments
from coterie.theory.ridge_limits import Risk, as_risk, numbers, passed_on, plain, ridge_factors, spectrum_of
from coterie.theory.spectrum import Array


@dataclass(frozen=True)
class _Parts:
    """Coefficients of alpha^2, 2 alpha (1 - alpha) and (1 - alpha)^2, from heterogeneity and from noise."""

    shared: Array
    shared_noise: Array
    cross: Array
    cross_noise: Array
    own: Array
    own_noise: Array


def flix(
    *,
    gamma: Any,
    r2: Any,
    rho2: Any,
    sigma2: Any,
    alpha: Any = None,
    l2: float = 0.0,
    own: str = "local",
    spectrum: Any = None,
    clients: Any = None,
) -> Risk:
    """Predict the risk of FLIX's mixtures.

    Parameters
    ----------
    gamma
        Features per row.
    r2
        Squared distance of the clients' parameters from the centre.
    rho2
        Squared length of the clients' parameters, at least r2.
    sigma2
        Variance of the noise.
    alpha
        Weight of the shared model, by default the best.
    l2
        Ridge penalty of the clients' losses; 0 interpolates.
    own
        The clients' own models: "local", trained from zero, or "ftfa", tuned from the shared model (l2 = 0).
    spectrum
        Covariance of the features, by default the identity.
    clients
        Number of clients the shared model is learned from, by default infinite.

    Returns
    -------
    Risk
        Bias and variance.

    Examples
    --------
    >>> from coterie.theory import flix_risk
    >>> flix_risk.flix(gamma=2.0, r2=1.0, rho2=2.0, sigma2=0.25, alpha=0.5).risk
    0.8125
    >>> flix_risk.flix(gamma=2.0, r2=1.0, rho2=2.0, sigma2=0.25, alpha=1.0).risk
    1.0
    """
    parts = _parts(gamma, r2, rho2, sigma2, l2, own, spectrum, clients)
    share = _best(parts) if alpha is None else np.asarray(alpha, dtype=float)
    if not ((share >= 0) & (share <= 1)).all():
        raise SettingError(f"alpha = {alpha}; it must be between 0 and 1")
    one, two, three = share**2, 2 * share * (1 - share), (1 - share) ** 2
    with np.errstate(invalid="ignore"):
        noise = np.where(three > 0, three * parts.own_noise, 0.0)
    bias = one * parts.shared + two * parts.cross + three * parts.own
    return as_risk(bias, one * parts.shared_noise + two * parts.cross_noise + noise)


def best_alpha(
    *,
    gamma: Any,
    r2: Any,
    rho2: Any,
    sigma2: Any,
    l2: float = 0.0,
    own: str = "local",
    spectrum: Any = None,
    clients: Any = None,
) -> Any:
    """Return the alpha of smallest risk.

    Parameters
    ----------
    gamma
        Features per row.
    r2
        Squared distance of the clients' parameters from the centre.
    rho2
        Squared length of the clients' parameters, at least r2.
    sigma2
        Variance of the noise.
    l2
        Ridge penalty of the clients' losses; 0 interpolates.
    own
        The clients' own models, as in `flix`.
    spectrum
        Covariance of the features, by default the identity.
    clients
        Number of clients the shared model is learned from, by default infinite.

    Returns
    -------
    float or array
        alpha, between 0 and 1.

    Examples
    --------
    >>> from coterie.theory import flix_risk
    >>> flix_risk.best_alpha(gamma=2.0, r2=1.0, rho2=2.0, sigma2=0.25)
    0.6
    """
    return plain(_best(_parts(gamma, r2, rho2, sigma2, l2, own, spectrum, clients)))


def _best(parts: _Parts) -> Array:
    shared, cross = parts.shared + parts.shared_noise, parts.cross + parts.cross_noise
    own = parts.own + parts.own_noise
    bend = shared - 2 * cross + own
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = np.where(np.isinf(own), 1.0, (own - cross) / bend)
    return np.clip(np.where(bend > 0, inside, 1.0), 0.0, 1.0)


def _parts(
    gamma: Any, r2: Any, rho2: Any, sigma2: Any, l2: float, own: str, spectrum: Any, clients: Any
) -> _Parts:
    gamma, r2, rho2, sigma2 = numbers(gamma=gamma, r2=r2, rho2=rho2, sigma2=sigma2)
    sigma = spectrum_of(spectrum)
    if own not in ("local", "ftfa") or (own == "ftfa" and l2 > 0):
        raise SettingError("own is 'local', or 'ftfa' without l2")
    if not l2 >= 0 or (rho2 < r2).any():
        raise SettingError("flix needs l2 >= 0 and rho2 >= r2")
    lam = np.full_like(gamma, l2)
    values, weights = sigma.values, sigma.weights
    v = np.asarray(sigma.companion(gamma, lam))[..., None]
    left = np.where(np.isinf(v), 0.0, 1 / (1 + values * np.where(np.isinf(v), 1.0, v)))  # of l2 (S + l2)^-1
    shrunk = (
        l2 / (values + l2) if l2 > 0 else np.zeros_like(values)
    )  # what the ridge takes of the shared model
    centre2, signal = (rho2 - r2)[..., None], sigma.signal_weights
    pull = float((shrunk**2 * values) @ weights)
    error, noise = _shared_error(sigma, gamma, r2, sigma2, rho2 - r2, l2, pull, clients)
    near = r2[..., None] * signal + centre2 * shrunk**2 * weights
    factor, variance = ridge_factors(sigma, gamma, lam)
    if own == "ftfa":
        passed = passed_on(sigma, gamma, lam)
        return _Parts(
            shared=(near + error) @ values,
            shared_noise=noise @ values,
            cross=((near + error) * values * left).sum(-1),
            cross_noise=(noise * values * left).sum(-1),
            own=r2 * factor + (error * passed).sum(-1),
            own_noise=np.where(sigma2 > 0, sigma2 * variance, 0.0) + (noise * passed).sum(-1),
        )
    mixed = r2[..., None] * signal + centre2 * shrunk * weights
    alone = (passed_on(sigma, gamma, lam) * (r2[..., None] * signal + centre2 * weights)).sum(-1)
    with np.errstate(invalid="ignore"):
        own_noise = np.where(sigma2 > 0, sigma2 * variance, 0.0)
    zero = np.zeros_like(gamma)
    cross = (mixed * values * left).sum(-1)
    return _Parts((near + error) @ values, noise @ values, cross, zero, alone, own_noise)


def _shared_error(
    sigma: Any, gamma: Array, r2: Array, sigma2: Array, centre2: Array, l2: float, pull: float, clients: Any
) -> tuple[Array, Array]:
    """Return the squared error of the shared model along every eigenvalue, from heterogeneity and from noise."""
    bias, variance = centre_moments(sigma, gamma, r2, sigma2, clients, Centre())
    if clients is None or l2 == 0:
        return bias, variance
    shrink = (sigma.values / (sigma.values + l2)) ** 2
    spread = (gamma * centre2 * pull / np.asarray(clients, dtype=float))[..., None]
    return shrink * (bias + spread * sigma.weights / sigma.values), shrink * variance

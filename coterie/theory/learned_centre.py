"""The error of a centre that is learned from a finite number of clients, and how many clients it takes to be useful.

This cost is not in Cheng, Chadha, Duchi, "Federated Asymptotics" (2022). `coterie.theory.risk` says what the letters
stand for, and adds this error to the risks of estimators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from coterie._core.errors import SettingError
from coterie.theory.ridge_limits import Risk, as_risk, numbers, optimal_lambda, plain, spectrum_of
from coterie.theory.spectrum import Array, Spectrum, marchenko_pastur


def centre_error(
    *,
    gamma: Any,
    r2: Any,
    sigma2: Any,
    clients: Any,
    method: str = "fedavg",
    lam: Any = None,
    alpha: float = 0.0,
    spectrum: Any = None,
) -> Risk:
    """Return |estimated th_0 - th_0|^2 for a centre learned from this many clients.

    [r2 mu(g^2) + sigma2 gamma mu(g^2/s)] / (m mu(g)^2), where g is the method's filter and mu integrates over
    Marchenko-Pastur.

    Parameters
    ----------
    gamma
        Features per row.
    r2
        Squared distance of the clients' parameters from the centre.
    sigma2
        Variance of the noise.
    clients
        Number of clients m.
    method
        "fedavg", "maml" or "pfedme".
    lam
        pFedMe's proximal strength, by default the best.
    alpha
        MAML's inner step.
    spectrum
        Covariance of the features, by default the identity, and that for "maml" and "pfedme".

    Returns
    -------
    Risk
        Error from heterogeneity (bias) and from noise (variance).

    Examples
    --------
    >>> from coterie.theory import learned_centre
    >>> round(learned_centre.centre_error(gamma=2.0, r2=1.0, sigma2=0.25, clients=100).risk, 4)
    0.035
    """
    gamma, r2, sigma2, clients = numbers(gamma=gamma, r2=r2, sigma2=sigma2, clients=clients)
    parameter = alpha
    if method == "pfedme":
        parameter = optimal_lambda(gamma=gamma, r2=r2, sigma2=sigma2) if lam is None else lam
    bias, variance = centre_moments(spectrum_of(spectrum), gamma, r2, sigma2, clients, method, parameter)
    return as_risk(bias.sum(-1), variance.sum(-1))


def clients_needed(*, gamma: Any, r2: Any, sigma2: Any, centre2: Any, method: str = "fedavg") -> Any:
    """Return how many clients it takes until ridge around the shared centre beats ridge alone.

    That is when |th_0|^2 exceeds the error of the centre.

    Parameters
    ----------
    gamma
        Features per row.
    r2
        Squared distance of the clients' parameters from the centre.
    sigma2
        Variance of the noise.
    centre2
        |th_0|^2, the squared length of the centre.
    method
        "fedavg", "maml" or "pfedme".

    Returns
    -------
    float or array
        Number of clients.

    Examples
    --------
    >>> from coterie.theory import learned_centre
    >>> learned_centre.clients_needed(gamma=2.0, r2=1.0, sigma2=0.25, centre2=0.5)
    7.0
    """
    one = centre_error(gamma=gamma, r2=r2, sigma2=sigma2, clients=1.0, method=method).risk
    with np.errstate(divide="ignore"):
        return plain(np.asarray(one) / np.asarray(centre2, dtype=float))


def centre_moments(
    sigma: Spectrum, gamma: Array, r2: Array, sigma2: Array, clients: Any, method: str, parameter: Any = 0.0
) -> tuple[Array, Array]:
    """Return the squared error of the estimated centre along every eigenvalue, from heterogeneity and from noise."""
    shape = np.broadcast_shapes(gamma.shape, np.shape(clients) if clients is not None else ())
    if clients is None:
        none = np.zeros((*shape, len(sigma.values)))
        return none, none
    m = np.asarray(clients, dtype=float)
    if sigma.is_identity():
        first, second, third = _filter_moments(method, gamma, parameter)
        share = sigma.weights / sigma.weights.sum()
        scale = (1 / (m * first**2))[..., None] * share
        return (r2 * second)[..., None] * scale, (sigma2 * gamma * third)[..., None] * scale
    if method != "fedavg":
        raise SettingError(f"the error of {method}'s centre is known for the identity covariance only")
    if (sigma.values <= 0).any():
        raise SettingError("the error of the centre needs a covariance without zero eigenvalues")
    inverse, tall = sigma.weights / sigma.values, np.asarray(gamma)[..., None]
    bias = r2[..., None] * (sigma.weights + tall * sigma.mean * inverse) / m[..., None]
    return bias, sigma2[..., None] * tall * inverse / m[..., None]


def _filter_moments(method: str, gamma: Array, parameter: Any) -> tuple[Array, Array, Array]:
    """Return mu(g), mu(g^2), mu(g^2 / s) of a method's filter g."""
    if method == "fedavg":
        return np.ones_like(gamma), 1 + gamma, np.ones_like(gamma)
    if method not in ("maml", "pfedme"):
        raise SettingError(f"no centre {method!r}; choose fedavg, maml or pfedme")
    moments = np.empty((3, *gamma.shape))
    parameters = np.broadcast_to(np.asarray(parameter, dtype=float), gamma.shape)
    for at, one in np.ndenumerate(gamma):
        g = functools.partial(_maml_filter if method == "maml" else _pfedme_filter, float(parameters[at]))
        moments[(0, *at)] = marchenko_pastur(one, g)
        moments[(1, *at)] = marchenko_pastur(one, functools.partial(_squared, g))
        moments[(2, *at)] = marchenko_pastur(one, functools.partial(_squared, g, over=True))
    return moments[0], moments[1], moments[2]


def _maml_filter(alpha: float, s: Array) -> Array:
    return s * (1 - alpha * s) ** 2


def _pfedme_filter(lam: float, s: Array) -> Array:
    """Return s / (s + lam) up to a factor, which does not matter, so that lam may be infinite."""
    return s / (1 + s / lam) if lam > 0 else np.ones_like(s)


def _squared(g: Callable[[Array], Array], s: Array, over: bool = False) -> Array:
    return g(s) ** 2 / (s if over else 1.0)

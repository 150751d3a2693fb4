"""Asymptotic bias, variance and risk of personalised linear models.

Model: m clients, y_j = X_j th_j + noise of variance sigma2, th_j = th_0 + D_j with |D_j|^2 = r2,
rho2 = |th_j|^2, gamma = d / n_j features per row. Cheng, Chadha, Duchi, "Federated Asymptotics" (2022), with
the printed formulas (15)-(18) put right; what a finite number of clients costs is not in the paper.

Every estimator is a function that takes numbers or arrays by name and returns a `Risk`:

>>> from coterie.theory import risk
>>> found = risk.ftfa(gamma=2.0, r2=1.0, sigma2=0.25)
>>> found.bias, found.variance, found.risk
(0.5, 0.25, 0.75)

`spectrum=` (eigenvalues, or a `Spectrum`) is the covariance of the features, the identity by default;
`clients=` adds what the centre lacks when it is learned from that many clients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.errors import SettingError
from coterie.theory.spectrum import IDENTITY, Array, Spectrum, marchenko_pastur

__all__ = [
    "Risk",
    "Spectrum",
    "centre_error",
    "clients_needed",
    "crossover_noise",
    "fedavg",
    "ftfa",
    "local",
    "maml_fl",
    "optimal_lambda",
    "pfedme",
    "ridge_local",
    "rtfa",
]


@dataclass(frozen=True)
class Risk:
    """Expected squared error of predictions beyond the noise: `bias` + `variance`."""

    bias: Any
    variance: Any

    @property
    def risk(self) -> Any:
        return self.bias + self.variance


def fedavg(
    *, r2: Any, sigma2: Any = 0.0, gamma: Any = 1.0, spectrum: Any = None, clients: Any = None
) -> Risk:
    """One model for all. `sigma2` and `gamma` matter only for a finite number of `clients`."""
    gamma, r2, sigma2 = _numbers(gamma=gamma, r2=r2, sigma2=sigma2)
    sigma = _spectrum(spectrum)
    level = float(sigma.values @ sigma.signal_weights)
    bias, variance = _centre_moments(sigma, gamma, r2, sigma2, clients, "fedavg")
    return _risk(r2 * level + bias @ sigma.values, variance @ sigma.values)


def local(*, gamma: Any, rho2: Any, sigma2: Any, spectrum: Any = None) -> Risk:
    """Alone: the interpolator of smallest norm (ordinary least squares for gamma < 1)."""
    gamma, rho2, sigma2 = _numbers(gamma=gamma, rho2=rho2, sigma2=sigma2)
    return _around(_spectrum(spectrum), gamma, rho2, sigma2, np.zeros_like(gamma), None, "fedavg")


def ridge_local(*, gamma: Any, rho2: Any, sigma2: Any, lam: Any = None, spectrum: Any = None) -> Risk:
    """Alone with a ridge penalty `lam`, by default the best."""
    gamma, rho2, sigma2 = _numbers(gamma=gamma, rho2=rho2, sigma2=sigma2)
    sigma = _spectrum(spectrum)
    chosen = optimal_lambda(gamma=gamma, r2=rho2, sigma2=sigma2, spectrum=sigma) if lam is None else lam
    return _around(sigma, gamma, rho2, sigma2, _lambda(chosen), None, "fedavg")


def ftfa(
    *,
    gamma: Any,
    r2: Any,
    sigma2: Any,
    spectrum: Any = None,
    clients: Any = None,
    steps: int | None = None,
    lr: float | None = None,
) -> Risk:
    """FedAvg tuned at home to interpolation, or for `steps` gradient steps of size `lr` (identity covariance)."""
    gamma, r2, sigma2 = _numbers(gamma=gamma, r2=r2, sigma2=sigma2)
    sigma = _spectrum(spectrum)
    if steps is None and lr is None:
        return _around(sigma, gamma, r2, sigma2, np.zeros_like(gamma), clients, "fedavg")
    if steps is None or lr is None or not sigma.is_identity():
        raise SettingError("tuning that is stopped needs both steps and lr, and the identity covariance")
    kept = np.empty_like(gamma)
    noise = np.empty_like(gamma)
    for at, one in np.ndenumerate(gamma):
        kept[at] = marchenko_pastur(one, lambda s: (1 - lr * s) ** (2 * steps), at_zero=1.0)
        noise[at] = one * marchenko_pastur(one, lambda s: (1 - (1 - lr * s) ** steps) ** 2 / s)
    extra = _centre_moments(sigma, gamma, r2, sigma2, clients, "fedavg")
    return _risk((r2 + extra[0].sum(-1)) * kept, sigma2 * noise + extra[1].sum(-1) * kept)


def rtfa(
    *, gamma: Any, r2: Any, sigma2: Any, lam: Any = None, spectrum: Any = None, clients: Any = None
) -> Risk:
    """FedAvg tuned at home with a ridge penalty `lam` around it, by default the best."""
    return _tuned(gamma, r2, sigma2, lam, spectrum, clients, "fedavg")


def maml_fl(
    *, gamma: Any, r2: Any, sigma2: Any, spectrum: Any = None, clients: Any = None, alpha: float = 0.0
) -> Risk:
    """MAML's centre tuned to interpolation; differs from `ftfa` only in the error of the centre."""
    gamma, r2, sigma2 = _numbers(gamma=gamma, r2=r2, sigma2=sigma2)
    return _around(_spectrum(spectrum), gamma, r2, sigma2, np.zeros_like(gamma), clients, "maml", alpha)


def pfedme(
    *, gamma: Any, r2: Any, sigma2: Any, lam: Any = None, spectrum: Any = None, clients: Any = None
) -> Risk:
    """pFedMe's centre with its proximal personal models; differs from `rtfa` only in the error of the centre."""
    return _tuned(gamma, r2, sigma2, lam, spectrum, clients, "pfedme")


def optimal_lambda(*, gamma: Any, r2: Any, sigma2: Any, spectrum: Any = None) -> Any:
    """The ridge penalty of smallest risk around a centre at squared distance r2.

    sigma2 gamma / r2 for every covariance while the deviation has no preferred direction; found by golden
    section otherwise.
    """
    gamma, r2, sigma2 = _numbers(gamma=gamma, r2=r2, sigma2=sigma2)
    sigma = _spectrum(spectrum)
    with np.errstate(divide="ignore", invalid="ignore"):
        isotropic = np.where(r2 > 0, sigma2 * gamma / r2, np.inf)
    if sigma.signal is None or sigma.is_identity():
        return _plain(isotropic)

    def height(u: Array) -> Array:
        bias, variance = _ridge_factors(sigma, gamma, np.exp(u))
        return r2 * bias + sigma2 * variance

    middle = np.log(np.where(np.isfinite(isotropic) & (isotropic > 0), isotropic, 1.0))
    best = np.exp(_golden(height, middle - 12, middle + 12))
    return _plain(np.where((r2 > 0) & (sigma2 > 0), best, isotropic))


def crossover_noise(*, gamma: Any, r2: Any, spectrum: Any = None) -> Any:
    """The noise variance below which tuning at home to interpolation beats the shared model."""
    gamma, r2 = _numbers(gamma=gamma, r2=r2)
    sigma = _spectrum(spectrum)
    bias, variance = _ridge_factors(sigma, gamma, np.zeros_like(gamma))
    shared = float(sigma.values @ sigma.signal_weights)
    return _plain(np.where(np.isinf(variance), 0.0, r2 * (shared - bias) / variance))


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
    """|estimated th_0 - th_0|^2 with this many clients; `lam` is pFedMe's (the best by default), `alpha` MAML's.

    [r2 mu(g^2) + sigma2 gamma mu(g^2/s)] / (m mu(g)^2), g the method's filter, mu over Marchenko-Pastur.
    """
    gamma, r2, sigma2, clients = _numbers(gamma=gamma, r2=r2, sigma2=sigma2, clients=clients)
    parameter = alpha
    if method == "pfedme":
        parameter = optimal_lambda(gamma=gamma, r2=r2, sigma2=sigma2) if lam is None else lam
    bias, variance = _centre_moments(_spectrum(spectrum), gamma, r2, sigma2, clients, method, parameter)
    return _risk(bias.sum(-1), variance.sum(-1))


def clients_needed(*, gamma: Any, r2: Any, sigma2: Any, centre2: Any, method: str = "fedavg") -> Any:
    """How many clients it takes until ridge around the shared centre beats ridge alone: |th_0|^2 > centre error."""
    one = centre_error(gamma=gamma, r2=r2, sigma2=sigma2, clients=1.0, method=method).risk
    with np.errstate(divide="ignore"):
        return _plain(np.asarray(one) / np.asarray(centre2, dtype=float))


def _tuned(gamma: Any, r2: Any, sigma2: Any, lam: Any, spectrum: Any, clients: Any, centre: str) -> Risk:
    gamma, r2, sigma2 = _numbers(gamma=gamma, r2=r2, sigma2=sigma2)
    sigma = _spectrum(spectrum)
    chosen = optimal_lambda(gamma=gamma, r2=r2, sigma2=sigma2, spectrum=sigma) if lam is None else lam
    return _around(sigma, gamma, r2, sigma2, _lambda(chosen), clients, centre, chosen)


def _around(
    sigma: Spectrum,
    gamma: Array,
    distance2: Array,
    sigma2: Array,
    lam: Array,
    clients: Any,
    centre: str,
    parameter: Any = 0.0,
) -> Risk:
    """Ridge around a centre; lam = 0 interpolates."""
    bias, variance = _ridge_factors(sigma, gamma, lam)
    extra = _centre_moments(sigma, gamma, distance2, sigma2, clients, centre, parameter)
    passed = _passed(sigma, gamma, lam)
    with np.errstate(invalid="ignore"):
        noise = np.where(sigma2 > 0, sigma2 * variance, 0.0)
    return _risk(distance2 * bias + (extra[0] * passed).sum(-1), noise + (extra[1] * passed).sum(-1))


def _ridge_factors(sigma: Spectrum, gamma: Array, lam: Array) -> tuple[Array, Array]:
    """Bias per r2 and variance per sigma2 of ridge around a centre."""
    gamma, lam = np.broadcast_arrays(gamma, lam)
    passed = _passed(sigma, gamma, lam)
    v = np.asarray(sigma.companion(gamma, lam))
    finite = np.where(np.isfinite(v) & (v > 0), v, 1.0)[..., None]
    t = 1 / (1 + sigma.values * finite)
    slope = lam + gamma * ((sigma.values * t * t) @ sigma.weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = gamma * ((sigma.values * t) ** 2 @ sigma.weights) * finite[..., 0] / slope
        taken = gamma * sigma.rank
        least_squares = np.where(taken < 1, taken / (1 - taken), np.inf)
    variance = np.where(np.isinf(v), least_squares, np.where(np.isinf(lam), 0.0, variance))
    return passed @ sigma.signal_weights, variance


def _passed(sigma: Spectrum, gamma: Array, lam: Array) -> Array:
    """(v'/v^2) s / (1 + s v)^2 for every eigenvalue: the error that an error of the centre there leaves."""
    gamma, lam = np.broadcast_arrays(gamma, lam)
    v = np.asarray(sigma.companion(gamma, lam))
    finite = np.where(np.isfinite(v), v, 1.0)[..., None]
    t = 1 / (1 + sigma.values * finite)
    s_t, s_t2 = (sigma.values * t) @ sigma.weights, (sigma.values * t * t) @ sigma.weights
    with np.errstate(invalid="ignore"):
        ratio = np.where(np.isinf(lam), 1.0, (lam + gamma * s_t) / (lam + gamma * s_t2))
    return np.where(np.isinf(v)[..., None], 0.0, ratio[..., None] * sigma.values * t * t)


def _centre_moments(
    sigma: Spectrum, gamma: Array, r2: Array, sigma2: Array, clients: Any, method: str, parameter: Any = 0.0
) -> tuple[Array, Array]:
    """Squared error of the estimated centre along every eigenvalue, from heterogeneity and from noise."""
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
    """mu(g), mu(g^2), mu(g^2 / s) of a method's filter g."""
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
    """s / (s + lam) up to a factor, which does not matter, so that lam may be infinite."""
    return s / (1 + s / lam) if lam > 0 else np.ones_like(s)


def _squared(g: Callable[[Array], Array], s: Array, over: bool = False) -> Array:
    return g(s) ** 2 / (s if over else 1.0)


def _golden(height: Any, low: Array, high: Array, steps: int = 80) -> Array:
    """Minimiser of a function with one valley, for every entry of the arrays."""
    ratio = (np.sqrt(5) - 1) / 2
    for _ in range(steps):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        down = height(left) < height(right)
        low, high = np.where(down, low, left), np.where(down, right, high)
    return (low + high) / 2


def _spectrum(given: Any) -> Spectrum:
    return IDENTITY if given is None else Spectrum.of(given)


def _lambda(lam: Any) -> Array:
    value = np.asarray(lam, dtype=float)
    if not (value >= 0).all():
        raise SettingError(f"lam = {lam}; it must not be negative")
    return value


def _numbers(**given: Any) -> list[Array]:
    """Checked, and broadcast against each other."""
    arrays = {name: np.asarray(value, dtype=float) for name, value in given.items()}
    for name, value in arrays.items():
        positive = name in ("gamma", "clients")
        if not (np.isfinite(value).all() and ((value > 0) if positive else (value >= 0)).all()):
            raise SettingError(f"{name} must be finite and {'above' if positive else 'at least'} 0")
    return [np.array(value) for value in np.broadcast_arrays(*arrays.values())]


def _risk(bias: Array, variance: Array) -> Risk:
    return Risk(_plain(bias), _plain(variance))


def _plain(value: Any) -> Any:
    value = np.asarray(value)
    return float(value) if value.ndim == 0 else value

"""The error of a centre that is learned from a finite number of clients, and how many clients it takes to be useful.

This cost is not in Cheng, Chadha, Duchi, "Federated Asymptotics" (2022). `coterie.theory.risk` says what the letters
stand for, and adds this error to the risks of estimators. A centre is (sum_j g(S_j))^-1 sum_j g(S_j)/S_j X_j'y_j/n_j
with a filter g (`coterie.theory.filters`). With M(phi) the limit of E phi(S), a function of the features' covariance,
its squared error is [r2 M(g^2) + sigma2 gamma M(g^2/s)] / (m M(g)^2), summed over eigenvalues; deviations have no
preferred direction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # loads its parts when they are first used
import torch

from coterie._core.errors import SettingError
from coterie.theory import filters
from coterie.theory.ridge_limits import (
    Risk,
    as_risk,
    golden,
    numbers,
    optimal_lambda,
    passed_on,
    plain,
    ridge_factors,
    spectrum_of,
)
from coterie.theory.spectrum import Array, Spectrum, marchenko_pastur

METHODS = ("fedavg", "maml", "fomaml", "pfedme")


@dataclass(frozen=True)
class Centre:
    """How a centre is learned.

    Parameters
    ----------
    method
        "fedavg", "maml", "fomaml" (first order) or "pfedme".
    parameter
        MAML's inner step or pFedMe's proximal strength, a number or an array that goes with the others.
    steps
        Local gradient steps per round.
    lr
        Their step size; it does not matter for one step.

    Examples
    --------
    >>> from coterie.theory.learned_centre import Centre
    >>> Centre("pfedme", 0.5).method
    'pfedme'
    """

    method: str = "fedavg"
    parameter: Any = 0.0
    steps: int = 1
    lr: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise SettingError(f"no centre {self.method!r}; choose {', '.join(METHODS)}")
        if self.steps < 1:
            raise SettingError(f"steps = {self.steps}; a centre takes at least one local step")

    @property
    def plain_average(self) -> bool:
        """Whether it is FedAvg with one local step, whose moments have a closed form."""
        return self.method == "fedavg" and self.steps == 1

    def ratio(self, parameter: float) -> filters.Filter:
        """Return the filter g(s)/s."""
        if self.method == "pfedme" and np.isfinite(parameter):
            return filters.proximal(parameter, self.steps, self.lr) if parameter > 0 else filters.interpolate
        if self.method in ("fedavg", "pfedme"):
            return filters.average(self.steps, self.lr)
        return filters.maml(parameter, self.steps, self.lr, first_order=self.method == "fomaml")


def centre_error(
    *,
    gamma: Any,
    r2: Any,
    sigma2: Any,
    clients: Any,
    method: str = "fedavg",
    lam: Any = None,
    alpha: float = 0.0,
    steps: int = 1,
    lr: float = 1.0,
    spectrum: Any = None,
) -> Risk:
    """Return |estimated th_0 - th_0|^2 for a centre learned from this many clients.

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
        "fedavg", "maml", "fomaml" (first order) or "pfedme".
    lam
        pFedMe's proximal strength, by default the best.
    alpha
        MAML's inner step.
    steps
        Local gradient steps per round.
    lr
        Their step size.
    spectrum
        Covariance of the features, by default the identity.

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
    centre = _centre(method, gamma, r2, sigma2, lam, alpha, steps, lr)
    bias, variance = centre_moments(spectrum_of(spectrum), gamma, r2, sigma2, clients, centre)
    return as_risk(bias.sum(-1), variance.sum(-1))


def clients_needed(
    *,
    gamma: Any,
    r2: Any,
    sigma2: Any,
    centre2: Any,
    method: str = "fedavg",
    lam: Any = None,
    alpha: float = 0.0,
    steps: int = 1,
    lr: float = 1.0,
    spectrum: Any = None,
) -> Any:
    """Return how many clients it takes until ridge around the shared centre beats ridge alone.

    Each has its best penalty. For the identity covariance that is when |th_0|^2 exceeds the error of the centre.

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
        "fedavg", "maml", "fomaml" (first order) or "pfedme".
    lam
        pFedMe's proximal strength, by default the best.
    alpha
        MAML's inner step.
    steps
        Local gradient steps per round.
    lr
        Their step size.
    spectrum
        Covariance of the features, by default the identity.

    Returns
    -------
    float or array
        Number of clients.

    Examples
    --------
    >>> from coterie.theory import learned_centre
    >>> learned_centre.clients_needed(gamma=2.0, r2=1.0, sigma2=0.25, centre2=0.5)
    7.0
    >>> round(learned_centre.clients_needed(gamma=2.0, r2=1.0, sigma2=0.25, centre2=0.5, spectrum=[0.4, 1.6]), 1)
    8.9
    """
    gamma, r2, sigma2, centre2 = numbers(gamma=gamma, r2=r2, sigma2=sigma2, centre2=centre2)
    sigma = spectrum_of(spectrum)
    centre = _centre(method, gamma, r2, sigma2, lam, alpha, steps, lr)
    bias, variance = centre_moments(sigma, gamma, r2, sigma2, 1.0, centre)
    with np.errstate(divide="ignore"):
        crude = (bias + variance).sum(-1) / centre2
    if sigma.is_identity():
        return plain(crude)
    found = np.empty_like(gamma)
    for at in np.ndindex(gamma.shape):
        one = float(gamma[at]), float(r2[at]), float(sigma2[at])
        found[at] = _enough(sigma, *one, float(centre2[at]), (bias + variance)[at], float(crude[at]))
    return plain(found)


def _enough(
    sigma: Spectrum, gamma: float, r2: float, sigma2: float, centre2: float, error: Array, crude: float
) -> float:
    """Return the number of clients at which the two best risks are equal; `error` is that of one client."""
    if not np.isfinite(crude) or crude == 0:
        return crude

    def best(distances: Array) -> float:
        def height(u: Array) -> Array:
            lam = np.exp(u)
            passed, noise = (
                passed_on(sigma, np.asarray(gamma), lam),
                ridge_factors(sigma, np.asarray(gamma), lam)[1],
            )
            found: Array = passed @ distances + sigma2 * noise
            return found

        middle = np.asarray(np.log(max(sigma2 * gamma / distances.sum(), 1e-12)))
        return float(height(golden(height, middle - 6, middle + 6)))

    alone = best((r2 + centre2) * sigma.weights)

    def height(u: float) -> float:
        return best(r2 * sigma.weights + error / np.exp(u)) - alone

    return float(np.exp(scipy.optimize.brentq(height, np.log(crude) - 4, np.log(crude) + 4, xtol=1e-9)))


def _centre(
    method: str, gamma: Array, r2: Array, sigma2: Array, lam: Any, alpha: float, steps: int, lr: float
) -> Centre:
    parameter: Any = alpha
    if method == "pfedme":
        parameter = optimal_lambda(gamma=gamma, r2=r2, sigma2=sigma2) if lam is None else lam
    return Centre(method, parameter, steps, lr)


def centre_moments(
    sigma: Spectrum, gamma: Array, r2: Array, sigma2: Array, clients: Any, centre: Centre
) -> tuple[Array, Array]:
    """Return the squared error of the estimated centre along every eigenvalue, from heterogeneity and from noise."""
    shape = np.broadcast_shapes(gamma.shape, np.shape(clients) if clients is not None else ())
    if clients is None:
        none = np.zeros((*shape, len(sigma.values)))
        return none, none
    if (sigma.values <= 0).any():
        raise SettingError("the error of the centre needs a covariance without zero eigenvalues")
    first, second, third = filter_moments(sigma, gamma, centre)
    scale = sigma.weights / (np.asarray(clients, dtype=float)[..., None] * first**2)
    return r2[..., None] * second * scale, (sigma2 * gamma)[..., None] * third * scale


def filter_moments(sigma: Spectrum, gamma: Array, centre: Centre) -> tuple[Array, Array, Array]:
    """Return M(g), M(g^2) and M(g^2/s) of a centre's filter for every eigenvalue of the covariance."""
    values = sigma.values
    if centre.plain_average:
        ones = np.ones((*gamma.shape, len(values)))
        return ones * values, ones * values**2 + gamma[..., None] * sigma.mean * values, ones * values
    moments = np.empty((3, *gamma.shape, len(values)))
    parameters = np.broadcast_to(np.asarray(centre.parameter, dtype=float), gamma.shape)
    for at, one in np.ndenumerate(gamma):
        parameter = float(parameters[at])
        ratio = centre.ratio(parameter)
        pole = parameter if centre.method == "pfedme" and np.isfinite(parameter) else None
        for k, power in enumerate(((1, 1), (2, 2), (2, 1))):
            function = _power(ratio, *power)
            if sigma.is_identity():
                moments[(k, *at)] = marchenko_pastur(one, function)
            else:
                moments[(k, *at)] = sigma.transformed(float(one), function, pole)
    return moments[0], moments[1], moments[2]


def _power(ratio: filters.Filter, exponent: int, times_s: int) -> Callable[[Array], Array]:
    """Return ratio(s)^exponent s^times_s as a function of numpy arrays, complex ones too."""

    def function(s: Array) -> Array:
        found: Array = ratio(torch.from_numpy(s)).numpy() ** exponent * s**times_s
        return found

    return function

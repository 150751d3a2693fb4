"""Asymptotic bias, variance and risk of personalised linear models.

Model: m clients, y_j = X_j th_j + noise of variance sigma2, th_j = th_0 + D_j with |D_j|^2 = r2,
rho2 = |th_j|^2, gamma = d / n_j features per row. Cheng, Chadha, Duchi, "Federated Asymptotics" (2022), with
the printed formulas (15)-(18) corrected. `ridge_limits` has the terms that the risks share and the best penalty,
`learned_centre` the error of a centre that is learned from a finite number of clients.

Every estimator is a function that takes numbers or arrays by name and returns a `Risk`:

>>> from coterie.theory import risk
>>> found = risk.ftfa(gamma=2.0, r2=1.0, sigma2=0.25)
>>> found.bias, found.variance, found.risk
(0.5, 0.25, 0.75)

Common parameters: `gamma`, `r2`, `rho2`, `sigma2` as above; `spectrum` (eigenvalues, or a `Spectrum`) is the covariance
of the features, by default the identity; `clients` adds the error of a centre learned from that many clients, who take
`local_steps` gradient steps of size `local_lr` in a round. `flix_risk` has the risk of FLIX's mixtures.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.theory.around_centre import around, penalty, stopped, tuned
from coterie.theory.learned_centre import Centre, centre_moments
from coterie.theory.ridge_limits import (
    Risk,
    as_risk,
    numbers,
    optimal_lambda,
    plain,
    ridge_factors,
    spectrum_of,
)


def fedavg(
    *,
    r2: Any,
    sigma2: Any = 0.0,
    gamma: Any = 1.0,
    spectrum: Any = None,
    clients: Any = None,
    local_steps: int = 1,
    local_lr: float = 1.0,
) -> Risk:
    """Predict the risk of one model for all clients.

    Parameters
    ----------
    r2
        Squared distance of the clients' parameters from the centre.
    sigma2
        Variance of the noise; matters only for a finite number of `clients`.
    gamma
        Features per row; matters only for a finite number of `clients`.
    spectrum
        Covariance of the features, by default the identity.
    clients
        Number of clients the centre is learned from, by default infinite.
    local_steps
        Their local steps in a round.
    local_lr
        Step size of these.

    Returns
    -------
    Risk
        Bias and variance.

    Examples
    --------
    >>> from coterie.theory import risk
    >>> risk.fedavg(r2=1.0).risk
    1.0
    """
    gamma, r2, sigma2 = numbers(gamma=gamma, r2=r2, sigma2=sigma2)
    sigma = spectrum_of(spectrum)
    level = float(sigma.values @ sigma.signal_weights)
    centre = Centre(steps=local_steps, lr=local_lr)
    bias, variance = centre_moments(sigma, gamma, r2, sigma2, clients, centre)
    return as_risk(r2 * level + bias @ sigma.values, variance @ sigma.values)


def local(*, gamma: Any, rho2: Any, sigma2: Any, spectrum: Any = None) -> Risk:
    """Predict the risk of training alone: the interpolator of smallest norm (least squares for gamma < 1).

    Parameters
    ----------
    gamma
        Features per row.
    rho2
        Squared length of the client's parameters.
    sigma2
        Variance of the noise.
    spectrum
        Covariance of the features, by default the identity.

    Returns
    -------
    Risk
        Bias and variance.

    Examples
    --------
    >>> from coterie.theory import risk
    >>> risk.local(gamma=2.0, rho2=3.0, sigma2=0.25).risk
    1.75
    """
    gamma, rho2, sigma2 = numbers(gamma=gamma, rho2=rho2, sigma2=sigma2)
    return around(spectrum_of(spectrum), gamma, rho2, sigma2, np.zeros_like(gamma), None, Centre())


def ridge_local(*, gamma: Any, rho2: Any, sigma2: Any, lam: Any = None, spectrum: Any = None) -> Risk:
    """Predict the risk of ridge regression alone.

    Parameters
    ----------
    gamma
        Features per row.
    rho2
        Squared length of the client's parameters.
    sigma2
        Variance of the noise.
    lam
        Ridge penalty, by default the best.
    spectrum
        Covariance of the features, by default the identity.

    Returns
    -------
    Risk
        Bias and variance.

    Examples
    --------
    >>> from coterie.theory import risk
    >>> round(risk.ridge_local(gamma=2.0, rho2=3.0, sigma2=0.25).risk, 4)
    1.693
    """
    gamma, rho2, sigma2 = numbers(gamma=gamma, rho2=rho2, sigma2=sigma2)
    sigma = spectrum_of(spectrum)
    chosen = optimal_lambda(gamma=gamma, r2=rho2, sigma2=sigma2, spectrum=sigma) if lam is None else lam
    return around(sigma, gamma, rho2, sigma2, penalty(chosen), None, Centre())


def ftfa(
    *,
    gamma: Any,
    r2: Any,
    sigma2: Any,
    spectrum: Any = None,
    clients: Any = None,
    local_steps: int = 1,
    local_lr: float = 1.0,
    steps: int | None = None,
    lr: float | None = None,
) -> Risk:
    """Predict the risk of FedAvg fine-tuned on each client.

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
    clients
        Number of clients the centre is learned from, by default infinite.
    local_steps
        Their local steps in a round.
    local_lr
        Step size of these.
    steps
        Gradient steps of the fine-tuning (identity covariance only); by default it goes on to interpolation.
    lr
        Their step size; needed with `steps`.

    Returns
    -------
    Risk
        Bias and variance.

    Examples
    --------
    >>> from coterie.theory import risk
    >>> risk.ftfa(gamma=2.0, r2=1.0, sigma2=0.25).risk
    0.75
    """
    gamma, r2, sigma2 = numbers(gamma=gamma, r2=r2, sigma2=sigma2)
    centre = Centre(steps=local_steps, lr=local_lr)
    if steps is None and lr is None:
        return around(spectrum_of(spectrum), gamma, r2, sigma2, np.zeros_like(gamma), clients, centre)
    return stopped(spectrum_of(spectrum), gamma, r2, sigma2, np.zeros_like(gamma), clients, centre, steps, lr)


def rtfa(
    *,
    gamma: Any,
    r2: Any,
    sigma2: Any,
    lam: Any = None,
    spectrum: Any = None,
    clients: Any = None,
    local_steps: int = 1,
    local_lr: float = 1.0,
) -> Risk:
    """Predict the risk of FedAvg tuned on each client with a ridge penalty around it.

    Parameters
    ----------
    gamma
        Features per row.
    r2
        Squared distance of the clients' parameters from the centre.
    sigma2
        Variance of the noise.
    lam
        Ridge penalty, by default the best.
    spectrum
        Covariance of the features, by default the identity.
    clients
        Number of clients the centre is learned from, by default infinite.
    local_steps
        Their local steps in a round.
    local_lr
        Step size of these.

    Returns
    -------
    Risk
        Bias and variance.

    Examples
    --------
    >>> from coterie.theory import risk
    >>> round(risk.rtfa(gamma=2.0, r2=1.0, sigma2=0.25).risk, 4)
    0.6404
    """
    return tuned(gamma, r2, sigma2, lam, spectrum, clients, "fedavg", local_steps, local_lr)


def ditto(
    *,
    gamma: Any,
    r2: Any,
    sigma2: Any,
    lam: Any = None,
    spectrum: Any = None,
    clients: Any = None,
    local_steps: int = 1,
    local_lr: float = 1.0,
    steps: int | None = None,
    lr: float | None = None,
) -> Risk:
    """Predict the risk of Ditto's personal models.

    They converge to ridge around the shared model, which is FedAvg's: then Ditto is `rtfa`. After `steps` steps of size
    `lr` from the shared model the filter is s/(s + lam) (1 - (1 - lr (s + lam))^steps).

    Parameters
    ----------
    gamma
        Features per row.
    r2
        Squared distance of the clients' parameters from the centre.
    sigma2
        Variance of the noise.
    lam
        Strength of the pull to the shared model, by default the best for converged models.
    spectrum
        Covariance of the features, by default the identity.
    clients
        Number of clients the centre is learned from, by default infinite.
    local_steps
        Their local steps in a round.
    local_lr
        Step size of these.
    steps
        Personal steps after the shared model has converged (identity covariance only); by default they go on for ever.
    lr
        Their step size; needed with `steps`.

    Returns
    -------
    Risk
        Bias and variance.

    Examples
    --------
    >>> from coterie.theory import risk
    >>> round(risk.ditto(gamma=2.0, r2=1.0, sigma2=0.25).risk, 4)
    0.6404
    >>> round(risk.ditto(gamma=2.0, r2=1.0, sigma2=0.25, steps=5, lr=0.1).risk, 4)
    0.6797
    """
    if steps is None and lr is None:
        return tuned(gamma, r2, sigma2, lam, spectrum, clients, "fedavg", local_steps, local_lr)
    gamma, r2, sigma2 = numbers(gamma=gamma, r2=r2, sigma2=sigma2)
    chosen = penalty(optimal_lambda(gamma=gamma, r2=r2, sigma2=sigma2) if lam is None else lam)
    centre = Centre(steps=local_steps, lr=local_lr)
    return stopped(spectrum_of(spectrum), gamma, r2, sigma2, chosen, clients, centre, steps, lr)


def maml_fl(
    *,
    gamma: Any,
    r2: Any,
    sigma2: Any,
    spectrum: Any = None,
    clients: Any = None,
    local_steps: int = 1,
    local_lr: float = 1.0,
    alpha: float = 0.0,
    first_order: bool = False,
) -> Risk:
    """Predict the risk of MAML's centre tuned to interpolation; only the error of the centre differs from `ftfa`.

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
    clients
        Number of clients the centre is learned from, by default infinite.
    local_steps
        Their local steps in a round.
    local_lr
        Step size of these.
    alpha
        Step size of MAML's inner step.
    first_order
        Whether second derivatives are left out (FO-MAML).

    Returns
    -------
    Risk
        Bias and variance.

    Examples
    --------
    >>> from coterie.theory import risk
    >>> round(risk.maml_fl(gamma=2.0, r2=1.0, sigma2=0.25, clients=100, alpha=0.1).risk, 4)
    0.7645
    """
    gamma, r2, sigma2 = numbers(gamma=gamma, r2=r2, sigma2=sigma2)
    centre = Centre("fomaml" if first_order else "maml", alpha, local_steps, local_lr)
    return around(spectrum_of(spectrum), gamma, r2, sigma2, np.zeros_like(gamma), clients, centre)


def pfedme(
    *,
    gamma: Any,
    r2: Any,
    sigma2: Any,
    lam: Any = None,
    spectrum: Any = None,
    clients: Any = None,
    local_steps: int = 1,
    local_lr: float = 1.0,
) -> Risk:
    """Predict the risk of pFedMe's personal models; only the error of the centre differs from `rtfa`.

    Parameters
    ----------
    gamma
        Features per row.
    r2
        Squared distance of the clients' parameters from the centre.
    sigma2
        Variance of the noise.
    lam
        Strength of the proximal term, by default the best.
    spectrum
        Covariance of the features, by default the identity.
    clients
        Number of clients the centre is learned from, by default infinite.
    local_steps
        Their local steps in a round.
    local_lr
        Step size of these.

    Returns
    -------
    Risk
        Bias and variance.

    Examples
    --------
    >>> from coterie.theory import risk
    >>> round(risk.pfedme(gamma=2.0, r2=1.0, sigma2=0.25, clients=100).risk, 4)
    0.6558
    """
    return tuned(gamma, r2, sigma2, lam, spectrum, clients, "pfedme", local_steps, local_lr)


def crossover_noise(*, gamma: Any, r2: Any, spectrum: Any = None) -> Any:
    """Return the noise variance below which fine-tuning to interpolation beats the shared model.

    Parameters
    ----------
    gamma
        Features per row.
    r2
        Squared distance of the clients' parameters from the centre.
    spectrum
        Covariance of the features, by default the identity.

    Returns
    -------
    float or array
        The variance.

    Examples
    --------
    >>> from coterie.theory import risk
    >>> risk.crossover_noise(gamma=2.0, r2=1.0)
    0.5
    """
    gamma, r2 = numbers(gamma=gamma, r2=r2)
    sigma = spectrum_of(spectrum)
    bias, variance = ridge_factors(sigma, gamma, np.zeros_like(gamma))
    shared = float(sigma.values @ sigma.signal_weights)
    return plain(np.where(np.isinf(variance), 0.0, r2 * (shared - bias) / variance))

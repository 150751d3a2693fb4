"""FLIX in theory: how fast its solvers shrink the gap f~(x) - min f~, and bounds on it.

Gasanov, Khaled, Horvath, Richtarik, "FLIX: A Simple and Communication-Efficient Alternative to Local Methods
in Federated Learning" (AISTATS 2022), with DCGD's neighbourhood corrected: it has the cube of the smoothness. `flix`
has the constants, `flix_steps` the step sizes, `flix_rounds` the rounds until an accuracy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coterie.theory.flix import Mixture
from coterie.theory.flix_steps import (
    dcgd_step,
    dgd_step,
    diana_beta,
    diana_step,
    ef21_step,
    scaffnew_chance,
    scaffnew_step,
)


def dgd_rate(mixture: Mixture) -> float:
    """Return the factor by which gradient descent shrinks the gap every round, 1 - mu_alpha / L_alpha.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_rates
    >>> flix_rates.dgd_rate(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)))
    0.75
    """
    return 1.0 - mixture.mu * dgd_step(mixture)


def diana_rate(mixture: Mixture, omega: float | Tensor) -> float:
    """Return the factor by which DIANA shrinks its Lyapunov function in expectation.

    max(1 - gamma mu_alpha, 1 - beta / 2), with gamma from `diana_step` and beta from `diana_beta`, the smallest.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n].

    Returns
    -------
    float
        The factor per round.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_rates
    >>> flix_rates.diana_rate(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)), omega=1.0)
    0.9375
    """
    slowest = diana_beta(float(torch.as_tensor(omega).max()))
    return max(1.0 - diana_step(mixture, omega) * mixture.mu, 1.0 - 0.5 * slowest)


def ef21_rate(mixture: Mixture, delta: float) -> float:
    """Return the factor by which EF21 shrinks its Lyapunov function, 1 - gamma mu_alpha with gamma from `ef21_step`.

    Parameters
    ----------
    mixture
        Constants of the problem.
    delta
        Contraction of the compressor.

    Returns
    -------
    float
        The factor per round. Started with g_i = G_i(x), the Lyapunov function is the gap at first and never below it.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_rates
    >>> flix_rates.ef21_rate(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)), delta=1.0)
    0.75
    """
    return 1.0 - ef21_step(mixture, delta) * mixture.mu


def scaffnew_rate(mixture: Mixture, chance: float | None = None) -> float:
    """Return the factor by which Scaffnew shrinks its Lyapunov function in expectation with every local step.

    1 - min(gamma min_i(alpha_i^2 mu_i), chance^2), with gamma from `scaffnew_step`.

    Parameters
    ----------
    mixture
        Constants of the problem.
    chance
        Probability of communicating after a local step; that of `scaffnew_chance` if not given.

    Returns
    -------
    float
        The factor per local step; there are 1 / chance of them in a round.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_rates
    >>> flix_rates.scaffnew_rate(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)))
    0.75
    """
    chance = scaffnew_chance(mixture) if chance is None else chance
    least = float((mixture.alpha.square() * mixture.convexity).min())
    return 1.0 - min(scaffnew_step(mixture) * max(0.0, least), chance**2)


def running_certificate(mixture: Mixture, squared_gradient: float, lr: float = 0.0) -> float:
    """Bound f~ - min f~ after a gradient step from a point where |grad f~|^2 is known.

    f~ is mu_alpha-strongly convex, so the gap there is at most |grad|^2 / (2 mu_alpha), and a step of size lr lowers f~
    by at least lr (1 - L_alpha lr / 2) |grad|^2.

    Parameters
    ----------
    mixture
        Constants of the problem.
    squared_gradient
        |grad f~(x)|^2 of all clients and rows.
    lr
        Step size; 0 bounds the gap at x itself.

    Returns
    -------
    float
        The bound; infinite without strong convexity.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_rates
    >>> mixture = flix.Mixture.equal(1.0, torch.tensor([4.0, 4.0]), torch.ones(2))
    >>> flix_rates.running_certificate(mixture, 2.0), flix_rates.running_certificate(mixture, 2.0, lr=0.25)
    (1.0, 0.75)
    """
    if mixture.mu <= 0:
        return math.inf
    return max(0.0, 0.5 / mixture.mu - lr * (1.0 - 0.5 * mixture.L * lr)) * squared_gradient


def curved_certificate(mixture: Mixture, along: float, squared_gradient: float, lr: float = 0.0) -> float:
    """Bound f~ - min f~ after a gradient step from how little the clients' losses curve near that point.

    If M_i is below the Hessian of f_i(T_i) between x and the minimiser, f~ - min f~ <= g'(mean M_i)^-1 g / 2 at x. And
    1 / (g'M^-1 g) = min v'Mv over g'v = 1 is concave in M, so it is at least the mean of the clients' minima, for which
    each sends one number. With M_i = alpha_i^2 mu_i it is `running_certificate`.

    Parameters
    ----------
    mixture
        Constants of the problem.
    along
        Mean over clients of min v'M_i v over g'v = 1, where g = grad f~(x).
    squared_gradient
        |g|^2.
    lr
        Step size; 0 bounds the gap at x itself.

    Returns
    -------
    float
        The bound; infinite if nothing curves.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_rates
    >>> mixture = flix.Mixture.equal(1.0, torch.tensor([4.0, 4.0]), torch.ones(2))
    >>> flix_rates.curved_certificate(mixture, 0.5, 2.0), flix_rates.curved_certificate(mixture, 1.0, 2.0, lr=0.25)
    (1.0, 0.25)
    """
    if along <= 0:
        return math.inf
    return max(0.0, 0.5 / along - lr * (1.0 - 0.5 * mixture.L * lr) * squared_gradient)


def diana_scale(mixture: Mixture, omega: float, gap: float) -> float:
    """Return the scale of DIANA's bound: its expected gap after k rounds is at most scale * rate^k.

    |x - x*|^2 <= 2 gap / mu and mean |h_i - G_i(x*)|^2 <= 2 max_i(alpha_i^2 L_i) gap bound the Lyapunov function
    |x - x*|^2 + 4 gamma^2 omega / (n beta) mean |h_i - G_i(x*)|^2, and f~ - min f~ <= L_alpha / 2 |x - x*|^2.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor.
    gap
        f~(x) - min f~ at the start.

    Returns
    -------
    float
        The scale.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_rates
    >>> flix_rates.diana_scale(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)), omega=0.0, gap=1.0)
    4.0
    """
    gamma, beta = diana_step(mixture, omega), diana_beta(omega)
    shifts = 2.0 * float(mixture.curvatures.max()) * gap
    energy = 2.0 * gap / mixture.mu + 4.0 * gamma**2 * omega / (mixture.n * beta) * shifts
    return 0.5 * mixture.L * energy


def gap_bounds(
    solver: str, mixture: Mixture, omega: float, delta: float, gap: float, rounds: int
) -> list[float]:
    """Bound the gap after 0, 1, ..., rounds - 1 steps of gradient descent or EF21, or of DIANA in expectation.

    Parameters
    ----------
    solver
        "dgd", "ef21" or "diana".
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, for diana.
    delta
        Contraction of the compressor, for ef21.
    gap
        f~(x) - min f~ at the start.
    rounds
        How many bounds to return.

    Returns
    -------
    list of float
        One bound per number of steps.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_rates
    >>> mixture = flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2))
    >>> flix_rates.gap_bounds("dgd", mixture, 0.0, 1.0, gap=1.0, rounds=3)
    [1.0, 0.75, 0.5625]
    """
    if solver != "diana" or gap == 0:
        rate = ef21_rate(mixture, delta) if solver == "ef21" else dgd_rate(mixture)
        return [gap * rate**k for k in range(rounds)]
    scale, rate = diana_scale(mixture, omega, gap), diana_rate(mixture, omega)
    return [gap, *(scale * rate**k for k in range(1, rounds))]


def dcgd_floor(mixture: Mixture, omega: float | Tensor, grads: Tensor) -> float:
    """Bound DCGD's E|x - x*|^2 in the long run by 2 gamma / (mu n) mean omega_i |G_i(x*)|^2.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n].
    grads
        Gradients G_i(x*) of the clients' terms at the minimiser, [n, d].

    Returns
    -------
    float
        The bound.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_rates
    >>> flix_rates.dcgd_floor(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)), 1.0, torch.ones(2, 3))
    6.0
    """
    noise = float((grads.double().square().sum(-1) * omega).mean())
    return 2.0 * dcgd_step(mixture, omega) / (mixture.mu * mixture.n) * noise

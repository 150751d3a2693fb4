"""FLIX in theory: rates of its solvers, rounds until an accuracy, and the personalisation that a budget allows.

Gasanov, Khaled, Horvath, Richtarik, "FLIX: A Simple and Communication-Efficient Alternative to Local Methods
in Federated Learning" (AISTATS 2022), with DCGD's neighbourhood corrected: it has the cube of the smoothness. `flix`
has the constants and step sizes.
"""

from __future__ import annotations

import math

from torch import Tensor

from coterie._core.errors import SettingError
from coterie.theory.flix import Mixture, dcgd_step, dgd_step, diana_beta, diana_step, one_shot_alpha

NOT_STRONGLY_CONVEX = (
    "the number of rounds needs strongly convex local losses: set l2 > 0 (and no free intercept), or plan without "
    "a target"
)


def dgd_rate(mixture: Mixture) -> float:
    """Return the factor by which gradient descent shrinks the gap every round, 1 - mu_alpha / L_alpha.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_rounds
    >>> flix_rounds.dgd_rate(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)))
    0.75
    """
    return 1.0 - mixture.mu * dgd_step(mixture)


def diana_rate(mixture: Mixture, omega: float) -> float:
    """Return the factor by which DIANA shrinks its Lyapunov function in expectation.

    max(1 - gamma mu_alpha, 1 - beta / 2), with gamma from `diana_step` and beta from `diana_beta`.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor.

    Returns
    -------
    float
        The factor per round.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_rounds
    >>> flix_rounds.diana_rate(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)), omega=1.0)
    0.9375
    """
    return max(1.0 - diana_step(mixture, omega) * mixture.mu, 1.0 - 0.5 * diana_beta(omega))


def dgd_rounds(mixture: Mixture, gap: float, eps: float) -> int:
    """Return the rounds after which gradient descent is eps-accurate.

    Parameters
    ----------
    mixture
        Constants of the problem.
    gap
        f~(x) - min f~ at the start.
    eps
        Accuracy of f~.

    Returns
    -------
    int
        Number of rounds.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_rounds
    >>> flix_rounds.dgd_rounds(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)), gap=1.0, eps=1e-3)
    25
    """
    return _rounds(gap, eps, dgd_rate(mixture), mixture)


def diana_rounds(mixture: Mixture, omega: float, gap: float, eps: float) -> int:
    """Return the rounds after which DIANA, its shifts started at the gradients, is eps-accurate in expectation.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor.
    gap
        f~(x) - min f~ at the start.
    eps
        Accuracy of f~.

    Returns
    -------
    int
        Number of rounds.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_rounds
    >>> mixture = flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2))
    >>> flix_rounds.diana_rounds(mixture, 1.0, gap=1.0, eps=1e-3)
    130
    """
    if mixture.mu <= 0 or gap <= eps:
        return _rounds(gap, eps, 1.0, mixture)
    return _rounds(max(gap, diana_scale(mixture, omega, gap)), eps, diana_rate(mixture, omega), mixture)


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
    >>> from coterie.theory import flix, flix_rounds
    >>> flix_rounds.diana_scale(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)), omega=0.0, gap=1.0)
    4.0
    """
    gamma, beta = diana_step(mixture, omega), diana_beta(omega)
    shifts = 2.0 * float(mixture.curvatures.max()) * gap
    energy = 2.0 * gap / mixture.mu + 4.0 * gamma**2 * omega / (mixture.n * beta) * shifts
    return 0.5 * mixture.L * energy


def gap_bounds(solver: str, mixture: Mixture, omega: float, gap: float, rounds: int) -> list[float]:
    """Bound the gap after 0, 1, ..., rounds - 1 steps of gradient descent, or of DIANA in expectation.

    Parameters
    ----------
    solver
        "dgd" or "diana".
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor.
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
    >>> from coterie.theory import flix, flix_rounds
    >>> flix_rounds.gap_bounds("dgd", flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)), 0.0, 1.0, 3)
    [1.0, 0.75, 0.5625]
    """
    if solver != "diana" or gap == 0:
        return [gap * dgd_rate(mixture) ** k for k in range(rounds)]
    scale, rate = diana_scale(mixture, omega, gap), diana_rate(mixture, omega)
    return [gap, *(scale * rate**k for k in range(1, rounds))]


def dcgd_floor(mixture: Mixture, omega: float, grads: Tensor) -> float:
    """Bound DCGD's E|x - x*|^2 in the long run by 2 gamma / (mu n) mean omega |G_i(x*)|^2.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor.
    grads
        Gradients G_i(x*) of the clients' terms at the minimiser, [n, d].

    Returns
    -------
    float
        The bound.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_rounds
    >>> flix_rounds.dcgd_floor(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)), 1.0, torch.ones(2, 3))
    6.0
    """
    noise = omega * float(grads.double().square().sum(-1).mean())
    return 2.0 * dcgd_step(mixture, omega) / (mixture.mu * mixture.n) * noise


def rounds_for_alpha(alpha: float, eps: float, smoothness: float, convexity: float, spread: float) -> int:
    """Return the gradient steps after the one-shot average that an equal alpha needs: ceil(ln(alpha / A) / ln q).

    Parameters
    ----------
    alpha
        The common mixing weight.
    eps
        Accuracy of f~.
    smoothness
        Mean smoothness of the clients' losses.
    convexity
        Mean strong convexity of the clients' losses.
    spread
        V of the local models.

    Returns
    -------
    int
        Number of steps; 0 if the one-shot average is accurate enough.

    Examples
    --------
    >>> from coterie.theory import flix_rounds
    >>> flix_rounds.rounds_for_alpha(alpha=0.5, eps=0.01, smoothness=2.0, convexity=0.5, spread=1.0)
    12
    """
    start = math.sqrt(2.0 * eps / (smoothness * spread)) if smoothness * spread > 0 else math.inf
    if alpha <= start:
        return 0
    if convexity <= 0:
        raise SettingError(NOT_STRONGLY_CONVEX)
    if convexity >= smoothness:
        return 1
    return math.ceil(math.log(alpha / start) / -0.5 / math.log1p(-convexity / smoothness) - 1e-9)


def alpha_for_rounds(rounds: int, eps: float, smoothness: float, convexity: float, spread: float) -> float:
    """Return the largest equal alpha that `rounds` gradient steps after the one-shot average make eps-accurate.

    Parameters
    ----------
    rounds
        Number of gradient steps.
    eps
        Accuracy of f~.
    smoothness
        Mean smoothness of the clients' losses.
    convexity
        Mean strong convexity of the clients' losses.
    spread
        V of the local models.

    Returns
    -------
    float
        alpha, at most 1.

    Examples
    --------
    >>> from coterie.theory import flix_rounds
    >>> round(flix_rounds.alpha_for_rounds(5, eps=0.01, smoothness=2.0, convexity=0.5, spread=1.0), 4)
    0.2053
    """
    start = one_shot_alpha(eps, smoothness, spread)
    if rounds < 1 or start >= 1.0:
        return start
    if convexity >= smoothness:
        return 1.0
    log_q = -0.5 * math.log1p(-max(0.0, convexity) / smoothness)
    return 1.0 if math.log(start) + rounds * log_q >= 0 else start * math.exp(rounds * log_q)


def _rounds(gap: float, eps: float, rate: float, mixture: Mixture) -> int:
    if eps <= 0:
        raise SettingError(f"the target is {eps}; it must be positive")
    if gap <= eps:
        return 0
    if mixture.mu <= 0:
        raise SettingError(NOT_STRONGLY_CONVEX)
    return 1 if rate <= 0 else math.ceil(math.log(eps / gap) / math.log(rate) - 1e-9)

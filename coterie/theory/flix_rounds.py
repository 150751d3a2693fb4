"""FLIX in theory: rounds until an accuracy, and the personalisation that a budget allows; see `flix_rates`."""

from __future__ import annotations

import math

from coterie._core.errors import SettingError
from coterie.theory.flix import Mixture, one_shot_alpha
from coterie.theory.flix_rates import dgd_rate, diana_rate, diana_scale, ef21_rate, scaffnew_rate
from coterie.theory.flix_steps import scaffnew_chance, scaffnew_step

NOT_STRONGLY_CONVEX = (
    "the number of rounds needs strongly convex local losses: set l2 > 0 (and no free intercept), or plan without "
    "a target"
)


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


def ef21_rounds(mixture: Mixture, delta: float, gap: float, eps: float) -> int:
    """Return the rounds after which EF21, its g_i started at the gradients, is eps-accurate.

    Parameters
    ----------
    mixture
        Constants of the problem.
    delta
        Contraction of the compressor.
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
    >>> flix_rounds.ef21_rounds(mixture, 0.5, gap=1.0, eps=1e-3)
    119
    """
    return _rounds(gap, eps, ef21_rate(mixture, delta), mixture)


def scaffnew_rounds(mixture: Mixture, gap: float, eps: float) -> int:
    """Return the expected number of rounds in which Scaffnew takes the local steps that make it eps-accurate.

    mean |x_i - x*|^2 + (lr / chance)^2 mean |h_i - G_i(x*)|^2 shrinks by `scaffnew_rate` with every local step. It
    starts at most at 2 gap / mu_alpha + 2 (lr / chance)^2 max_i(alpha_i^2 L_i) gap, if h_i = 0 and `gap` bounds mean
    f_i(T_i(x)) - f_i(x_i); and f~ - min f~ is at most L_alpha / 2 times its first term. Accuracy is in expectation.

    Parameters
    ----------
    mixture
        Constants of the problem.
    gap
        Certificate at the start: mean f_i(T_i(x)) - f_i(x_i).
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
    >>> mixture = flix.Mixture.equal(0.5, torch.tensor([400.0, 400.0]), torch.ones(2))
    >>> flix_rounds.scaffnew_rounds(mixture, gap=1.0, eps=1e-3), flix_rounds.dgd_rounds(mixture, gap=1.0, eps=1e-3)
    (272, 2760)
    """
    chance, step = scaffnew_chance(mixture), scaffnew_step(mixture)
    rate = scaffnew_rate(mixture, chance)
    if mixture.mu <= 0 or gap <= eps or rate >= 1:
        return _rounds(gap, eps, 1.0, mixture)
    shifts = 2.0 * (step / chance) ** 2 * float(mixture.curvatures.max()) * gap
    scale = 0.5 * mixture.L * (2.0 * gap / mixture.mu + shifts)
    return math.ceil(chance * _rounds(max(gap, scale), eps, rate, mixture))


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

"""FLIX in theory: step sizes of its solvers, from the constants of the mixed problem.

Gasanov, Khaled, Horvath, Richtarik (AISTATS 2022) for gradient descent, DCGD and DIANA, with the constants corrected;
EF21 and Scaffnew with each client's loss replaced by its mixture's, whose smoothness is alpha_i^2 L_i.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from coterie.theory.flix import Mixture

Omega = TypeVar("Omega", float, Tensor)


def dgd_step(mixture: Mixture) -> float:
    """Return the step size of distributed gradient descent, 1 / L_alpha.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_steps
    >>> flix_steps.dgd_step(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)))
    1.0
    """
    return _inverse(mixture.L)


def dcgd_step(mixture: Mixture, omega: float | Tensor) -> float:
    """Return DCGD's step size, 1 / (L_alpha + 2 max_i(omega_i alpha_i^2 L_i) / n).

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n].

    Returns
    -------
    float
        The step size.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_steps
    >>> flix_steps.dcgd_step(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)), omega=1.0)
    0.5
    """
    return _inverse(mixture.L + 2.0 * mixture.noisiest(omega) / mixture.n)


def diana_step(mixture: Mixture, omega: float | Tensor) -> float:
    """Return DIANA's step size, 1 / (L_alpha + 6 omega max_i(alpha_i^2 L_i) / n).

    If every client has its own omega_i, it is 1 / (L_alpha + 2 max_i(omega_i alpha_i^2 L_i) / n + 4 max_i(beta_i
    omega_i alpha_i^2 L_i) / (n min_i beta_i)) with beta_i from `diana_beta`.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n].

    Returns
    -------
    float
        The step size.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_steps
    >>> flix_steps.diana_step(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)), omega=1.0)
    0.25
    """
    betas = diana_beta(torch.as_tensor(omega, dtype=torch.float64))
    shifts = mixture.noisiest(betas * omega) / float(betas.min())
    return _inverse(mixture.L + (2.0 * mixture.noisiest(omega) + 4.0 * shifts) / mixture.n)


def diana_beta(omega: Omega) -> Omega:
    """Return the step size of DIANA's shifts, 1 / (1 + omega); one for each client if omega is.

    Examples
    --------
    >>> from coterie.theory import flix, flix_steps
    >>> flix_steps.diana_beta(omega=3.0)
    0.25
    """
    return 1.0 / (1.0 + omega)


def diana_step_nonconvex(mixture: Mixture, omega: float | Tensor) -> float:
    """Return DIANA's step size for losses that are not convex, Theorem 9.

    u / L_rms with the largest u that has u + 2 eta u^2 <= 1 and 4 eta u^2 <= 1, where eta = (1 + 2 (1 + omega)) (1 +
    omega) omega / n. It has the root mean square of alpha_i^2 L_i, because Jensen's inequality rules out L_alpha.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n]; then 1 + omega is the largest and omega the mean
        with weights alpha_i^4 L_i^2.

    Returns
    -------
    float
        The step size.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_steps
    >>> round(flix_steps.diana_step_nonconvex(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)), 1.0), 4)
    0.2236
    """
    if mixture.L_rms == 0:
        return 0.0
    slowest = 1.0 + float(torch.as_tensor(omega).max())
    noise = float((mixture.stationary_weights * omega).sum())
    eta = (1.0 + 2.0 * slowest) * slowest * noise / mixture.n
    first = math.inf if eta == 0 else 0.5 / math.sqrt(eta)
    return _inverse(mixture.L_rms) * min(first, 2.0 / (math.sqrt(1.0 + 8.0 * eta) + 1.0))


def dcgd_step_nonconvex(mixture: Mixture, omega: float | Tensor, rounds: int | None = None) -> float:
    """Return DCGD's step size for losses that are not convex, Theorem 8: 1 / L_alpha, or less for many rounds.

    The gap may grow by a factor 1 + L_alpha lr^2 A in a round, A = max_i(omega_i alpha_i^2 L_i) / n. With lr <= 1 /
    sqrt(L_alpha A rounds) it does not grow by more than e in all.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n].
    rounds
        Rounds that will be taken, if they are known.

    Returns
    -------
    float
        The step size.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_steps
    >>> mixture = flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.zeros(2))
    >>> flix_steps.dcgd_step_nonconvex(mixture, 2.0), flix_steps.dcgd_step_nonconvex(mixture, 2.0, rounds=100)
    (1.0, 0.1)
    """
    noise = mixture.L * mixture.noisiest(omega) / mixture.n * (rounds or 0)
    return min(dgd_step(mixture), 1.0 / math.sqrt(noise)) if noise > 0 else dgd_step(mixture)


def ef21_step(mixture: Mixture, delta: float) -> float:
    """Return EF21's step size: the smaller of 1 / (L_alpha + L_rms sqrt(2 b / theta)) and theta / (2 mu_alpha).

    theta = 1 - sqrt(1 - delta), b = (1 - delta) / theta (Richtarik, Sokolov, Fatkhullin, NeurIPS 2021). Without strong
    convexity it is 1 / (L_alpha + L_rms sqrt(b / theta)).

    Parameters
    ----------
    mixture
        Constants of the problem.
    delta
        Contraction of the compressor: |C(v) - v|^2 <= (1 - delta) |v|^2.

    Returns
    -------
    float
        The step size.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_steps
    >>> mixture = flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2))
    >>> flix_steps.ef21_step(mixture, delta=1.0) == flix_steps.dgd_step(mixture)
    True
    """
    theta = 1.0 - math.sqrt(1.0 - delta)
    ratio = (1.0 - delta) / theta**2
    if mixture.mu <= 0:
        return _inverse(mixture.L + mixture.L_rms * math.sqrt(ratio))
    first = _inverse(mixture.L + mixture.L_rms * math.sqrt(2.0 * ratio))
    return first if delta == 1.0 else min(first, 0.5 * theta / mixture.mu)


def scaffnew_step(mixture: Mixture) -> float:
    """Return Scaffnew's step size of local steps, 1 / max_i(alpha_i^2 L_i).

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_steps
    >>> flix_steps.scaffnew_step(flix.Mixture.equal(0.5, torch.tensor([4.0, 8.0]), torch.ones(2)))
    0.5
    """
    return _inverse(float(mixture.curvatures.max()))


def scaffnew_chance(mixture: Mixture) -> float:
    """Return the probability with which Scaffnew communicates after a local step, 1 / sqrt(kappa).

    kappa = max_i(alpha_i^2 L_i) / min_i(alpha_i^2 mu_i) (Mishchenko, Malinovsky, Stich, Richtarik, ICML 2022). It is 1
    where a client's loss is not strongly convex, since theory then knows no other.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_steps
    >>> flix_steps.scaffnew_chance(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)))
    0.5
    """
    least = float((mixture.alpha.square() * mixture.convexity).min())
    return math.sqrt(least * scaffnew_step(mixture)) if least > 0 else 1.0


def step(
    solver: str,
    mixture: Mixture,
    omega: float | Tensor = 0.0,
    delta: float = 1.0,
    convex: bool = True,
    rounds: int | None = None,
) -> float:
    """Return the step size of a solver.

    Parameters
    ----------
    solver
        "dgd", "dcgd", "diana", "ef21" or "scaffnew".
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, for dcgd and diana.
    delta
        Contraction of the compressor, for ef21.
    convex
        Whether the clients' losses are convex.
    rounds
        Rounds that will be taken, if they are known: dcgd takes shorter steps for more of them if losses are not
        convex.

    Returns
    -------
    float
        The step size.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_steps
    >>> flix_steps.step("dgd", flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.ones(2)))
    1.0
    """
    if solver == "dcgd":
        return dcgd_step(mixture, omega) if convex else dcgd_step_nonconvex(mixture, omega, rounds)
    if solver == "diana":
        return diana_step(mixture, omega) if convex else diana_step_nonconvex(mixture, omega)
    if solver == "ef21":
        return ef21_step(mixture, delta)
    return scaffnew_step(mixture) if solver == "scaffnew" else dgd_step(mixture)


def _inverse(value: float) -> float:
    """Return 1 / value, and 0 for 0: where nothing curves (alpha = 0) nothing moves."""
    return 1.0 / value if value > 0 else 0.0

"""FLIX in theory: bounds on the iterates of DCGD and DIANA for convex losses, and the moments they rest on.

Gasanov, Khaled, Horvath, Richtarik (AISTATS 2022), Theorems 4 to 7 and Corollaries 1 to 4, with the constants
corrected; `flix_nonconvex` has Theorems 8 and 9. A compressor has E|C(v) - v|^2 <= omega |v|^2, and `omega` is one
number or one per client, [n]. All bounds are in expectation over the compressors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.theory.flix import Mixture
from coterie.theory.flix_rates import dcgd_floor, diana_rate
from coterie.theory.flix_steps import dcgd_step, diana_beta, diana_step


@dataclass(frozen=True)
class EstimateMoments:
    """Constants of an estimate g of the gradient of f~, in terms of gap = f~(x) - min f~.

    E|g|^2 <= 2 A gap + B sigma^2 + D, and the next sigma^2 is at most (1 - rho) sigma^2 + 2 C gap in expectation.

    Parameters
    ----------
    A, B, C, D, rho
        The constants.

    Examples
    --------
    >>> from coterie.theory.flix_bounds import EstimateMoments
    >>> EstimateMoments(A=1.0, B=2.0, C=0.5, rho=0.5).penalised
    3.0
    """

    A: float
    B: float = 0.0
    C: float = 0.0
    D: float = 0.0
    rho: float = 1.0

    @property
    def penalised(self) -> float:
        """A + B C / rho: what A becomes once sigma^2 is paid for."""
        return self.A + self.B * self.C / self.rho


def dcgd_moments(mixture: Mixture, omega: float | Tensor, grads: Tensor) -> EstimateMoments:
    """Return the constants of DCGD.

    A = L_alpha + 2 max_i(omega_i alpha_i^2 L_i) / n and D = 2 sum omega_i |G_i(x*)|^2 / n^2.

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
    Moments
        The constants.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_bounds
    >>> mixture = flix.Mixture.equal(1.0, torch.tensor([4.0, 4.0]), torch.ones(2))
    >>> flix_bounds.dcgd_moments(mixture, omega=1.0, grads=torch.ones(2, 3))
    EstimateMoments(A=8.0, B=0.0, C=0.0, D=3.0, rho=1.0)
    """
    return EstimateMoments(
        A=mixture.L + 2.0 * mixture.noisiest(omega) / mixture.n,
        D=2.0 * float((grads.double().square().sum(-1) * omega).mean()) / mixture.n,
    )


def diana_moments(mixture: Mixture, omega: float | Tensor) -> EstimateMoments:
    """Return the constants of DIANA, with sigma^2 = sum omega_i |h_i - G_i(x*)|^2 / n^2.

    A is DCGD's, B = 2, rho = min_i beta_i and C = max_i(beta_i omega_i alpha_i^2 L_i) / n.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n].

    Returns
    -------
    Moments
        The constants.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_bounds
    >>> flix_bounds.diana_moments(flix.Mixture.equal(1.0, torch.tensor([4.0, 4.0]), torch.ones(2)), 1.0)
    EstimateMoments(A=8.0, B=2.0, C=1.0, D=0.0, rho=0.5)
    """
    betas = diana_beta(torch.as_tensor(omega, dtype=torch.float64))
    return EstimateMoments(
        A=mixture.L + 2.0 * mixture.noisiest(omega) / mixture.n,
        B=2.0,
        C=mixture.noisiest(betas * omega) / mixture.n,
        rho=float(betas.min()),
    )


def dcgd_distances(
    mixture: Mixture, omega: float | Tensor, start: float, grads: Tensor, rounds: int
) -> list[float]:
    """Bound DCGD's E|x - x*|^2 after 0, 1, ..., rounds - 1 steps: Theorem 4.

    (1 - gamma mu_alpha)^k |x0 - x*|^2 plus `dcgd_floor`, with gamma from `dcgd_step`.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n].
    start
        |x0 - x*|^2.
    grads
        Gradients G_i(x*) of the clients' terms at the minimiser, [n, d].
    rounds
        How many bounds to return.

    Returns
    -------
    list of float
        One bound per number of steps.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_bounds
    >>> mixture = flix.Mixture.equal(1.0, torch.tensor([4.0, 4.0]), 4 * torch.ones(2))
    >>> flix_bounds.dcgd_distances(mixture, 1.0, 1.0, torch.zeros(2, 3), rounds=3)
    [1.0, 0.5, 0.25]
    """
    rate, floor = 1.0 - dcgd_step(mixture, omega) * mixture.mu, dcgd_floor(mixture, omega, grads)
    return [start * rate**k + (floor if k else 0.0) for k in range(rounds)]


def slopes_at_minimum(mixture: Mixture, spread: float) -> float:
    """Bound mean |G_i(x*)|^2 by max_i(alpha_i^2 L_i) L_alpha V, without knowing x*.

    |G_i(x)|^2 <= 2 alpha_i^2 L_i (f_i(T_i(x)) - f_i(x_i)), and at x* the mean of the brackets is at most what it is at
    the one-shot average, L_alpha V / 2.

    Parameters
    ----------
    mixture
        Constants of the problem.
    spread
        V, from `Mixture.spread`.

    Returns
    -------
    float
        The bound.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_bounds
    >>> flix_bounds.slopes_at_minimum(flix.Mixture.equal(0.5, torch.tensor([4.0, 8.0]), torch.ones(2)), spread=2.0)
    6.0
    """
    return float(mixture.curvatures.max()) * mixture.L * spread


def dcgd_neighbourhood(mixture: Mixture, omega: float | Tensor, spread: float) -> float:
    """Bound DCGD's E|x - x*|^2 in the long run from the local models alone: Corollary 1, sharpened.

    `dcgd_floor` with `slopes_at_minimum`. For equal alpha it is 2 gamma_0 omega max(L) mean(L) V / (n mean(mu)),
    gamma_0 = gamma alpha^2: free of alpha, and at most the corollary's 2 gamma_0 omega max(L)^3 D^2 / (n mean(mu)^2).

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n]; then the largest counts.
    spread
        V, from `Mixture.spread`.

    Returns
    -------
    float
        The bound.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_bounds
    >>> for alpha in (0.25, 1.0):
    ...     mixture = flix.Mixture.equal(alpha, torch.tensor([4.0, 4.0]), torch.ones(2))
    ...     print(flix_bounds.dcgd_neighbourhood(mixture, omega=1.0, spread=2.0))
    4.0
    4.0
    """
    worst = float(torch.as_tensor(omega).max())
    noise = worst * slopes_at_minimum(mixture, spread)
    return 2.0 * dcgd_step(mixture, omega) / (mixture.mu * mixture.n) * noise


def diana_energy(mixture: Mixture, omega: float | Tensor, start: float, shifts: Tensor) -> float:
    """Return DIANA's Lyapunov function, |x - x*|^2 + 4 gamma^2 / rho sum omega_i |h_i - G_i(x*)|^2 / n^2.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n].
    start
        |x - x*|^2.
    shifts
        h_i - G_i(x*), [n, d].

    Returns
    -------
    float
        Its value.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_bounds
    >>> mixture = flix.Mixture.equal(1.0, torch.tensor([4.0, 4.0]), torch.ones(2))
    >>> flix_bounds.diana_energy(mixture, 1.0, start=1.0, shifts=torch.zeros(2, 3))
    1.0
    """
    noise = float((shifts.double().square().sum(-1) * omega).mean()) / mixture.n
    return start + 4.0 * diana_step(mixture, omega) ** 2 / diana_moments(mixture, omega).rho * noise


def diana_distances(mixture: Mixture, omega: float | Tensor, energy: float, rounds: int) -> list[float]:
    """Bound DIANA's E|x - x*|^2, and its Lyapunov function, after 0, 1, ..., rounds - 1 steps: Theorem 5.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n].
    energy
        The Lyapunov function at the start, from `diana_energy`.
    rounds
        How many bounds to return.

    Returns
    -------
    list of float
        One bound per number of steps.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_bounds
    >>> mixture = flix.Mixture.equal(1.0, torch.tensor([4.0, 4.0]), 4 * torch.ones(2))
    >>> flix_bounds.diana_distances(mixture, omega=1.0, energy=1.0, rounds=3)
    [1.0, 0.75, 0.5625]
    """
    rate = diana_rate(mixture, omega)
    return [energy * rate**k for k in range(rounds)]


def dcgd_average_gap(
    mixture: Mixture, omega: float | Tensor, lr: float, start: float, grads: Tensor, rounds: int
) -> float:
    """Bound DCGD's gap at the mean of its iterates x1, ..., xk without strong convexity: Theorem 6 and Corollary 3.

    (|x0 - x*|^2 + (k + 1) lr^2 D) / (2 lr (1 - lr A) k). For equal alpha, and lr = c / alpha^2, it is alpha^2 times
    what it is at alpha = 1 on quadratics.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n].
    lr
        Step size below `dcgd_step`; `FLIX.from_theory` takes a quarter of it.
    start
        |x0 - x*|^2.
    grads
        Gradients G_i(x*) of the clients' terms at the minimiser, [n, d].
    rounds
        Number of steps k.

    Returns
    -------
    float
        The bound.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_bounds
    >>> mixture = flix.Mixture.equal(1.0, torch.tensor([4.0, 4.0]), torch.zeros(2))
    >>> round(flix_bounds.dcgd_average_gap(mixture, 1.0, 1 / 32, 1.0, torch.zeros(2, 3), rounds=100), 4)
    0.2133
    """
    moments = dcgd_moments(mixture, omega, grads)
    spent = start + (rounds + 1) * lr**2 * moments.D
    return spent / (2.0 * lr * (1.0 - lr * moments.A) * rounds)


def diana_average_gap(
    mixture: Mixture, omega: float | Tensor, lr: float, start: float, shifts: Tensor, rounds: int
) -> float:
    """Bound DIANA's gap at the mean of its iterates x1, ..., xk without strong convexity: Theorem 7 and Corollary 4.

    (|x0 - x*|^2 + 2 lr^2 / rho sum omega_i |h_i - G_i(x*)|^2 / n^2) / (2 lr (1 - lr (A + 2 C / rho)) k).

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n].
    lr
        Step size below `diana_step`; `FLIX.from_theory` takes a quarter of it.
    start
        |x0 - x*|^2.
    shifts
        h_i - G_i(x*) at the start, [n, d].
    rounds
        Number of steps k.

    Returns
    -------
    float
        The bound.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_bounds
    >>> mixture = flix.Mixture.equal(1.0, torch.tensor([4.0, 4.0]), torch.zeros(2))
    >>> round(flix_bounds.diana_average_gap(mixture, 1.0, 1 / 64, 1.0, torch.zeros(2, 3), rounds=100), 4)
    0.3938
    """
    moments = diana_moments(mixture, omega)
    noise = float((shifts.double().square().sum(-1) * omega).mean()) / mixture.n
    spent = start + moments.B / moments.rho * lr**2 * noise
    return spent / (2.0 * lr * (1.0 - lr * moments.penalised) * rounds)

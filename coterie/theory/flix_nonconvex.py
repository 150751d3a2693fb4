"""FLIX in theory: how small its gradient becomes if losses are not convex, and the rounds that takes.

Gasanov, Khaled, Horvath, Richtarik (AISTATS 2022), Theorems 8 and 9 and Corollaries 5 and 6, with DIANA's constant
corrected to the root mean square of alpha_i^2 L_i. `gap` is f~(x0) - inf f~ or a bound on it, such as
`flix.certificate`. A compressor has E|C(v) - v|^2 <= omega |v|^2, with one omega for all clients or one for each,
[n]. Bounds are in expectation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.theory.flix import Mixture
from coterie.theory.flix_steps import dgd_step, diana_step_nonconvex


def dcgd_noise(mixture: Mixture, omega: float | Tensor, floor: float) -> tuple[float, float]:
    """Return A and C with E|g|^2 <= 2 A (f~(x) - inf f~) + |grad f~(x)|^2 + C for the compressed gradient g.

    A = max_i(omega_i alpha_i^2 L_i) / n and C = 2 A floor; the paper has twice this A.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n].
    floor
        inf f~ - mean inf f_i: what the best mixtures lose against everybody's own minimum, or a bound on it.

    Returns
    -------
    tuple of float
        A and C.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_nonconvex
    >>> flix_nonconvex.dcgd_noise(flix.Mixture.equal(1.0, torch.tensor([4.0, 4.0]), torch.zeros(2)), 1.0, floor=0.5)
    (2.0, 2.0)
    """
    noise = mixture.noisiest(omega) / mixture.n
    return noise, 2.0 * noise * floor


def dcgd_gradient(
    mixture: Mixture, omega: float | Tensor, lr: float, gap: float, floor: float, rounds: int
) -> float:
    """Bound the least E|grad f~(x_t)|^2 over t < rounds of DCGD: Theorem 8.

    2 (1 + L_alpha lr^2 A)^k gap / (lr k) + L_alpha lr C, with A and C from `dcgd_noise`.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n].
    lr
        Step size, at most 1 / L_alpha.
    gap
        f~(x0) - inf f~.
    floor
        inf f~ - mean inf f_i.
    rounds
        Number of steps k.

    Returns
    -------
    float
        The bound.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_nonconvex
    >>> mixture = flix.Mixture.equal(1.0, torch.tensor([4.0, 4.0]), torch.zeros(2))
    >>> flix_nonconvex.dcgd_gradient(mixture, 0.0, lr=0.25, gap=1.0, floor=0.0, rounds=80)
    0.1
    """
    a, c = dcgd_noise(mixture, omega, floor)
    growth = rounds * math.log1p(mixture.L * lr**2 * a)
    return 2.0 * math.exp(min(growth, 700.0)) * gap / (lr * rounds) + mixture.L * lr * c


def dcgd_plan(
    mixture: Mixture, omega: float | Tensor, gap: float, floor: float, eps: float
) -> tuple[float, int]:
    """Return the step size and rounds that bring the least E|grad f~|^2 of DCGD to eps^2: Corollary 5.

    lr = min{1 / L_alpha, 1 / sqrt(L_alpha A k), eps^2 / (2 L_alpha C)} after k >= 12 gap L_alpha / eps^2 max{1, 12
    gap A / eps^2, 2 C / eps^2} rounds.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n].
    gap
        f~(x0) - inf f~.
    floor
        inf f~ - mean inf f_i.
    eps
        Bound on the gradient's norm.

    Returns
    -------
    tuple of float and int
        Step size and rounds.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_nonconvex
    >>> mixture = flix.Mixture.equal(1.0, torch.tensor([4.0, 4.0]), torch.zeros(2))
    >>> flix_nonconvex.dcgd_plan(mixture, 0.0, gap=1.0, floor=0.0, eps=0.5)
    (0.25, 192)
    """
    square = _target(eps)
    a, c = dcgd_noise(mixture, omega, floor)
    rounds = math.ceil(12.0 * gap * mixture.L / square * max(1.0, 12.0 * gap * a / square, 2.0 * c / square))
    longest = [dgd_step(mixture)]
    if a > 0:
        longest.append(1.0 / math.sqrt(mixture.L * a * max(1, rounds)))
    if c > 0:
        longest.append(square / (2.0 * mixture.L * c))
    return min(longest), rounds


def diana_gradient(
    mixture: Mixture, omega: float | Tensor, gap: float, rounds: int, shifts: Tensor | None = None
) -> float:
    """Bound the least E|grad f~(x_t)|^2 over t < rounds of DIANA: Theorem 9.

    2 (gap + c sum omega_i |h_i - G_i(x0)|^2 / n^2) / (gamma k), with gamma from `diana_step_nonconvex`, c = L gamma^2
    / (rho (1 - 2 eta u^2)), u = L gamma, L the root mean square of alpha_i^2 L_i and rho = 1 / (1 + max omega).
    Shifts that start at the gradients add nothing.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n].
    gap
        f~(x0) - inf f~.
    rounds
        Number of steps k.
    shifts
        h_i - G_i(x0), [n, d]; zero if not given.

    Returns
    -------
    float
        The bound.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_nonconvex
    >>> mixture = flix.Mixture.equal(1.0, torch.tensor([4.0, 4.0]), torch.zeros(2))
    >>> flix_nonconvex.diana_gradient(mixture, 0.0, gap=1.0, rounds=80)
    0.1
    """
    lr = diana_step_nonconvex(mixture, omega)
    noise = 0.0
    if shifts is not None:
        slowest = 1.0 + float(torch.as_tensor(omega).max())
        mean = float((mixture.stationary_weights * omega).sum())
        eta = (1.0 + 2.0 * slowest) * slowest * mean / mixture.n
        weight = mixture.L_rms * lr**2 * slowest / (1.0 - 2.0 * eta * (mixture.L_rms * lr) ** 2)
        noise = weight * float((shifts.double().square().sum(-1) * omega).mean()) / mixture.n
    return 2.0 * (gap + noise) / (lr * rounds)


def diana_rounds_nonconvex(mixture: Mixture, omega: float | Tensor, gap: float, eps: float) -> int:
    """Return the rounds after which the least E|grad f~|^2 of DIANA is at most eps^2: Corollary 6.

    Parameters
    ----------
    mixture
        Constants of the problem.
    omega
        Variance factor of the compressor, or one for each client, [n].
    gap
        f~(x0) - inf f~; the shifts start at the gradients.
    eps
        Bound on the gradient's norm.

    Returns
    -------
    int
        Number of rounds.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix, flix_nonconvex
    >>> mixture = flix.Mixture.equal(1.0, torch.tensor([4.0, 4.0]), torch.zeros(2))
    >>> flix_nonconvex.diana_rounds_nonconvex(mixture, 0.0, gap=1.0, eps=0.5)
    32
    """
    return math.ceil(2.0 * gap / (diana_step_nonconvex(mixture, omega) * _target(eps)) - 1e-9)


def _target(eps: float) -> float:
    if not eps > 0:
        raise SettingError(f"the target is {eps}; it must be positive")
    return eps**2

"""FLIX in theory: constants of the mixed problem, step sizes, rounds, certificates and budgets.

Gasanov, Khaled, Horvath, Richtarik, "FLIX: A Simple and Communication-Efficient Alternative to Local Methods
in Federated Learning" (AISTATS 2022), with the constants corrected: distances between local models enter
squared, and DCGD's neighbourhood has the cube of the smoothness. f~(x) = mean f_i(alpha_i x + (1 - alpha_i) x_i).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.errors import SettingError


@dataclass(frozen=True)
class Mixture:
    """Mixing weights, smoothness and strong convexity of every client, each [n]."""

    alpha: Tensor
    smoothness: Tensor
    convexity: Tensor

    def __post_init__(self) -> None:
        for name in ("alpha", "smoothness", "convexity"):
            object.__setattr__(self, name, getattr(self, name).detach().double().reshape(-1))

    @classmethod
    def equal(cls, alpha: float, smoothness: Tensor, convexity: Tensor) -> Mixture:
        """The same alpha for all."""
        alphas = torch.full((smoothness.numel(),), float(alpha), dtype=torch.float64)
        return cls(alphas, smoothness, convexity)

    @property
    def n(self) -> int:
        return len(self.alpha)

    @property
    def curvatures(self) -> Tensor:
        """alpha_i^2 L_i: the smoothness of client i's term as a function of x, [n]."""
        return self.alpha.square() * self.smoothness

    @property
    def L(self) -> float:
        """L_alpha, mean alpha_i^2 L_i."""
        return float(self.curvatures.mean())

    @property
    def mu(self) -> float:
        """mu_alpha, mean alpha_i^2 mu_i."""
        return float((self.alpha.square() * self.convexity).mean())

    @property
    def weights(self) -> Tensor:
        """Weights of the one-shot average, alpha_i^2 L_i / sum, [n]."""
        return self.curvatures / self.curvatures.sum()

    def average(self, own: Tensor) -> Tensor:
        """The one-shot model x_avg [d] of local models [n, d]."""
        return (self.weights.unsqueeze(-1).to(own) * own).sum(0)

    def spread(self, own: Tensor) -> float:
        """V = sum_i w_i |x_i - x_avg|^2."""
        gaps = (own - self.average(own)).square().sum(-1)
        return float((self.weights.to(gaps) * gaps).sum())


def diameter(own: Tensor) -> float:
    """D^2, the largest squared distance between two local models [n, d]."""
    return float(torch.cdist(own.double(), own.double()).square().max())


def one_shot_bound(mixture: Mixture, spread: float) -> float:
    """f~(x_avg) - min f~ is at most L_alpha V / 2."""
    return 0.5 * mixture.L * spread


def one_shot_diameter_bound(mixture: Mixture, squared_diameter: float) -> float:
    """The coarser bound alpha_max^2 mean(L) D^2 / 2, Theorem 1 with D squared."""
    return 0.5 * float(mixture.alpha.max()) ** 2 * float(mixture.smoothness.mean()) * squared_diameter


def certificate(mixed_losses: Tensor, own_losses: Tensor) -> float:
    """mean f_i(T_i(x)) - mean f_i(x_i): at least the gap at x, since no mixture beats a client's own minimum."""
    return float((mixed_losses - own_losses).mean())


def one_shot_alpha(eps: float, smoothness: float, spread: float) -> float:
    """The largest equal alpha whose one-shot average is eps-accurate: sqrt(2 eps / (mean(L) V)), at most 1."""
    scale = smoothness * spread
    return 1.0 if scale <= 2.0 * eps else math.sqrt(2.0 * eps / scale)


def stationary_alpha(eps: float, smoothness: Tensor, spread: float) -> float:
    """The largest equal alpha with |grad f~(x_avg)| <= eps for weights alpha^4 L_i^2: a fourth root."""
    scale = float(smoothness.double().square().mean()) * spread
    return 1.0 if scale <= eps**2 else (eps**2 / scale) ** 0.25


def dgd_step(mixture: Mixture) -> float:
    """1 / L_alpha."""
    return _inverse(mixture.L)


def dcgd_step(mixture: Mixture, omega: float) -> float:
    """1 / (L_alpha + 2 omega max_i(alpha_i^2 L_i) / n)."""
    return _inverse(mixture.L + 2.0 * omega * float(mixture.curvatures.max()) / mixture.n)


def diana_step(mixture: Mixture, omega: float) -> float:
    """1 / (L_alpha + 6 omega max_i(alpha_i^2 L_i) / n)."""
    return _inverse(mixture.L + 6.0 * omega * float(mixture.curvatures.max()) / mixture.n)


def diana_beta(omega: float) -> float:
    """How far a shift moves towards what was sent: 1 / (1 + omega)."""
    return 1.0 / (1.0 + omega)


def diana_step_nonconvex(mixture: Mixture, omega: float) -> float:
    """With the root mean square of alpha_i^2 L_i, since Jensen's inequality goes against L_alpha."""
    rms = float(mixture.curvatures.square().mean().sqrt())
    eta = (1.0 + omega) * omega * (1.0 + 2.0 * (1.0 + omega)) / mixture.n
    first = math.inf if eta == 0 else 0.5 / math.sqrt(eta)
    return _inverse(rms) * min(first, 2.0 / (math.sqrt(1.0 + 8.0 * eta) + 1.0))


def step(solver: str, mixture: Mixture, omega: float) -> float:
    """The step size of a solver on a strongly convex problem."""
    if solver == "dcgd":
        return dcgd_step(mixture, omega)
    return diana_step(mixture, omega) if solver == "diana" else dgd_step(mixture)


def dgd_rate(mixture: Mixture) -> float:
    """The gap shrinks by this factor a round: 1 - mu_alpha / L_alpha."""
    return 1.0 - mixture.mu * _inverse(mixture.L)


def diana_rate(mixture: Mixture, omega: float) -> float:
    """The Lyapunov function shrinks, in the mean, by max(1 - gamma mu_alpha, 1 - beta / 2)."""
    return max(1.0 - diana_step(mixture, omega) * mixture.mu, 1.0 - 0.5 * diana_beta(omega))


def dgd_rounds(mixture: Mixture, gap: float, eps: float) -> int:
    """Rounds after which gradient descent from a point with this gap is eps-accurate."""
    return _rounds(gap, eps, dgd_rate(mixture), mixture)


def diana_rounds(mixture: Mixture, omega: float, gap: float, eps: float) -> int:
    """Rounds after which DIANA, its shifts started at the gradients, is eps-accurate in the mean."""
    if mixture.mu <= 0 or gap <= eps:
        return _rounds(gap, eps, 1.0, mixture)
    return _rounds(max(gap, diana_scale(mixture, omega, gap)), eps, diana_rate(mixture, omega), mixture)


def diana_scale(mixture: Mixture, omega: float, gap: float) -> float:
    """DIANA's mean gap after k rounds from a point with this gap is at most scale * rate^k.

    |x - x*|^2 <= 2 gap / mu and mean |h_i - G_i(x*)|^2 <= 2 max_i(alpha_i^2 L_i) gap bound the Lyapunov function
    |x - x*|^2 + 4 gamma^2 omega / (n beta) mean |h_i - G_i(x*)|^2, and f~ - min f~ <= L_alpha / 2 |x - x*|^2.
    """
    gamma, beta = diana_step(mixture, omega), diana_beta(omega)
    shifts = 2.0 * float(mixture.curvatures.max()) * gap
    energy = 2.0 * gap / mixture.mu + 4.0 * gamma**2 * omega / (mixture.n * beta) * shifts
    return 0.5 * mixture.L * energy


def gap_bounds(solver: str, mixture: Mixture, omega: float, gap: float, rounds: int) -> list[float]:
    """What the gap stays below after 0, 1, ..., rounds - 1 steps of dgd, or of diana in the mean."""
    if solver != "diana" or gap == 0:
        return [gap * dgd_rate(mixture) ** k for k in range(rounds)]
    scale, rate = diana_scale(mixture, omega, gap), diana_rate(mixture, omega)
    return [gap, *(scale * rate**k for k in range(1, rounds))]


def dcgd_floor(mixture: Mixture, omega: float, slopes: Tensor) -> float:
    """What DCGD's E|x - x*|^2 stays below in the end: 2 gamma / (mu n) mean omega |G_i(x*)|^2, slopes [n, d]."""
    noise = omega * float(slopes.double().square().sum(-1).mean())
    return 2.0 * dcgd_step(mixture, omega) / (mixture.mu * mixture.n) * noise


def rounds_for_alpha(alpha: float, eps: float, smoothness: float, convexity: float, spread: float) -> int:
    """Gradient steps after the one-shot average that an equal alpha needs: ceil(ln(alpha / A) / ln q)."""
    start = math.sqrt(2.0 * eps / (smoothness * spread)) if smoothness * spread > 0 else math.inf
    if alpha <= start:
        return 0
    if convexity <= 0:
        raise SettingError(NOT_STRONGLY_CONVEX)
    if convexity >= smoothness:
        return 1
    return math.ceil(math.log(alpha / start) / -0.5 / math.log1p(-convexity / smoothness) - 1e-9)


def alpha_for_rounds(rounds: int, eps: float, smoothness: float, convexity: float, spread: float) -> float:
    """The largest equal alpha that `rounds` gradient steps after the one-shot average make eps-accurate."""
    start = one_shot_alpha(eps, smoothness, spread)
    if rounds < 1 or start >= 1.0:
        return start
    if convexity >= smoothness:
        return 1.0
    log_q = -0.5 * math.log1p(-max(0.0, convexity) / smoothness)
    return 1.0 if math.log(start) + rounds * log_q >= 0 else start * math.exp(rounds * log_q)


NOT_STRONGLY_CONVEX = (
    "the number of rounds needs strongly convex local losses: set l2 > 0 (and no free intercept), or plan without "
    "a target"
)


def _rounds(gap: float, eps: float, rate: float, mixture: Mixture) -> int:
    if eps <= 0:
        raise SettingError(f"the target is {eps}; it must be positive")
    if gap <= eps:
        return 0
    if mixture.mu <= 0:
        raise SettingError(NOT_STRONGLY_CONVEX)
    return 1 if rate <= 0 else math.ceil(math.log(eps / gap) / math.log(rate) - 1e-9)


def _inverse(value: float) -> float:
    """1 / value, and zero for zero: where nothing curves (alpha = 0) nothing moves."""
    return 1.0 / value if value > 0 else 0.0

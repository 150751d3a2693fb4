"""FLIX in theory: constants of the mixed problem, and bounds for the one-shot average.

Gasanov, Khaled, Horvath, Richtarik, "FLIX: A Simple and Communication-Efficient Alternative to Local Methods
in Federated Learning" (AISTATS 2022), with the constants corrected: distances between local models enter
squared. FLIX minimises f~(x) = mean f_i(alpha_i x + (1 - alpha_i) x_i), x_i being client i's own minimiser.
`flix_steps` has step sizes, `flix_rounds` rates and rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixture:
    """Constants of FLIX's mixed problem.

    Parameters
    ----------
    alpha
        Mixing weight of each client, [n].
    smoothness
        Smoothness L_i of each client's loss, [n].
    convexity
        Strong convexity mu_i of each client's loss, [n].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.flix import Mixture
    >>> mixture = Mixture(torch.tensor([0.5, 1.0]), torch.tensor([4.0, 2.0]), torch.tensor([1.0, 1.0]))
    >>> mixture.L, mixture.mu, mixture.weights.round(decimals=3).tolist()
    (1.5, 0.625, [0.333, 0.667])
    """

    alpha: Tensor
    smoothness: Tensor
    convexity: Tensor

    def __post_init__(self) -> None:
        for name in ("alpha", "smoothness", "convexity"):
            object.__setattr__(self, name, getattr(self, name).detach().double().reshape(-1))

    @classmethod
    def equal(cls, alpha: float, smoothness: Tensor, convexity: Tensor) -> Mixture:
        """Return the mixture with the same alpha for all clients.

        Parameters
        ----------
        alpha
            The common mixing weight.
        smoothness
            Smoothness of each client's loss, [n].
        convexity
            Strong convexity of each client's loss, [n].

        Returns
        -------
        Mixture
            The constants.
        """
        alphas = torch.full((smoothness.numel(),), float(alpha), dtype=torch.float64)
        return cls(alphas, smoothness, convexity)

    @property
    def n(self) -> int:
        """Number of clients."""
        return len(self.alpha)

    @property
    def curvatures(self) -> Tensor:
        """alpha_i^2 L_i: the smoothness of client i's term as a function of x, [n]."""
        return self.alpha.square() * self.smoothness

    @property
    def L(self) -> float:
        """L_alpha, the mean of alpha_i^2 L_i."""
        return float(self.curvatures.mean())

    @property
    def L_rms(self) -> float:
        """Root mean square of alpha_i^2 L_i, which stands for L_alpha where losses are not convex."""
        return float(self.curvatures.square().mean().sqrt())

    @property
    def mu(self) -> float:
        """mu_alpha, the mean of alpha_i^2 mu_i."""
        return float((self.alpha.square() * self.convexity).mean())

    @property
    def weights(self) -> Tensor:
        """Weights of the one-shot average: alpha_i^2 L_i, divided by their sum, [n]."""
        return self.curvatures / self.curvatures.sum()

    @property
    def stationary_weights(self) -> Tensor:
        """Weights of the average for losses that are not convex: alpha_i^4 L_i^2, divided by their sum, [n]."""
        return self.curvatures.square() / self.curvatures.square().sum()

    def average(self, own: Tensor, stationary: bool = False) -> Tensor:
        """Return the one-shot model x_avg [d] of local models [n, d], with `stationary_weights` if asked."""
        return (self._shares(stationary).unsqueeze(-1).to(own) * own).sum(0)

    def spread(self, own: Tensor, stationary: bool = False) -> float:
        """Return V = sum_i w_i |x_i - x_avg|^2 of local models [n, d], with `stationary_weights` if asked."""
        gaps = (own - self.average(own, stationary)).square().sum(-1)
        return float((self._shares(stationary).to(gaps) * gaps).sum())

    def noisiest(self, omega: float | Tensor) -> float:
        """Return max_i omega_i alpha_i^2 L_i, for one omega of all clients or one of each, [n]."""
        return float((self.curvatures * omega).max())

    def _shares(self, stationary: bool) -> Tensor:
        return self.stationary_weights if stationary else self.weights


def diameter(own: Tensor) -> float:
    """Return D^2, the largest squared distance between two local models [n, d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix
    >>> flix.diameter(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    25.0
    """
    return float(torch.cdist(own.double(), own.double()).square().max())


def one_shot_bound(mixture: Mixture, spread: float) -> float:
    """Bound f~(x_avg) - min f~ by L_alpha V / 2.

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
    >>> from coterie.theory import flix
    >>> flix.one_shot_bound(flix.Mixture.equal(0.5, torch.tensor([4.0, 2.0]), torch.ones(2)), spread=2.0)
    0.75
    """
    return 0.5 * mixture.L * spread


def one_shot_diameter_bound(mixture: Mixture, squared_diameter: float) -> float:
    """Bound f~(x_avg) - min f~ by alpha_max^2 mean(L) D^2 / 2: Theorem 1 with D squared, coarser than `one_shot_bound`.

    Parameters
    ----------
    mixture
        Constants of the problem.
    squared_diameter
        D^2, from `diameter`.

    Returns
    -------
    float
        The bound.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix
    >>> flix.one_shot_diameter_bound(flix.Mixture.equal(0.5, torch.tensor([4.0, 2.0]), torch.ones(2)), 4.0)
    1.5
    """
    return 0.5 * float(mixture.alpha.max()) ** 2 * float(mixture.smoothness.mean()) * squared_diameter


def certificate(mixed_losses: Tensor, own_losses: Tensor) -> float:
    """Bound the gap at x by mean f_i(T_i(x)) - mean f_i(x_i), since no mixture beats a client's own minimum.

    Parameters
    ----------
    mixed_losses
        Losses of the mixed models T_i(x), [n].
    own_losses
        Losses of the clients' own minimisers, [n].

    Returns
    -------
    float
        The bound.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix
    >>> flix.certificate(torch.tensor([0.5, 0.7]), torch.tensor([0.25, 0.45]))
    0.25
    """
    return float((mixed_losses - own_losses).mean())


def one_shot_alpha(eps: float, smoothness: float, spread: float) -> float:
    """Return the largest equal alpha whose one-shot average is eps-accurate: sqrt(2 eps / (mean(L) V)), at most 1.

    Parameters
    ----------
    eps
        Accuracy of f~.
    smoothness
        Mean smoothness of the clients' losses.
    spread
        V of the local models.

    Returns
    -------
    float
        alpha.

    Examples
    --------
    >>> from coterie.theory import flix
    >>> flix.one_shot_alpha(eps=0.01, smoothness=2.0, spread=1.0)
    0.1
    """
    scale = smoothness * spread
    return 1.0 if scale <= 2.0 * eps else math.sqrt(2.0 * eps / scale)


def stationary_alpha(eps: float, smoothness: Tensor, spread: float) -> float:
    """Return the largest equal alpha with |grad f~(x_avg)| <= eps, a fourth root.

    Parameters
    ----------
    eps
        Bound on the gradient's norm.
    smoothness
        Smoothness of each client's loss, [n].
    spread
        V of the local models, with weights alpha^4 L_i^2: `Mixture.spread(own, stationary=True)`.

    Returns
    -------
    float
        alpha, at most 1.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix
    >>> flix.stationary_alpha(eps=0.5, smoothness=torch.tensor([2.0, 2.0]), spread=1.0)
    0.5
    """
    scale = float(smoothness.double().square().mean()) * spread
    return 1.0 if scale <= eps**2 else (eps**2 / scale) ** 0.25


def stationary_bound(mixture: Mixture, spread: float) -> float:
    """Bound |grad f~(x_avg)| by the root of mean(alpha_i^4 L_i^2) V: Theorem 3, which needs no convexity.

    x_avg and V have weights alpha_i^4 L_i^2, which make the bound smallest.

    Parameters
    ----------
    mixture
        Constants of the problem.
    spread
        V, from `Mixture.spread(own, stationary=True)`.

    Returns
    -------
    float
        The bound.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix
    >>> flix.stationary_bound(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.zeros(2)), spread=4.0)
    2.0
    """
    return mixture.L_rms * math.sqrt(spread)


def stationary_diameter_bound(mixture: Mixture, squared_diameter: float) -> float:
    """Bound |grad f~(x_avg)| by alpha_max^2 times the root of mean(L_i^2) D^2, coarser than `stationary_bound`.

    Parameters
    ----------
    mixture
        Constants of the problem.
    squared_diameter
        D^2, from `diameter`.

    Returns
    -------
    float
        The bound.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import flix
    >>> flix.stationary_diameter_bound(flix.Mixture.equal(0.5, torch.tensor([4.0, 4.0]), torch.zeros(2)), 4.0)
    2.0
    """
    scale = float(mixture.smoothness.square().mean()) * squared_diameter
    return float(mixture.alpha.max()) ** 2 * math.sqrt(scale)


def mixed_spread(alpha: float, spread: float) -> float:
    """Return the spread of the deployed models T_i(x), (1 - alpha)^2 times that of the local models, whatever x is.

    Parameters
    ----------
    alpha
        The common mixing weight.
    spread
        Spread of the local models, with any weights that sum to one.

    Returns
    -------
    float
        The spread with the same weights.

    Examples
    --------
    >>> from coterie.theory import flix
    >>> flix.mixed_spread(alpha=0.5, spread=2.0)
    0.5
    """
    return (1.0 - alpha) ** 2 * spread

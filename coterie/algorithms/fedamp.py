"""FedAMP: personal models that attend to each other by their distances."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.algorithms.base import setting
from coterie.algorithms.personal_aggregates import PersonalAggregates
from coterie.engine.federation import Federation


@dataclass(frozen=True)
class FedAmp(PersonalAggregates):
    """Attentive message passing between personal models (Huang et al., AAAI 2021, arXiv:2007.03797).

    xi_ij = share/(n - 1) exp(-|v_i - v_j|^2 / sigma),   u_i = v_i + sum_j xi_ij (v_j - v_i)
    v_i = u_i after `steps` of v <- v - lr (grad f_i(v) + lam (v - u_i))

    This is the paper's A(z) = 1 - exp(-z / sigma) with its step alpha_k = share sigma/(n - 1) and its lambda/alpha_k =
    lam: a client keeps at least 1 - share of itself. Deviation: sigma is a multiple of the median squared distance
    between two models, so that one number serves models of any size.

    Examples
    --------
    >>> import torch, coterie
    >>> xs = [torch.ones(2, 1)] * 4
    >>> ys = [torch.full((2,), target) for target in (-1.0, -1.2, 1.0, 1.2)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.FedAmp(sigma=0.1, lam=1.0), rounds=100)
    >>> [round(value, 1) for value in run.personal.squeeze().tolist()]
    [-1.1, -1.1, 1.1, 1.1]
    """

    sigma: float = setting(
        0.2, "distance at which attention fades, in medians", above=0, tune=(0.1, 0.2, 0.5, 1.0)
    )
    share: float = setting(
        0.9, "weight of the others if all models coincide", low=0, high=1, tune=(0.5, 0.9, 1.0)
    )

    def weights(self, fed: Federation, models: Tensor) -> Tensor:
        n = len(models)
        centred = models - models.mean(0)
        products = centred @ centred.t()
        lengths = products.diagonal()
        squares = (lengths + lengths.unsqueeze(1) - 2 * products).clamp(min=0)
        apart = squares[~torch.eye(n, dtype=torch.bool, device=models.device)]
        scale = self.sigma * (apart.median() if n > 1 else squares.sum())
        xi = self.share / max(1, n - 1) * torch.exp(-squares / scale.clamp(min=torch.finfo(scale.dtype).tiny))
        xi.fill_diagonal_(0.0)
        return xi + torch.diag(1 - xi.sum(1))

"""pFedGraph: the server learns who collaborates with whom from the directions of the clients' models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.algorithms.base import setting
from coterie.algorithms.personal_aggregates import PersonalAggregates
from coterie.engine.federation import Federation


@dataclass(frozen=True)
class PFedGraph(PersonalAggregates):
    """Personal aggregates by an inferred collaboration graph (Ye, Ni, Wu, Chen, Wang, ICML 2023).

    w_i = argmin over the simplex of   strength |w - p|^2 - sum_j w_j cos(v_i - x_0, v_j - x_0)
    u_i = sum_j w_ij v_j,   v_i = u_i after `steps` of v <- v - lr (grad f_i(v) + lam (v - u_i))

    p_j are the clients' shares of all rows and x_0 the common start. A large strength gives every client the average of
    all, a small one only itself. The minimiser is the projection of p + cos / (2 strength) to the simplex. Deviation:
    local steps are kept near u_i by its squared distance, where the paper's code takes the cosine.

    Examples
    --------
    >>> import torch, coterie
    >>> xs = [torch.ones(2, 1)] * 4
    >>> ys = [torch.full((2,), target) for target in (-1.0, -1.2, 1.0, 1.2)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.PFedGraph(lam=1.0), rounds=100)
    >>> [round(value, 1) for value in run.personal.squeeze().tolist()]
    [-1.1, -1.1, 1.1, 1.1]
    """

    strength: float = setting(
        0.8, "strength of the pull of the graph to the average of all", above=0, tune=(0.1, 0.8, 3.0, 10.0)
    )

    def weights(self, fed: Federation, models: Tensor) -> Tensor:
        direction = torch.nn.functional.normalize(models - fed.initial_model(), dim=1)
        share = (fed.sizes / fed.sizes.sum()).t()
        return _on_simplex(share + direction @ direction.t() / (2 * self.strength))


def _on_simplex(points: Tensor) -> Tensor:
    """Return the nearest points of the simplex, row by row (Held, Wolfe, Crowder 1974)."""
    ordered = points.sort(1, descending=True).values
    count = torch.arange(1, points.shape[1] + 1, dtype=points.dtype, device=points.device)
    excess = (ordered.cumsum(1) - 1) / count
    used = (ordered > excess).sum(1, keepdim=True)
    return (points - excess.gather(1, used - 1)).clamp(min=0)

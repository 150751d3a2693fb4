"""FedProx: FedAvg whose local steps are pulled back to the shared model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.algorithms.base import setting
from coterie.algorithms.fedavg import FedAvg
from coterie.engine.client import Client
from coterie.engine.federation import Federation


@dataclass(frozen=True)
class FedProx(FedAvg):
    """One shared model by local SGD with a proximal term (Li et al., MLSys 2020, arXiv:1812.06127).

    y_i = x after `steps` of y <- y - lr (grad f_i(y) + mu (y - x)),   x <- x + server_lr (mean_i y_i - x)

    mu = 0 is FedAvg. The pull keeps the clients' models together where their losses differ; it does not remove the
    bias of local steps, as scaffold and feddyn do.

    Examples
    --------
    >>> import torch, coterie
    >>> xs, ys = [torch.ones(3, 1), 3 * torch.ones(1, 1)], [torch.zeros(3), 12 * torch.ones(1)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.FedProx(lr=0.05, mu=1.0), rounds=100)
    >>> round(run.state.x.item(), 2)  # the minimiser of the average loss is 3
    2.35
    """

    mu: float = setting(0.1, "strength of the pull to the shared model", low=0, tune=(0.001, 0.01, 0.1, 1.0))

    def train(self, client: Client, x: Tensor) -> Tensor:
        return client.sgd(x, self.lr, self.steps, prox=self.mu, anchor=x)

    def allowed_steps(self, fed: Federation, curvature: float) -> dict[str, float]:
        return {"lr": 2.0 / (curvature + self.mu)}

"""Ridge-tuned federated averaging (RTFA): tuned at home, held near the shared model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.algorithms.base import setting
from coterie.algorithms.ftfa import FTFA
from coterie.federation.client import Client
from coterie.federation.federation import Federation


@dataclass(frozen=True)
class RTFA(FTFA):
    """FedAvg, then SGD at home with a pull back to it (Cheng, Chadha, Duchi 2022, Algorithm 6).

    x as in FedAvg;   client i deploys x after y <- y - tuning_lr (grad f_i(y) + lam (y - x))

    tuning="exact" deploys argmin_y f_i(y) + lam/2 |y - x|^2 itself, for any model that can be solved. For least
    squares the best lam is sigma^2 gamma / r^2 (`coterie.theory.risk.optimal_lambda`, `coterie.advise`).
    """

    lam: float = setting(0.1, "pull towards the shared model", above=0, tune=(0.001, 0.01, 0.1, 1.0, 10.0))

    def _slope_at_home(self, client: Client, x: Tensor, centre: Tensor) -> Tensor:
        return client.grad(x) + self.lam * (x - centre)

    def _solved(self, client: Client, x: Tensor) -> Tensor:
        return client.solve(x, pull=self.lam)

    def _check_model(self, fed: Federation) -> None:
        pass

"""Ridge-tuned federated averaging (RTFA): fine-tuned models held near the shared one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.algorithms.base import setting
from coterie.algorithms.ftfa import FTFA
from coterie.engine.client import Client
from coterie.engine.federation import Federation


@dataclass(frozen=True)
class RTFA(FTFA):
    """FedAvg, then SGD on the client's own rows with a pull back to it (Cheng, Chadha, Duchi 2022, Algorithm 6).

    x as in FedAvg;   client i deploys x after y <- y - tuning_lr (grad f_i(y) + lam (y - x))

    tuning="exact" deploys argmin_y f_i(y) + lam/2 |y - x|^2 itself, for any model that can be solved. For least
    squares the best lam is sigma^2 gamma / r^2 (`coterie.theory.ridge_limits.optimal_lambda`, `coterie.advise`).
    """

    lam: float = setting(
        0.1, "strength of the pull to the shared model", above=0, tune=(0.001, 0.01, 0.1, 1.0, 10.0)
    )

    def _tuning_grad(self, client: Client, x: Tensor, anchor: Tensor) -> Tensor:
        return client.grad(x) + self.lam * (x - anchor)

    def _solved(self, client: Client, x: Tensor) -> Tensor:
        return client.solve(x, prox=self.lam)

    def _check_model(self, fed: Federation) -> None:
        pass

"""Fine-tuned federated averaging (FTFA): the shared model, then a few steps on the client's own rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.algorithms.base import setting
from coterie.algorithms.fedavg import FedAvg
from coterie.engine.client import Client


@dataclass(frozen=True)
class FineTuned(FedAvg):
    """FedAvg, then `tuning_steps` of SGD on the client's own rows (Cheng, Chadha, Duchi 2022, Algorithm 5).

    x as in FedAvg;   client i deploys x after tuning_steps of y <- y - tuning_lr grad f_i(y)

    Nothing is sent for the personal part. The steps run when a client deploys, so they do not change x.
    """

    tuning_lr: float = setting(0.05, "step size of fine-tuning", above=0, tune=(0.003, 0.01, 0.03, 0.1, 0.3))
    tuning_steps: int = setting(20, "steps of fine-tuning", low=0, tune=(5, 20, 80))

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return client.sgd(x, self.tuning_lr, self.tuning_steps)

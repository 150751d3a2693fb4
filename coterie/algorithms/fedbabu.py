"""FedBABU: a body learned under a head that never moves, fine-tuned at each client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coterie.algorithms.base import setting
from coterie.algorithms.partly_shared import PartlyShared
from coterie.engine.client import Client


@dataclass(frozen=True)
class FedBABU(PartlyShared):
    """Body aggregation and body update (Oh, Kim, Yun, ICLR 2022, arXiv:2106.06042).

    u_i <- `steps` of SGD on the body from u, with the head as it was drawn,   u <- mean of the u_i
    client i deploys (u, v) after `tuning_steps` of SGD on all parameters, the head or the body

    The head v is a function of the seed, so it is never sent.
    """

    tuning_lr: float = setting(0.05, "step size of fine-tuning", above=0, tune=(0.003, 0.01, 0.03, 0.1, 0.3))
    tuning_steps: int = setting(20, "steps of fine-tuning", low=0, tune=(5, 20, 80))
    tuning: str = setting("all", "what is fine-tuned", options=("all", "head", "body"))

    begin: ClassVar[None] = None  # type: ignore[assignment]  # nothing is kept

    def train(self, client: Client, shared: Tensor) -> Tensor:
        body = self.shared_part(client.model)
        w = body.into(client.initial_model(), shared)
        return body.of(client.sgd(w, self.lr, self.steps, mask=body.mask))

    def deploy(self, client: Client, shared: Tensor) -> Tensor:
        body, head = self.shared_part(client.model), self.own_part(client.model)
        w = body.into(client.initial_model(), shared)
        mask = {"all": None, "head": head.mask, "body": body.mask}[self.tuning]
        return client.sgd(w, self.tuning_lr, self.tuning_steps, mask=mask)

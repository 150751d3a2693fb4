"""Fine-tuned federated averaging (FTFA), with epochs and the interpolating limit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.algorithms.base import setting
from coterie.algorithms.fine_tuned import FineTuned
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.state import State


@dataclass(frozen=True)
class FTFA(FineTuned):
    """FedAvg, then SGD on the client's own rows (Cheng, Chadha, Duchi 2022, Algorithm 5).

    x as in FedAvg;   client i deploys x after `tuning_epochs` epochs of y <- y - tuning_lr grad f_i(y)

    tuning="steps" counts steps instead and is `fine-tuned`; tuning="exact" deploys the limit for least squares,
    x + X_i^+ (y_i - X_i x), the model nearest to x that fits the client's rows best. An epoch is
    ceil(rows / batch) steps, whose rows are drawn with replacement as everywhere in this library.
    """

    tuning_lr: float = setting(0.05, "step size of fine-tuning", above=0, tune=(0.001, 0.01, 0.1, 1.0))
    tuning: str = setting(
        "epochs",
        "unit of fine-tuning: epochs, steps, or its limit (exact)",
        options=("epochs", "steps", "exact"),
    )
    tuning_epochs: int = setting(10, "epochs of fine-tuning", low=0)

    def start(self, fed: Federation) -> State:
        self._check_model(fed)
        return super().start(fed)

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        if self.tuning == "exact":
            return self._solved(client, x)
        anchor, count = x, self._tuning_count(client)
        for step in range(int(count.max())):
            moved = x - self.tuning_lr * self._tuning_grad(client, x, anchor)
            x = torch.where(step < count, moved, x)
        return x

    def _tuning_count(self, client: Client) -> Tensor:
        """Return the number of fine-tuning steps of each client, [..., 1]."""
        if self.tuning == "steps":
            return torch.full_like(client.size, self.tuning_steps)
        return self.tuning_epochs * (
            torch.ceil(client.size / self.batch) if self.batch else torch.ones_like(client.size)
        )

    def _tuning_grad(self, client: Client, x: Tensor, anchor: Tensor) -> Tensor:
        return client.grad(x)

    def _solved(self, client: Client, x: Tensor) -> Tensor:
        return client.solve(x)

    def _check_model(self, fed: Federation) -> None:
        if self.tuning == "exact" and not fed.model.has_statistics:
            raise SettingError(
                f"{self.name}: tuning='exact' is for least squares (models.linear); this model is tuned by "
                "steps or epochs"
            )

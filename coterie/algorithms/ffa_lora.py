"""FFA-LoRA: low-rank adapters of which one factor never moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coterie.algorithms.base import setting
from coterie.algorithms.partly_shared import ADAPTERS, PartlyShared
from coterie.engine.client import Client
from coterie.models.base import Model
from coterie.models.zoo import mlp


@dataclass(frozen=True)
class FFALoRA(PartlyShared):
    """Adapters B A with A as it was drawn (Sun et al., ICLR 2024, arXiv:2403.12313).

    B_i <- `steps` of SGD on the factors B from B,   B <- mean of the B_i

    The mean of the products B_i A is then the product of the means, which it is not if both factors move, and half
    of the numbers travel. A is a function of the seed.
    """

    personal: str = setting("lora_A", "factor that never moves", options=("lora_A", "lora_B"))

    remedy: ClassVar[str] = ADAPTERS
    begin: ClassVar[None] = None  # type: ignore[assignment]  # nothing is kept

    def train(self, client: Client, shared: Tensor) -> Tensor:
        moves = self.shared_part(client.model)
        w = moves.into(client.initial_model(), shared)
        return moves.of(client.sgd(w, self.lr, self.steps, mask=moves.mask))

    def deploy(self, client: Client, shared: Tensor) -> Tensor:
        return self.shared_part(client.model).into(client.initial_model(), shared)

    def trial_model(self, rounds: int) -> Model:
        return mlp((4,), adapters=2, stacked=False)

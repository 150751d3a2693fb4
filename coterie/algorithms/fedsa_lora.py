"""FedSA-LoRA: low-rank adapters whose factors A are shared and whose factors B are personal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.algorithms.base import setting
from coterie.algorithms.fedper import FedPer
from coterie.algorithms.partly_shared import ADAPTERS
from coterie.models.base import Model
from coterie.models.zoo import mlp


@dataclass(frozen=True)
class FedSALoRA(FedPer):
    """Selective aggregation of adapters B A (Guo et al., ICLR 2025, arXiv:2410.01463).

    (A_i, B_i) <- `steps` of SGD on client i from (A, B_i),   A <- mean of the A_i

    Factors A learn what clients have in common and factors B what is their own.
    """

    personal: str = setting("lora_B", "factor that stays at the clients", options=("lora_A", "lora_B"))

    remedy: ClassVar[str] = ADAPTERS

    def trial_model(self, rounds: int) -> Model:
        return mlp((4,), adapters=2, stacked=False)

"""Dual adapters: a shared low-rank adapter and a personal one on the same layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.algorithms.base import setting
from coterie.algorithms.fedrep import FedRep
from coterie.algorithms.partly_shared import ADAPTERS
from coterie.models.base import Model
from coterie.models.low_rank import rank_of
from coterie.models.zoo import mlp


@dataclass(frozen=True)
class DualAdapters(FedRep):
    """Dual-personalising adapters, FedDPA (Yang et al., NeurIPS 2024, arXiv:2403.19211).

    W x + B A x + B_i A_i x,   (A, B) shared and (A_i, B_i) personal
    (A_i, B_i) <- `head_steps` of SGD from (A_i, B_i), with (A, B) fixed
    then `steps` of SGD on (A, B) with (A_i, B_i) fixed;   (A, B) <- mean over clients

    An adapter of rank R is the sum of R adapters of rank one. The first `shared_rank` of them are shared.
    """

    shared_rank: int = setting(0, "rank of the shared adapter; 0: half of the model's", low=0)
    personal: str = setting("", "follows from shared_rank", options=("",))

    remedy: ClassVar[str] = ADAPTERS

    def kept_groups(self, model: Model) -> str:
        rank = rank_of(model)
        shared = self.shared_rank or rank // 2
        return "+".join(f"rank {k}" for k in range(shared, rank)) or "lora_B"

    def trial_model(self, rounds: int) -> Model:
        return mlp((4,), adapters=2, stacked=False)

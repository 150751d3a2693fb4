"""HetLoRA: low-rank adapters whose rank differs between clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered, SettingError
from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.algorithms.partly_shared import ADAPTERS
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.optimizers import OPTIMIZERS
from coterie.engine.state import State
from coterie.models.base import Model
from coterie.models.groups import Part
from coterie.models.low_rank import component, product_norms, rank_of
from coterie.models.zoo import mlp


@dataclass(frozen=True)
class HetLoRA(Algorithm):
    """Heterogeneous low-rank adapters (Cho et al., EMNLP 2024, arXiv:2401.06432).

    x_i = the first r_i of the R adapters of rank one that x consists of;   x_i <- `steps` of SGD on client i
    x <- sum_i a_i (x_i with zeros for the other R - r_i),   a_i proportional to |B_i A_i|, or to the rows

    A client receives, trains, sends and deploys its r_i adapters only.
    """

    lr: float = setting(0.05, "local step size", above=0, tune=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0))
    steps: int = setting(5, "local steps per round", low=1)
    ranks: tuple[float, ...] = setting(
        (), "ranks of the clients in turn; none: 1 to R, by numbers of rows", low=1
    )
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    weighting: str = setting(
        "norm", "weight clients by the length of their adapters, or by rows (size)", options=("norm", "size")
    )
    optimizer: str = setting("sgd", "optimiser of local steps", options=OPTIMIZERS)
    reveals: ClassVar[Reveals] = {"train": "model"}
    varying: ClassVar[frozenset[str]] = frozenset({"train"})

    def start(self, fed: Federation) -> State:
        if rank_of(fed.model) < 1:
            raise SettingError(f"{self.name}: this model has no adapters; {ADAPTERS}")
        return State(x=fed.initial_model())

    def round(self, fed: Federation, s: State, t: int) -> State:
        cohort, ranks = fed.sample(t, self.participation), self.ranks_of(fed)
        asked = fed.everyone if cohort is None else cohort
        total, weight = torch.zeros_like(s.x), 0.0
        for rank in ranks[asked].unique().tolist():
            part = self._first(fed.model, rank)
            r = fed.map(self.train, shared=part.of(s.x), to=asked[ranks[asked] == rank])
            if len(r):
                sent = part.into(torch.zeros_like(s.x), r.values)
                shares = (
                    r.weights if self.weighting == "size" else product_norms(fed.model, sent).clamp(min=1e-12)
                )
                total, weight = total + (shares * sent).sum(0), weight + float(shares.sum())
        if not weight:
            raise NobodyAnswered("no client answered, so there is nothing to average")
        return State(x=total / weight)

    def train(self, client: Client, shared: Tensor) -> Tensor:
        model, R = client.model, rank_of(client.model)
        part = self._first(model, R * shared.shape[-1] // model.d)
        x = part.into(torch.zeros_like(client.initial_model()), shared)
        return part.of(client.sgd(x, self.lr, self.steps, mask=part.mask))

    def deploy(self, client: Client, x: Tensor, rank: Tensor) -> Tensor:
        return torch.where(component(client.model).to(x.device) < rank, x, 0.0)

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"x": s.x}, {"rank": self.ranks_of(fed).unsqueeze(-1)}

    def ranks_of(self, fed: Federation) -> Tensor:
        """Return the rank of every client, int64 [n]."""
        R = rank_of(fed.model)
        if self.ranks:
            given = torch.tensor(self.ranks, device=fed.device).long()
            return given[fed.everyone % len(given)].clamp(max=R)
        order = fed.sizes.squeeze(-1).argsort(stable=True).argsort()
        return -(-R * (order + 1) // fed.n)

    def _first(self, model: Model, rank: int) -> Part:
        """Return the parameters of the first `rank` adapters of rank one."""
        return Part(component(model) < rank)

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"train": (d, d)}

    def trial_model(self, rounds: int) -> Model:
        return mlp((4,), adapters=2, stacked=False)

"""Methods whose server makes a personal aggregate of all models for each client, which then trains near it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.optimizers import OPTIMIZERS
from coterie.engine.state import State


@dataclass(frozen=True)
class PersonalAggregates(Algorithm):
    """Personal models v_i near aggregates u_i = sum_j w_ij v_j; a method says what the weights [n, n] are."""

    name = ""
    lr: float = setting(0.05, "local step size", above=0, tune=(0.003, 0.01, 0.03, 0.1, 0.3))
    lam: float = setting(0.1, "strength of the pull to the aggregate", low=0, tune=(0.01, 0.1, 0.3, 1.0))
    steps: int = setting(5, "local steps per round", low=1)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    optimizer: str = setting("sgd", "optimiser of local steps", options=OPTIMIZERS)
    reveals: ClassVar[Reveals] = {"train": "personal"}

    def weights(self, fed: Federation, models: Tensor) -> Tensor:
        """Return the weights [n, n] of all models [n, d] in each client's aggregate."""
        raise NotImplementedError

    def start(self, fed: Federation) -> State:
        return State(models=fed.initial_model().repeat(fed.n, 1))

    def round(self, fed: Federation, s: State, t: int) -> State:
        ids = fed.sample(t, self.participation)
        aggregates = self.weights(fed, s.models) @ s.models
        r = fed.map(self.train, each={"u": aggregates if ids is None else aggregates[ids]}, to=ids)
        return State(models=r.put(s.models)) if len(r) else s

    def train(self, client: Client, u: Tensor) -> Tensor:
        return client.sgd(u, self.lr, self.steps, prox=self.lam, anchor=u)

    def deploy(self, client: Client, v: Tensor) -> Tensor:
        return v

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"v": s.models}

    def common(self, fed: Federation, s: State) -> Tensor:
        mean: Tensor = (fed.sizes * s.models).sum(0) / fed.sizes.sum()
        return mean

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"train": (d, d)}

"""Reptile: a shared model that moves part of the way to the clients' fine-tuned models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.optimizers import OPTIMIZERS
from coterie.engine.state import State


@dataclass(frozen=True)
class Reptile(Algorithm):
    """A starting point for fine-tuning by repeated small moves (Nichol, Achiam, Schulman 2018, arXiv:1803.02999).

    y_i = x after `steps` of y <- y - lr grad f_i(y),   x <- x + meta_lr mean_i (y_i - x)
    client i deploys x after `tuning_steps` of y <- y - lr grad f_i(y)

    This is the batch version of the paper; clients have equal weights. meta_lr = 1 is FedAvg with equal weights.
    """

    lr: float = setting(
        0.05, "step size of local steps and of fine-tuning", above=0, tune=(0.01, 0.03, 0.1, 0.3)
    )
    meta_lr: float = setting(
        0.5, "fraction of the way to the average that the shared model moves", above=0, tune=(0.25, 0.5, 1.0)
    )
    steps: int = setting(5, "local steps per round", low=1)
    tuning_steps: int = setting(10, "fine-tuning steps when deployed", low=0, tune=(1, 5, 20))
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    optimizer: str = setting("sgd", "optimiser of local steps", options=OPTIMIZERS)
    reveals: ClassVar[Reveals] = {"train": "model"}

    starts_from: ClassVar[Mapping[str, str]] = {"train": "x"}
    tolerates_late: ClassVar[frozenset[str]] = frozenset({"train"})

    def start(self, fed: Federation) -> State:
        return State(x=fed.initial_model())

    def round(self, fed: Federation, s: State, t: int) -> State:
        r = fed.map(self.train, x=s.x, to=fed.sample(t, self.participation))
        return State(x=s.x + self.meta_lr * (r.mean(uniform=True) - s.x))

    def train(self, client: Client, x: Tensor) -> Tensor:
        return self._adapted(client, x, self.steps)

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return self._adapted(client, x, self.tuning_steps)

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"train": (d, d)}

    def _adapted(self, client: Client, x: Tensor, steps: int) -> Tensor:
        return client.sgd(x, self.lr, steps)

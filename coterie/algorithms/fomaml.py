"""First-order MAML: a shared model that is good after a few steps at home."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.state import State


@dataclass(frozen=True)
class FOMAML(Algorithm):
    """A starting point for fine-tuning, without second derivatives (Finn, Abbeel, Levine, ICML 2017).

    y = x_i after `inner_steps` of y <- y - inner_lr grad f_i(y),   x_i <- x_i - lr grad f_i(y),   x <- mean_i x_i
    client i deploys x after `tuning_steps` of y <- y - inner_lr grad f_i(y)

    Each gradient has a fresh minibatch. Clients have equal weights, as tasks have in the paper. On least squares
    with full batches, steps = 1 and inner_steps = 1, x converges to the solution weighted by S_i (1 - inner_lr S_i).
    """

    lr: float = setting(0.05, "step size of the shared model", above=0, tune=(0.01, 0.03, 0.1, 0.3, 1.0))
    inner_lr: float = setting(
        0.05, "step size of the inner steps and of fine-tuning", above=0, tune=(0.01, 0.03, 0.1, 0.3)
    )
    inner_steps: int = setting(1, "inner steps", low=1)
    steps: int = setting(1, "outer steps per round", low=1)
    tuning_steps: int = setting(10, "fine-tuning steps when deployed", low=0, tune=(1, 5, 20))
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    reveals: ClassVar[Reveals] = {"train": "gradient"}

    starts_from: ClassVar[Mapping[str, str]] = {"train": "x"}
    tolerates_late: ClassVar[frozenset[str]] = frozenset({"train"})

    def start(self, fed: Federation) -> State:
        return State(x=fed.initial_model())

    def round(self, fed: Federation, s: State, t: int) -> State:
        r = fed.map(self.train, x=s.x, to=fed.sample(t, self.participation))
        return State(x=r.mean(uniform=True))

    def train(self, client: Client, x: Tensor) -> Tensor:
        (x,) = client.along_rows(self.steps * (self.inner_steps + 1), x)
        for _ in range(self.steps):
            x = x - self.lr * client.grad(self._adapted(client, x, self.inner_steps))
        return x

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        (x,) = client.along_rows(self.tuning_steps, x)
        return self._adapted(client, x, self.tuning_steps)

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"train": (d, d)}

    def _adapted(self, client: Client, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = x - self.inner_lr * client.grad(x)
        return x

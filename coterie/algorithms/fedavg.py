"""FedAvg: one model for all clients."""

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
class FedAvg(Algorithm):
    """One shared model by averaging local SGD (McMahan et al., AISTATS 2017, arXiv:1602.05629).

    y_i = x after `steps` SGD steps on client i,   x <- x + server_lr (mean_i y_i - x)

    The mean is over the clients that answered, weighted by their rows (`weighting="size"`, as in the paper) or
    uniform. With steps = 1 and server_lr = 1 this is SGD on the average loss.

    Examples
    --------
    >>> import torch, coterie
    >>> xs, ys = [torch.ones(3, 1), torch.ones(1, 1)], [torch.zeros(3), 4 * torch.ones(1)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.FedAvg(lr=0.5, steps=1), rounds=50)
    >>> run.personal.squeeze().round(decimals=3).tolist()
    [1.0, 1.0]
    """

    lr: float = setting(0.05, "local step size", above=0, tune=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))
    steps: int = setting(5, "local steps per round", low=1)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    server_lr: float = setting(1.0, "server step size towards the average", above=0)
    weighting: str = setting(
        "size", "weight clients by their rows (size) or equally (uniform)", options=("size", "uniform")
    )
    optimizer: str = setting("sgd", "optimiser of local steps", options=OPTIMIZERS)
    reveals: ClassVar[Reveals] = {"train": "model"}

    starts_from: ClassVar[Mapping[str, str]] = {"train": "x"}
    tolerates_late: ClassVar[frozenset[str]] = frozenset({"train"})

    def start(self, fed: Federation) -> State:
        return State(x=fed.initial_model())

    def round(self, fed: Federation, s: State, t: int) -> State:
        r = fed.map(self.train, x=s.x, to=fed.sample(t, self.participation))
        average = r.mean(uniform=self.weighting == "uniform")
        return State(x=s.x + self.server_lr * (average - s.x))

    def train(self, client: Client, x: Tensor) -> Tensor:
        return client.sgd(x, self.lr, self.steps)

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"train": (d, d)}

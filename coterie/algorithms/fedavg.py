"""Federated averaging: one model for everybody."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.algorithms.base import Algorithm, setting
from coterie.federation.client import Client, Reply
from coterie.federation.federation import Federation
from coterie.federation.state import State


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """One global model by averaging local SGD (McMahan et al., AISTATS 2017, arXiv:1602.05629).

    y_i = x after `steps` SGD steps on client i,   x <- x + server_lr (mean_i y_i - x)

    The mean is over the clients that answered, weighted by their rows (`weighting="size"`, the paper's)
    or equal. With steps = 1 and server_lr = 1 it is SGD on the average loss.
    """

    lr: float = setting(0.05, "local step size", above=0, tune=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))
    steps: int = setting(5, "local steps per round", low=1)
    participation: float = setting(1.0, "share of the clients asked per round", above=0, high=1)
    server_lr: float = setting(1.0, "server step towards the average", above=0)
    weighting: str = setting("size", "how clients are averaged", options=("size", "uniform"))

    def start(self, fed: Federation) -> State:
        return State(x=fed.initial_model())

    def round(self, fed: Federation, s: State, t: int) -> State:
        r = fed.map(self.train, x=s.x, to=fed.sample(t, self.participation))
        average = r.mean(uniform=self.weighting == "uniform")
        return State(x=s.x + self.server_lr * (average - s.x))

    def train(self, client: Client, x: Tensor) -> Reply:
        return client.trained(x, self.lr, self.steps)

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"train": (d, d)}

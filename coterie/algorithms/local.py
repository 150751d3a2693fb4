"""Every client alone: the baseline that collaboration has to beat."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.algorithms.base import Algorithm, setting
from coterie.federation.client import Client
from coterie.federation.federation import Federation
from coterie.federation.state import State


@dataclass(frozen=True)
class Local(Algorithm):
    """Each client trains on its own rows and nothing is sent (Cheng, Chadha, Duchi 2022, Algorithm 3).

    v_i <- v_i - lr grad f_i(v_i),   `steps` times a round, from the common starting point

    The rounds are only there to be comparable with other methods at equal work.
    """

    lr: float = setting(0.05, "step size", above=0, tune=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))
    steps: int = setting(5, "steps per round", low=1)

    def start(self, fed: Federation) -> State:
        return State()

    def round(self, fed: Federation, s: State, t: int) -> State:
        fed.map(self.train)
        return s

    def begin(self, client: Client) -> None:
        client.keep.personal = client.initial_model()

    def train(self, client: Client) -> None:
        v = client.keep.personal
        for _ in range(self.steps):
            v = v - self.lr * client.grad(v)
        client.keep.personal = v

    def deploy(self, client: Client) -> Tensor:
        return client.keep.personal

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (0, 0), "train": (0, 0)}

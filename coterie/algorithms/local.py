"""Every client alone: the baseline that collaboration has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, setting
from coterie.federation.client import Client
from coterie.federation.federation import Federation
from coterie.federation.state import State


@dataclass(frozen=True)
class Local(Algorithm):
    """Each client trains on its own rows and nothing is sent (Cheng, Chadha, Duchi 2022, Algorithm 3).

    v_i <- v_i - lr (grad f_i(v_i) + ridge v_i),   `steps` times a round, from the common starting point

    exact=True takes the minimiser itself in one round: for least squares the one of smallest norm, for other
    models a ridge is needed where the loss has none of its own. The rounds are only there to be comparable with
    other methods at equal work.
    """

    lr: float = setting(0.05, "step size", above=0, tune=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))
    steps: int = setting(5, "steps per round", low=1)
    ridge: float = setting(0.0, "ridge penalty, the pull towards zero", low=0)
    exact: bool = setting(False, "solve instead of stepping")

    def start(self, fed: Federation) -> State:
        return State(done=False)

    def round(self, fed: Federation, s: State, t: int) -> State:
        if s.done and fed.begun.all():
            return s
        r = fed.map(self.train)
        return State(done=self.exact and len(r) == fed.n)

    def begin(self, client: Client) -> None:
        client.keep.personal = client.initial_model()

    def train(self, client: Client) -> None:
        v = client.keep.personal
        if self.exact:
            v = client.solve(torch.zeros_like(v), pull=self.ridge)
        else:
            for _ in range(self.steps):
                v = v - self.lr * self._slope(client, v)
        client.keep.personal = v

    def _slope(self, client: Client, v: Tensor) -> Tensor:
        slope = client.grad(v)
        return slope + self.ridge * v if self.ridge else slope

    def deploy(self, client: Client) -> Tensor:
        return client.keep.personal

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (0, 0), "train": (0, 0)}

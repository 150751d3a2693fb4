"""Ditto: personal models held near a shared one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.algorithms.base import Algorithm, setting
from coterie.federation.client import Client, Reply
from coterie.federation.federation import Federation
from coterie.federation.state import State


@dataclass(frozen=True)
class Ditto(Algorithm):
    """Personal models held near a shared one (Li et al., ICML 2021, arXiv:2012.04221).

    v_i <- v_i - lr (grad f_i(v_i) + lam (v_i - x)),   x <- mean of local SGD from x

    lam = 0 is training alone; a large lam is the shared model. The shared model is FedAvg's and does not
    depend on lam.
    """

    lr: float = setting(0.05, "step size", above=0, tune=(0.01, 0.03, 0.1, 0.3))
    lam: float = setting(1.0, "pull towards the shared model", low=0, tune=(0.01, 0.1, 0.3, 1.0))
    steps: int = setting(5, "local steps per round", low=1)
    participation: float = setting(1.0, "share of the clients asked per round", above=0, high=1)

    def start(self, fed: Federation) -> State:
        return State(x=fed.initial_model())

    def round(self, fed: Federation, s: State, t: int) -> State:
        r = fed.map(self.train, x=s.x, to=fed.sample(t, self.participation))
        return State(x=r.mean())

    def begin(self, client: Client, x: Tensor) -> None:
        client.keep.personal = x

    def train(self, client: Client, x: Tensor) -> Reply:
        v = client.keep.personal
        client.keep.personal = client.sgd(v, self.lr, self.steps, pull=self.lam, towards=x, turn=(0, 2))
        return client.trained(x, self.lr, self.steps, turn=(1, 2))

    def deploy(self, client: Client) -> Tensor:
        return client.keep.personal

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (d, 0), "train": (d, d)}

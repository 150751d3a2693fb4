"""Local training: the baseline that collaboration has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.optimizers import OPTIMIZERS
from coterie.engine.state import State


@dataclass(frozen=True)
class Local(Algorithm):
    """Each client trains on its own rows and nothing is sent (Cheng, Chadha, Duchi 2022, Algorithm 3).

    v_i <- v_i - lr (grad f_i(v_i) + ridge v_i),   `steps` times a round, from the common starting point

    exact=True solves for the minimiser in one round: for least squares the one of smallest norm; other models need a
    ridge unless their loss has one. Rounds only make the work comparable with that of other methods.
    """

    lr: float = setting(0.05, "step size", above=0, tune=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))
    steps: int = setting(5, "steps per round", low=1)
    ridge: float = setting(0.0, "strength of the ridge penalty", low=0)
    exact: bool = setting(False, "solve for the minimiser instead of taking steps")
    optimizer: str = setting("sgd", "optimiser of local steps", options=OPTIMIZERS)
    reveals: ClassVar[Reveals] = {"train": "nothing"}

    stays: ClassVar[frozenset[str]] = frozenset({"begin", "train"})

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
            v = client.solve(torch.zeros_like(v), prox=self.ridge)
        else:
            v = client.sgd(v, self.lr, self.steps, prox=self.ridge, anchor=torch.zeros_like(v))
        client.keep.personal = v

    def deploy(self, client: Client) -> Tensor:
        return client.keep.personal

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (0, 0), "train": (0, 0)}

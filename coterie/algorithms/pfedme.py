"""pFedMe: a shared model learned through the Moreau envelopes of the clients' losses."""

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
class PFedMe(Algorithm):
    """Personalised federated learning with Moreau envelopes (Dinh, Tran, Nguyen, NeurIPS 2020, arXiv:2006.08848).

    local step:  v ~ argmin f_i(v; batch) + lam/2 |v - w|^2,   w <- w - lr lam (w - v)
    x <- (1 - beta) x + beta mean of the w;   client i deploys argmin f_i(v) + lam/2 |v - x|^2 on all its rows

    The inner problem takes `inner_steps` gradient steps of size `inner_lr` from w on one batch; 0 solves it on all
    rows. This corrects Algorithm 8 of Cheng, Chadha, Duchi (2022), which as printed minimises gradients and returns
    only x. lr lam beta <= 1 is stable.
    """

    lr: float = setting(
        0.005, "step size of the shared model at a client", above=0, tune=(0.0005, 0.005, 0.05)
    )
    lam: float = setting(15.0, "strength of the pull between personal and shared model", above=0)
    beta: float = setting(1.0, "server step size towards the average", above=0, tune=(1.0, 2.0))
    steps: int = setting(20, "local steps per round", low=1)
    inner_steps: int = setting(5, "gradient steps on the inner problem; 0 solves it exactly", low=0)
    inner_lr: float = setting(0.05, "step size on the inner problem", above=0)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    reveals: ClassVar[Reveals] = {"train": "model"}

    starts_from: ClassVar[Mapping[str, str]] = {"train": "x"}
    tolerates_late: ClassVar[frozenset[str]] = frozenset({"train"})

    def start(self, fed: Federation) -> State:
        return State(x=fed.initial_model())

    def round(self, fed: Federation, s: State, t: int) -> State:
        r = fed.map(self.train, x=s.x, to=fed.sample(t, self.participation))
        return State(x=(1 - self.beta) * s.x + self.beta * r.mean())

    def train(self, client: Client, x: Tensor) -> Tensor:
        (x,) = client.along_rows(self.steps * self.inner_steps, x)
        for _ in range(self.steps):
            if self.inner_steps == 0:
                v = client.solve(x, prox=self.lam)
            else:
                v = x
                for k in range(self.inner_steps):
                    v = v - self.inner_lr * (client.grad(v, again=k > 0) + self.lam * (v - x))
            x = x - self.lr * self.lam * (x - v)
        return x

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        if self.inner_steps == 0:
            return client.solve(x, prox=self.lam)
        v = x
        for _ in range(self.inner_steps):
            v = v - self.inner_lr * (client.full_grad(v) + self.lam * (v - x))
        return v

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"train": (d, d)}

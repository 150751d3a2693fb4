"""APFL: each client mixes the shared model with its own and learns how much of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.models.base import dot


@dataclass(frozen=True)
class Apfl(Algorithm):
    """Adaptive personalised federated learning (Deng, Kamani, Mahdavi 2020, arXiv:2003.13461).

    u = alpha_i v_i + (1 - alpha_i) w,   `steps` times a round from w = x, both on the same minibatch:
        w <- w - lr grad f_i(w),   v_i <- v_i - lr alpha_i grad f_i(u)
    x <- mean_i w_i;   once a round alpha_i <- alpha_i - lr <grad f_i(u), v_i - w>, kept in [0, 1]
    client i deploys alpha_i v_i + (1 - alpha_i) x

    alpha = 0 is FedAvg and alpha = 1 training alone, if it is not learned. As in the authors' code, alpha_i moves
    after the first step of a round.

    Examples
    --------
    >>> import torch, coterie
    >>> xs, ys = [torch.ones(1, 1), torch.ones(1, 1)], [torch.zeros(1), 4 * torch.ones(1)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.Apfl(), rounds=200)
    >>> run.state.x.round(decimals=2).tolist(), run.personal.squeeze().round(decimals=2).tolist()
    ([2.0], [0.0, 4.0])
    """

    lr: float = setting(0.05, "step size", above=0, tune=(0.003, 0.01, 0.03, 0.1, 0.3))
    alpha: float = setting(
        0.5, "weight of the personal model at first", low=0, high=1, tune=(0.25, 0.5, 0.75)
    )
    learn_alpha: bool = setting(True, "learn the weight of the personal model")
    steps: int = setting(5, "local steps per round", low=1)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    weighting: str = setting(
        "size", "weight clients by their rows (size) or equally (uniform)", options=("size", "uniform")
    )
    reveals: ClassVar[Reveals] = {"train": "model"}

    starts_from: ClassVar[Mapping[str, str]] = {"train": "x"}
    tolerates_late: ClassVar[frozenset[str]] = frozenset({"train"})

    def start(self, fed: Federation) -> State:
        return State(x=fed.initial_model())

    def round(self, fed: Federation, s: State, t: int) -> State:
        r = fed.map(self.train, x=s.x, to=fed.sample(t, self.participation))
        return State(x=r.mean(uniform=self.weighting == "uniform"))

    def begin(self, client: Client, x: Tensor) -> None:
        client.keep.personal, client.keep.alpha = x, torch.full_like(client.size, self.alpha)

    def train(self, client: Client, x: Tensor) -> Tensor:
        w, v = client.along_rows(2 * self.steps, x, client.keep.personal)
        alpha = client.keep.alpha
        for k in range(self.steps):
            grad, own = client.grad(w), client.grad(torch.lerp(w, v, alpha), again=True)
            slope = dot(own, v - w) if self.learn_alpha and k == 0 else 0.0
            w, v = w.sub(grad, alpha=self.lr), torch.addcmul(v, alpha, own, value=-self.lr)
            alpha = (alpha - self.lr * slope).clamp(0, 1)
        client.keep.personal, client.keep.alpha = v, alpha
        return w

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return torch.lerp(x, client.keep.personal, client.keep.alpha)

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (d, 0), "train": (d, d)}

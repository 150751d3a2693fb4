"""L2SGD: personal models with a penalty on their distance to the mean, which communicate at random."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.state import State


@dataclass(frozen=True)
class L2Sgd(Algorithm):
    """Loopless local SGD on a mixture of local and shared models (Hanzely, Richtarik 2020, arXiv:2002.05516).

    min (1/n) sum_i [f_i(v_i) + lam/2 |v_i - mean_j v_j|^2]
    with probability p:   x <- mean_j v_j,   v_i <- v_i - (lr lam / p) (v_i - x)
    otherwise:            v_i <- v_i - lr/(1-p) grad f_i(v_i)

    A round lasts from one mean to the next: a random number of local steps, (1-p)/p on average, that the server draws.
    lr stands for the paper's alpha/n. The iterates stay near the minimiser, the nearer the smaller lr is.

    Examples
    --------
    >>> import torch, coterie
    >>> xs, ys = [torch.ones(1, 1), torch.ones(1, 1)], [torch.zeros(1), 4 * torch.ones(1)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.L2Sgd(lr=0.002, lam=1.0), rounds=500)
    >>> [round(value) for value in run.personal.squeeze().tolist()]
    [1, 3]
    """

    lr: float = setting(0.04, "step size", above=0, tune=(0.003, 0.01, 0.03, 0.1, 0.3))
    lam: float = setting(1.0, "strength of the pull to the mean", low=0, tune=(0.1, 0.3, 1.0, 3.0))
    p: float = setting(0.2, "probability of a step to the mean", above=0, high=0.99)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    reveals: ClassVar[Reveals] = {"train": "personal"}

    def start(self, fed: Federation) -> State:
        return State(x=fed.initial_model())

    def round(self, fed: Federation, s: State, t: int) -> State:
        steps = math.floor(math.log1p(-fed.coin("steps", t)) / math.log1p(-self.p))
        r = fed.map(self.train, x=s.x, steps=steps, to=fed.sample(t, self.participation))
        return State(x=r.mean(uniform=True))

    def begin(self, client: Client, x: Tensor) -> None:
        client.keep.personal = x

    def train(self, client: Client, x: Tensor, steps: int) -> Tensor:
        client.keep.personal = client.sgd(self._pulled(client, x), self.lr / (1 - self.p), steps)
        return client.keep.personal

    def _pulled(self, client: Client, x: Tensor) -> Tensor:
        """Return the personal model after its step to the mean x."""
        return client.keep.personal.lerp(x, min(1.0, self.lr * self.lam / self.p))  # no overshoot

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return self._pulled(client, x)

    def allowed_steps(self, fed: Federation, curvature: float) -> dict[str, float]:
        return {"lr": 2.0 * (1 - self.p) / curvature}

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (d, 0), "train": (d + 1, d)}

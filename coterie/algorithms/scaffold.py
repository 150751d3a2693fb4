"""SCAFFOLD: FedAvg whose local steps are corrected by control variates."""

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


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """One shared model by local SGD with control variates (Karimireddy et al., ICML 2020, arXiv:1910.06378, option II).

    y_i = x after `steps` of y <- y - lr (grad f_i(y) - c_i + c)
    c_i <- c_i - c + (x - y_i) / (steps lr)
    x <- x + server_lr (mean_i y_i - x),   c <- c + mean over all clients of the changes of c_i

    c_i is the mean gradient that client i saw, c the mean of all c_i: local steps go where the steps of all would go,
    and the fixed point is the minimiser of the average loss, whatever `steps` is. The change of c_i follows from y_i,
    so that only y_i is sent. Deviation: means are weighted by rows, as in fedavg; the paper's are uniform.

    Examples
    --------
    >>> import torch, coterie
    >>> xs, ys = [torch.ones(3, 1), 3 * torch.ones(1, 1)], [torch.zeros(3), 12 * torch.ones(1)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.Scaffold(lr=0.05), rounds=100)
    >>> round(run.state.x.item(), 3)  # the minimiser of the average loss; fedavg ends at 2.7
    3.0
    """

    lr: float = setting(0.05, "local step size", above=0, tune=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))
    steps: int = setting(5, "local steps per round", low=1)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    server_lr: float = setting(1.0, "server step size towards the average", above=0)
    weighting: str = setting(
        "size", "weight clients by their rows (size) or equally (uniform)", options=("size", "uniform")
    )
    reveals: ClassVar[Reveals] = {"train": "model"}

    starts_from: ClassVar[Mapping[str, str]] = {"train": "x"}

    def start(self, fed: Federation) -> State:
        x = fed.initial_model()
        return State(x=x, c=torch.zeros_like(x))

    def round(self, fed: Federation, s: State, t: int) -> State:
        r = fed.map(self.train, x=s.x, c=s.c, to=fed.sample(t, self.participation))
        uniform = self.weighting == "uniform"
        move = r.mean(uniform=uniform) - s.x
        share = len(r) / fed.n if uniform else r.weights.sum() / fed.sizes.sum()
        c = s.c - share * (s.c + move / (self.steps * self.lr))
        return State(x=s.x + self.server_lr * move, c=c)

    def begin(self, client: Client) -> None:
        client.keep.c = torch.zeros_like(client.initial_model())

    def train(self, client: Client, x: Tensor, c: Tensor) -> Tensor:
        correction = c - client.keep.c
        y = client.sgd(x, self.lr, self.steps, linear=correction)
        client.keep.c = (x - y) / (self.steps * self.lr) - correction
        return y

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (0, 0), "train": (2 * d, d)}

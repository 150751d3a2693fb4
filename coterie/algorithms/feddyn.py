"""FedDyn: one shared model by local losses with a dynamic regulariser."""

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
class FedDyn(Algorithm):
    """One shared model by dynamic regularisation (Acar et al., ICLR 2021, arXiv:2111.04263).

    y_i ~ argmin_y f_i(y) - <g_i, y> + alpha/2 |y - x|^2   by `steps` SGD steps from x,   g_i <- g_i - alpha (y_i - x)
    h <- h - alpha (sum over clients that answered of y_i - x) / n,   x <- mean_i y_i - h / alpha

    g_i tends to the gradient of f_i at x and h is the mean of all g_i, so that the fixed point is the minimiser of the
    average loss, whatever `steps` is. Deviation: means are weighted by rows, as in fedavg; the paper's are uniform.

    Examples
    --------
    >>> import torch, coterie
    >>> xs, ys = [torch.ones(3, 1), 3 * torch.ones(1, 1)], [torch.zeros(3), 12 * torch.ones(1)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.FedDyn(lr=0.05), rounds=300)
    >>> round(run.state.x.item(), 3)  # the minimiser of the average loss; fedavg ends at 2.7
    3.0
    """

    lr: float = setting(0.05, "local step size", above=0, tune=(0.003, 0.01, 0.03, 0.1, 0.3))
    alpha: float = setting(
        1.0, "strength of the dynamic regulariser", above=0, tune=(0.03, 0.1, 0.3, 1.0, 3.0)
    )
    steps: int = setting(5, "local steps per round", low=1)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    weighting: str = setting(
        "size", "weight clients by their rows (size) or equally (uniform)", options=("size", "uniform")
    )
    reveals: ClassVar[Reveals] = {"train": "model"}

    starts_from: ClassVar[Mapping[str, str]] = {"train": "x"}

    def start(self, fed: Federation) -> State:
        x = fed.initial_model()
        return State(x=x, h=torch.zeros_like(x))

    def round(self, fed: Federation, s: State, t: int) -> State:
        r = fed.map(self.train, x=s.x, to=fed.sample(t, self.participation))
        uniform = self.weighting == "uniform"
        average = r.mean(uniform=uniform)
        share = len(r) / fed.n if uniform else r.weights.sum() / fed.sizes.sum()
        h = s.h - self.alpha * share * (average - s.x)
        return State(x=average - h / self.alpha, h=h)

    def begin(self, client: Client) -> None:
        client.keep.g = torch.zeros_like(client.initial_model())

    def train(self, client: Client, x: Tensor) -> Tensor:
        g = client.keep.g
        y = client.sgd(x, self.lr, self.steps, prox=self.alpha, anchor=x, linear=-g)
        client.keep.g = torch.sub(g, y - x, alpha=self.alpha)
        return y

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def allowed_steps(self, fed: Federation, curvature: float) -> dict[str, float]:
        return {"lr": 2.0 / (curvature + self.alpha)}

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (0, 0), "train": (d, d)}

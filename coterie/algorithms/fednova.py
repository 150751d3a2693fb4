"""FedNova: FedAvg in epochs, whose moves are normalised by the numbers of local steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.state import State


@dataclass(frozen=True)
class FedNova(Algorithm):
    """One shared model by normalised averaging (Wang et al., NeurIPS 2020, arXiv:2007.07481).

    y_i = x after tau_i SGD steps on client i,   tau_i = epochs ceil(rows / batch),   d_i = (x - y_i) / (tau_i lr)
    x <- x - server_lr lr (mean_i tau_i) (mean_i d_i)

    With means weighted by rows FedAvg would weigh a client by rows times steps, and so minimise another objective; this
    takes out the steps. With equal numbers of steps it is FedAvg. Local steps are plain SGD, for which the paper's
    |a_i|_1 is tau_i; the server knows it from the numbers of rows.

    Examples
    --------
    >>> import torch, coterie
    >>> xs, ys = [torch.ones(3, 1), torch.ones(1, 1)], [torch.zeros(3), 4 * torch.ones(1)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.FedNova(lr=0.01, batch=1), rounds=200)
    >>> run.personal.squeeze().round(decimals=1).tolist()  # fedavg in epochs would end near 0.4
    [1.0, 1.0]
    """

    lr: float = setting(0.05, "local step size", above=0, tune=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0))
    epochs: int = setting(2, "passes over a client's rows per round", low=1)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    server_lr: float = setting(1.0, "server step size", above=0)
    weighting: str = setting(
        "size", "weight clients by their rows (size) or equally (uniform)", options=("size", "uniform")
    )
    reveals: ClassVar[Reveals] = {"train": "model"}

    def start(self, fed: Federation) -> State:
        return State(x=fed.initial_model())

    def round(self, fed: Federation, s: State, t: int) -> State:
        r = fed.map(self.train, x=s.x, to=fed.sample(t, self.participation))
        uniform = self.weighting == "uniform"
        direction = r.mean(uniform=uniform)
        weights = torch.ones_like(r.weights) if uniform else r.weights
        effective = (weights * self._steps(r.weights)).sum() / weights.sum()
        return State(x=s.x - self.server_lr * self.lr * effective * direction)

    def _steps(self, rows: Tensor) -> Tensor:
        """Return the number of local steps of clients with so many rows."""
        return self.epochs * (torch.ceil(rows / self.batch) if self.batch else torch.ones_like(rows))

    def train(self, client: Client, x: Tensor) -> Tensor:
        steps = self._steps(client.size)
        return (x - client.sgd(x, self.lr, steps)) / (steps * self.lr)

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"train": (d, d)}

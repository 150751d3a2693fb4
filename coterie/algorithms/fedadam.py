"""FedAdam: FedAvg whose server takes steps of Adam."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.algorithms.base import setting
from coterie.algorithms.fedavg import FedAvg
from coterie.engine.federation import Federation
from coterie.engine.state import State


@dataclass(frozen=True)
class FedAdam(FedAvg):
    """One shared model; the mean move is a gradient to the server's Adam (Reddi et al., ICLR 2021, arXiv:2003.00295).

    delta = mean_i y_i - x,   y_i = x after `steps` SGD steps on client i
    m <- beta1 m + (1 - beta1) delta,   v <- beta2 v + (1 - beta2) delta^2,   x <- x + server_lr m / (sqrt(v) + tau)

    As in the paper there is no correction of the bias, m starts at 0 and v at tau^2. A coordinate that seldom moves
    takes larger steps.

    Examples
    --------
    >>> import torch, coterie
    >>> xs, ys = [torch.ones(3, 1), torch.ones(1, 1)], [torch.zeros(3), 4 * torch.ones(1)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.FedAdam(), rounds=300)
    >>> run.personal.squeeze().round(decimals=2).tolist()
    [1.0, 1.0]
    """

    server_lr: float = setting(0.03, "step size of the server", above=0, tune=(0.003, 0.01, 0.03, 0.1, 0.3))
    beta1: float = setting(0.9, "memory of the mean move", low=0, high=0.9999)
    beta2: float = setting(0.99, "memory of the squared moves", low=0, high=0.9999)
    tau: float = setting(1e-3, "smallest scale of a move: how adaptive the server is", above=0)

    def start(self, fed: Federation) -> State:
        x = fed.initial_model()
        return State(x=x, m=torch.zeros_like(x), v=torch.full_like(x, self.tau**2))

    def round(self, fed: Federation, s: State, t: int) -> State:
        r = fed.map(self.train, x=s.x, to=fed.sample(t, self.participation))
        delta = r.mean(uniform=self.weighting == "uniform") - s.x
        m = self.beta1 * s.m + (1 - self.beta1) * delta
        v = self._second_moment(s.v, delta.square())
        return State(x=s.x + self.server_lr * m / (v.sqrt() + self.tau), m=m, v=v)

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square

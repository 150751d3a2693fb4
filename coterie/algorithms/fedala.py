"""FedALA: each client learns, entry by entry, how much of the shared model to take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.algorithms.base import Reveals, setting
from coterie.algorithms.fedavg import FedAvg
from coterie.engine.client import Client


@dataclass(frozen=True)
class FedAla(FedAvg):
    """Adaptive local aggregation (Zhang et al., AAAI 2023, arXiv:2212.01197).

    a_i <- a_i - mixing_lr grad f_i(v_i + (x - v_i) a_i) (x - v_i), kept in [0, 1], `mixing_steps` times a round
    v_i = v_i + (x - v_i) a_i after `steps` SGD steps,   x <- mean_i v_i;   products are entry by entry

    Each client has a weight a_i of the shared model for each parameter, one at first. mix = "head" learns them for the
    last layer and takes the others from x, as the paper does for its lower layers.

    Examples
    --------
    >>> import torch, coterie
    >>> xs, ys = [torch.eye(2)] * 2, [torch.tensor([1.0, 0.0]), torch.tensor([1.0, 4.0])]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.FedAla(lr=0.2), rounds=200)
    >>> run.personal.round(decimals=2).abs().tolist()
    [[1.0, 0.0], [1.0, 4.0]]
    """

    mixing_lr: float = setting(1.0, "step size of the mixing weights", above=0, tune=(0.1, 1.0, 10.0))
    mixing_steps: int = setting(1, "steps of the mixing weights per round", low=0)
    mix: str = setting("all", "parameters that are mixed; others are shared", options=("all", "head"))
    reveals: ClassVar[Reveals] = {"train": "personal"}

    def begin(self, client: Client, x: Tensor) -> None:
        client.keep.personal, client.keep.weights = x, torch.ones_like(x)

    def train(self, client: Client, x: Tensor) -> Tensor:
        v, weights, mixed = client.keep.personal, client.keep.weights, client.groups[self.mix]
        for _ in range(self.mixing_steps):
            grad = client.grad(torch.lerp(v, x, weights), mask=mixed)
            weights = torch.addcmul(weights, grad, x - v, value=-self.mixing_lr).clamp_(0, 1)
        client.keep.weights = weights
        client.keep.personal = client.sgd(torch.lerp(v, x, weights), self.lr, self.steps)
        return client.keep.personal

    def deploy(self, client: Client) -> Tensor:  # type: ignore[override]
        return client.keep.personal

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (d, 0), "train": (d, d)}

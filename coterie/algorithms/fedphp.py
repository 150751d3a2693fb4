"""FedPHP: each client inherits a private model from its own past, which teaches its local steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.algorithms.base import setting
from coterie.algorithms.fedavg import FedAvg
from coterie.engine.client import Client


@dataclass(frozen=True)
class FedPhp(FedAvg):
    """Personalisation with inherited private models (Li, Zhan, Shao, Li, Song, ECML PKDD 2021).

    y_i = x after `steps` of y <- y - lr (grad f_i(y) + lam (y - p_i)),   x <- mean_i y_i
    p_i <- mu_i p_i + (1 - mu_i) y_i,   mu_i = mu z_i / (z_i + 1) at the z_i-th call of client i after its first

    Client i deploys p_i, the running mean of its own local models. lam = 0 and mu = 0 deploy FedAvg's local models.
    Deviations: p_i teaches by its parameters, where the paper compares features or predictions on the client's rows;
    mu_i grows with the calls so far, where the paper's grows linearly up to a last round that is known.

    Examples
    --------
    >>> import torch, coterie
    >>> xs, ys = [torch.ones(1, 1), torch.ones(1, 1)], [torch.zeros(1), 4 * torch.ones(1)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.FedPhp(lr=0.2), rounds=100)
    >>> run.state.x.round(decimals=1).tolist(), [round(one, 1) for one in run.personal.squeeze().tolist()]
    ([2.0], [0.6, 3.4])
    """

    lam: float = setting(0.1, "strength of the pull to the private model", low=0, tune=(0.01, 0.1, 0.3, 1.0))
    mu: float = setting(0.9, "memory of the private model in the end", low=0, high=1, tune=(0.5, 0.9))

    def begin(self, client: Client, x: Tensor) -> None:
        client.keep.private, client.keep.calls = x, torch.zeros_like(client.size)

    def train(self, client: Client, x: Tensor) -> Tensor:
        private, calls = client.keep.private, client.keep.calls
        y = client.sgd(x, self.lr, self.steps, prox=self.lam, anchor=private)
        client.keep.private = torch.lerp(y, private, self.mu * calls / (calls + 1))
        client.keep.calls = calls + 1
        return y

    def deploy(self, client: Client) -> Tensor:  # type: ignore[override]
        return client.keep.private

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (d, 0), "train": (d, d)}

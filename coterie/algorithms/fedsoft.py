"""FedSoft: personal models near a mixture of cluster centres, which they move by their shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.algorithms.several_starts import several_starts
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.optimizers import OPTIMIZERS
from coterie.engine.state import State
from coterie.models.metrics.over_rows import row_losses


@dataclass(frozen=True)
class FedSoft(Algorithm):
    """Soft clustered federated learning with proximal local updates (Ruan, Joe-Wong, AAAI 2022, arXiv:2112.06053).

    u_is = share of client i's rows that centre c_s fits best, at least `floor`
    v_i <- v_i - lr (grad f_i(v_i) + lam sum_s u_is (v_i - c_s)),   `steps` times a round
    c_s <- sum_i n_i u_is v_i / sum_i n_i u_is,   n_i the rows of client i

    The pulls to all centres are one pull, to sum_s u_is c_s. Shares are counted when a client begins and in every
    `interval`-th round. Deviation: all clients of a round train, where the paper draws some for each centre.

    Examples
    --------
    >>> import torch, coterie
    >>> xs = [torch.ones(2, 1)] * 4
    >>> ys = [torch.full((2,), target) for target in (-2.0, -2.0, 2.0, 2.0)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear(), seed=1)
    >>> run = coterie.fit(fed, coterie.algorithms.FedSoft(centres=2), rounds=100)
    >>> [round(value, 1) for value in run.personal.squeeze().tolist()]
    [-2.0, -2.0, 2.0, 2.0]
    """

    lr: float = setting(0.05, "step size", above=0, tune=(0.01, 0.03, 0.1, 0.3))
    lam: float = setting(0.1, "strength of the pull to the centres", low=0, tune=(0.01, 0.1, 0.3, 1.0))
    centres: int = setting(3, "cluster centres", low=1, tune=(2, 3, 5))
    floor: float = setting(1e-3, "smallest share of a centre at a client", above=0, high=1)
    interval: int = setting(5, "rounds between two counts of the shares", low=1)
    spread: float = setting(0.1, "standard deviation of the noise added to each starting centre", low=0)
    steps: int = setting(5, "local steps per round", low=1)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    optimizer: str = setting("sgd", "optimiser of local steps", options=OPTIMIZERS)
    row_by_row: ClassVar[bool] = True
    reveals: ClassVar[Reveals] = {"train": "personal"}

    def start(self, fed: Federation) -> State:
        return State(centres=several_starts(fed, "fedsoft", self.centres, self.spread))

    def round(self, fed: Federation, s: State, t: int) -> State:
        due = (t - 1) % self.interval == 0
        r = fed.map(self.train, centres=s.centres, count=due, to=fed.sample(t, self.participation))
        if len(r) == 0:
            return s
        weights = (r.weights * r["shares"]).t()
        return State(centres=weights @ r["model"] / weights.sum(1, keepdim=True))

    def begin(self, client: Client, centres: Tensor) -> None:
        client.keep.personal, client.keep.shares = client.initial_model(), self._shares(client, centres)

    def train(self, client: Client, centres: Tensor, count: bool) -> dict[str, Tensor]:
        shares = self._shares(client, centres) if count else client.keep.shares
        middle = (shares.unsqueeze(-2) @ centres).squeeze(-2)
        v = client.keep.personal
        client.keep.personal = client.sgd(v, self.lr, self.steps, prox=self.lam, anchor=middle)
        client.keep.shares = shares
        return {"model": client.keep.personal, "shares": shares}

    def _shares(self, client: Client, centres: Tensor) -> Tensor:
        """Return the shares [..., s] of the centres in a client's rows."""

        def counted(w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            nearest = row_losses(client.model, w, x, y, weight).argmin(-2)
            return (torch.nn.functional.one_hot(nearest, self.centres) * weight.unsqueeze(-1)).sum(-2)

        shares = client.over_rows(counted, centres, reduce=False).clamp(min=self.floor)
        return shares / shares.sum(-1, keepdim=True)

    def deploy(self, client: Client) -> Tensor:
        return client.keep.personal

    def common(self, fed: Federation, s: State) -> Tensor:
        mean: Tensor = s.centres.mean(0)
        return mean

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (self.centres * d, 0), "train": (self.centres * d + 1, d + self.centres)}

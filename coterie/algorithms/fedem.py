"""FedEM: every client is a mixture of a few shared models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.algorithms.several_starts import several_starts
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.models.metrics.over_rows import row_losses


@dataclass(frozen=True)
class FedEm(Algorithm):
    """Federated expectation-maximisation of a mixture (Marfoq et al., NeurIPS 2021, arXiv:2108.10252).

    q_m(row) proportional to pi_im exp(-loss of the row by theta_m),   pi_im <- mean over the rows of q_m
    theta_m <- mean_i of theta_m after `steps` SGD steps on the losses of client i's rows, each times q_m(row)

    All clients share the components theta_m; pi_i stays at client i. Deviation: the paper predicts with the mixture of
    the components' predictions. A model here is one parameter vector: of sum_m pi_im theta_m, which is the mixture for
    linear models, and the component of the largest pi_im, a client deploys the one with the smaller training loss.

    Examples
    --------
    >>> import torch, coterie
    >>> xs = [torch.ones(2, 1)] * 4
    >>> ys = [torch.full((2,), target) for target in (-2.0, -2.0, 2.0, 2.0)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.FedEm(components=2), rounds=100)
    >>> [round(value, 1) for value in run.personal.squeeze().tolist()]
    [-2.0, -2.0, 2.0, 2.0]
    """

    lr: float = setting(0.05, "local step size", above=0, tune=(0.01, 0.03, 0.1, 0.3, 1.0))
    components: int = setting(3, "shared models", low=1, tune=(2, 3, 5))
    spread: float = setting(0.1, "standard deviation of the noise added to each starting model", low=0)
    steps: int = setting(5, "local steps per round", low=1)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    weighting: str = setting(
        "size", "weight clients by their rows (size) or equally (uniform)", options=("size", "uniform")
    )
    row_by_row: ClassVar[bool] = True
    reveals: ClassVar[Reveals] = {"train": "model"}

    starts_from: ClassVar[Mapping[str, str]] = {"train": "thetas"}

    def start(self, fed: Federation) -> State:
        if self.components == 1:
            return State(thetas=fed.initial_model().unsqueeze(0))
        return State(thetas=several_starts(fed, "fedem", self.components, self.spread))

    def round(self, fed: Federation, s: State, t: int) -> State:
        r = fed.map(self.train, thetas=s.thetas, to=fed.sample(t, self.participation))
        return State(thetas=r.mean(uniform=self.weighting == "uniform"))

    def begin(self, client: Client) -> None:
        equal = torch.ones_like(client.size) / self.components
        client.keep.pi = equal.expand(*client.lead, self.components)

    def train(self, client: Client, thetas: Tensor) -> Tensor:
        def expected(thetas: Tensor, pi: Tensor, *rows: Tensor) -> Tensor:
            """E step: the responsibilities [..., m, B] of the components for these rows."""
            return torch.softmax(pi.log().unsqueeze(-1) - row_losses(client.model, thetas, *rows), -2)

        def maximised(m: int) -> Tensor:
            """M step: a component after steps on the rows that it is responsible for, the same for all."""
            theta, own = thetas[..., m, :], q[..., m, :]
            return client.sgd(theta, self.lr, self.steps, importance=own, again=m > 0)

        q = client.values_of_rows(expected, (thetas, client.keep.pi))
        client.keep.pi = (q.sum(-1) / client.size.clamp(min=1)).clamp(min=1e-12)
        return torch.stack([maximised(m) for m in range(self.components)], -2)

    def deploy(self, client: Client, thetas: Tensor) -> Tensor:
        pi = client.keep.pi.unsqueeze(-1)
        mixed = (pi * thetas).sum(-2) / pi.sum(-2)
        best = thetas.gather(-2, pi.argmax(-2, keepdim=True).expand(*thetas.shape[:-2], 1, thetas.shape[-1]))
        best = best.squeeze(-2)
        return torch.where(client.loss(mixed) <= client.loss(best), mixed, best)

    def common(self, fed: Federation, s: State) -> Tensor:
        mean: Tensor = s.thetas.mean(0)
        return mean

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (0, 0), "train": (self.components * d, self.components * d)}

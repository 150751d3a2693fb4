"""Ditto: personal models held near a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.optimizers import OPTIMIZERS
from coterie.engine.state import State


@dataclass(frozen=True)
class Ditto(Algorithm):
    """Personal models held near a shared one (Li et al., ICML 2021, arXiv:2012.04221).

    v_i <- v_i - lr (grad f_i(v_i) + lam (v_i - x)),   x <- mean of local SGD from x

    lam = 0 is training alone; a large lam gives the shared model. The shared model is FedAvg's and does not depend on
    lam.

    Examples
    --------
    >>> import torch, coterie
    >>> xs, ys = [torch.ones(1, 1), torch.ones(1, 1)], [torch.zeros(1), 4 * torch.ones(1)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.Ditto(lr=0.1, lam=1.0), rounds=50)
    >>> run.personal.squeeze().round(decimals=2).tolist()
    [1.0, 3.0]
    """

    lr: float = setting(0.05, "step size", above=0, tune=(0.01, 0.03, 0.1, 0.3))
    lam: float = setting(1.0, "strength of the pull to the shared model", low=0, tune=(0.01, 0.1, 0.3, 1.0))
    steps: int = setting(5, "local steps per round", low=1)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    weighting: str = setting(
        "size", "weight clients by their rows (size) or equally (uniform)", options=("size", "uniform")
    )
    optimizer: str = setting("sgd", "optimiser of local steps", options=OPTIMIZERS)
    reveals: ClassVar[Reveals] = {"train": "model"}

    starts_from: ClassVar[Mapping[str, str]] = {"train": "x"}
    tolerates_late: ClassVar[frozenset[str]] = frozenset({"train"})
    stays: ClassVar[frozenset[str]] = frozenset({"personal"})

    def start(self, fed: Federation) -> State:
        return State(x=fed.initial_model())

    def round(self, fed: Federation, s: State, t: int) -> State:
        r = fed.map(self.train, x=s.x, to=fed.sample(t, self.participation))
        return State(x=r.mean(uniform=self.weighting == "uniform"))

    def begin(self, client: Client, x: Tensor) -> None:
        client.keep.personal = x

    def train(self, client: Client, x: Tensor) -> Tensor:
        v = client.keep.personal
        client.keep.personal = client.sgd(v, self.lr, self.steps, prox=self.lam, anchor=x, stream="personal")
        return client.sgd(x, self.lr, self.steps)

    def deploy(self, client: Client) -> Tensor:
        return client.keep.personal

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (d, 0), "train": (d, d)}

"""FedMD: models of any architecture that learn from what all of them say about public rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.models.assorted import Assorted
from coterie.models.base import Model


@dataclass(frozen=True)
class FedMD(Algorithm):
    """Heterogeneous federated learning by model distillation (Li, Wang 2019, arXiv:1910.03581).

    digest:   v_i <- v_i - digest_lr grad mean_p |z(p; v_i) - Z_p|^2 / 2,   `digest_steps` times
    revisit:  v_i <- `steps` of SGD on the client's own rows
    Z_p <- mean_i z(p; v_i),   z the scores of public row p

    Only scores travel, so clients may have different architectures: `models.assorted(...)`. Public rows are standard
    normal numbers, as tables are standardised; everybody draws them from the seed.
    """

    lr: float = setting(
        0.05, "step size on a client's own rows", above=0, tune=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    )
    steps: int = setting(5, "steps on a client's own rows per round", low=1)
    digest_lr: float = setting(0.05, "step size on public rows", above=0, tune=(0.01, 0.1))
    digest_steps: int = setting(5, "steps on public rows per round", low=0)
    rows: int = setting(64, "public rows", low=1, high=100_000)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    reveals: ClassVar[Reveals] = {"train": "personal"}

    def start(self, fed: Federation) -> State:
        outputs = fed.model.outputs or 1
        return State(consensus=fed.initial_model().new_zeros(self.rows, outputs), known=0.0)

    def round(self, fed: Federation, s: State, t: int) -> State:
        ids = fed.sample(t, self.participation)
        r = fed.map(self.train, consensus=s.consensus, known=s.known, to=ids)
        return State(consensus=r.mean(uniform=True), known=1.0)

    def begin(self, client: Client) -> None:
        v, model = client.initial_model(), client.model
        if isinstance(model, Assorted):  # client k has the k-th network, in turn
            seed = client.seed
            starts = torch.stack(
                [model.start_of(k, seed, v.dtype, v.device) for k in range(len(model.bases))]
            )
            v = starts[client.number.squeeze(-1) % len(starts)]
        client.keep.personal = v

    def train(self, client: Client, consensus: Tensor, known: float) -> Tensor:
        v, public = client.keep.personal, client.public_rows(self.rows)
        for _ in range(self.digest_steps if known else 0):
            apart = client.model.scores(v, public) - consensus
            v = v - self.digest_lr * client.model.score_grad(v, public, apart / self.rows)
        v = client.sgd(v, self.lr, self.steps)
        client.keep.personal = v
        return client.model.scores(v, public)

    def deploy(self, client: Client) -> Tensor:
        return client.keep.personal

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (0, 0), "train": (self.rows + 1, self.rows)}

    def traffic_of(self, model: Model) -> dict[str, tuple[int, int]]:
        size = self.rows * (model.outputs or 1)
        return {"begin": (0, 0), "train": (size + 1, size)}

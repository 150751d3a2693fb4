"""FedFomo: each client takes from others the models that do well on its own rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.optimizers import OPTIMIZERS
from coterie.engine.state import State

DIRECT = "donot_use_mm_for_euclid_dist"  # distances from differences: two models may be close


@dataclass(frozen=True)
class FedFomo(Algorithm):
    """First-order model optimisation (Zhang, Sapra, Fidler, Yeung, Alvarez, ICLR 2021, arXiv:2012.08565).

    w_ij = max(0, F_i(v_i) - F_i(v_j)) / |v_j - v_i|, divided by their sum,   F_i the loss on validation rows
    v_i = v_i + sum_j w_ij (v_j - v_i) after `steps` SGD steps

    A client is sent `candidates` models of others: those that it weighed most so far, and a fraction `explore` at
    random. Deviations: this fraction is fixed; a client without validation rows compares models on its training rows.
    """

    lr: float = setting(0.05, "local step size", above=0, tune=(0.003, 0.01, 0.03, 0.1, 0.3))
    candidates: int = setting(5, "models of others that a client is sent in a round", low=1, tune=(3, 5, 10))
    explore: float = setting(0.3, "fraction of the candidates that are drawn at random", low=0, high=1)
    steps: int = setting(5, "local steps per round", low=1)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    optimizer: str = setting("sgd", "optimiser of local steps", options=OPTIMIZERS)
    reveals: ClassVar[Reveals] = {"train": "personal"}

    def start(self, fed: Federation) -> State:
        nobody = torch.zeros(fed.n, fed.n, dtype=fed.dtype, device=fed.device)
        return State(models=fed.initial_model().repeat(fed.n, 1), affinity=nobody)

    def round(self, fed: Federation, s: State, t: int) -> State:
        ids = fed.sample(t, self.participation)
        asked = fed.everyone if ids is None else ids
        picked = self._picked(fed, s.affinity, t)[asked]
        r = fed.map(self.train, each={"others": s.models[picked]}, to=ids)
        if len(r) == 0:
            return s
        picked = picked[torch.searchsorted(asked, r.ids)]
        row = s.affinity[r.ids]
        seen = row.scatter(1, picked, row.gather(1, picked) + r["weights"])
        return State(models=r.put(s.models, "model"), affinity=s.affinity.index_copy(0, r.ids, seen))

    def _picked(self, fed: Federation, affinity: Tensor, t: int) -> Tensor:
        """Return the candidates [n, m] of all clients: others with the largest affinity, and some at random."""
        count = min(self.candidates, fed.n - 1)
        drawn = fed.uniform("candidates", t, fed.n**2).to(affinity).view(fed.n, fed.n)
        drawn.fill_diagonal_(-1.0)
        ranked = (affinity + 1e-9 * drawn).fill_diagonal_(-1.0)
        known = ranked.topk(count - round(self.explore * count), 1).indices
        return drawn.scatter_add(1, known, torch.full_like(drawn, 2.0)).topk(count, 1).indices

    def begin(self, client: Client) -> None:
        client.keep.personal = client.initial_model()

    def train(self, client: Client, others: Tensor) -> dict[str, Tensor]:
        own = client.keep.personal
        before, others_loss = self._losses(client, own.unsqueeze(-2)), self._losses(client, others)
        apart = torch.cdist(own.unsqueeze(-2), others, compute_mode=DIRECT).squeeze(-2)
        gains = (before - others_loss).clamp(min=0) / apart.clamp(min=1e-12)
        weights = gains / gains.sum(-1, keepdim=True).clamp(min=1e-30)
        mixed = (1 - weights.sum(-1, keepdim=True)) * own + (weights.unsqueeze(-2) @ others).squeeze(-2)
        client.keep.personal = client.sgd(mixed, self.lr, self.steps)
        return {"model": client.keep.personal, "weights": weights}

    def _losses(self, client: Client, models: Tensor) -> Tensor:
        known = client.count("validation") > 0
        if not known.any():
            return client.errors(models)
        held = client.errors(models, "validation")
        return held if known.all() else torch.where(known, held, client.errors(models))

    def deploy(self, client: Client) -> Tensor:
        return client.keep.personal

    def common(self, fed: Federation, s: State) -> Tensor:
        mean: Tensor = s.models.mean(0)
        return mean

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (0, 0), "train": (self.candidates * d, d + self.candidates)}

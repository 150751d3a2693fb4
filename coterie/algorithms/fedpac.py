"""FedPAC: features of each class are aligned, and every client gets the combination of heads that suits it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.algorithms.base import Reveals, setting
from coterie.algorithms.partly_shared import PartlyShared
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.models.base import Model
from coterie.models.heads import last_linear
from coterie.models.local_sgd import Centres
from coterie.theory.simplex import best_mixtures, onto_simplex


@dataclass(frozen=True)
class FedPAC(PartlyShared):
    """Feature alignment and classifier collaboration (Xu, Tong, Huang, ICLR 2023, arXiv:2306.11867).

    v_i <- `head_steps` of SGD on the head, then u_i <- `steps` of SGD on the body u with the penalty
    lam mean_b |h(x_b; u) - c_{y_b}|^2 / width;   u <- mean of the u_i
    v_i <- sum_j a_ij v_j,   a_i on the simplex minimises sum_j a_j^2 s_j + |sum_j a_j m_j - m_i|^2

    With the features h at the received u: m_i are the shares of the classes times their mean features, s_i the variance
    (mean |h|^2 - |m_i|^2) / rows of such means, and c_k the mean features of class k over all clients.
    """

    head_steps: int = setting(10, "steps of the head per round", low=1, tune=(5, 20))
    lam: float = setting(
        1.0, "strength of the pull to the classes' mean features", low=0, tune=(0.1, 1.0, 10.0)
    )
    row_by_row: ClassVar[bool] = True
    reveals: ClassVar[Reveals] = {"train": "values"}

    begin: ClassVar[None] = None  # type: ignore[assignment]  # the server has the heads
    starts_from: ClassVar[dict[str, str]] = {}
    tolerates_late: ClassVar[frozenset[str]] = frozenset()  # the server needs statistics of all heads

    def start(self, fed: Federation) -> State:
        x, width = fed.initial_model(), last_linear(fed.model, self.name).width
        heads = self.own_part(fed.model).of(x).repeat(fed.n, 1)
        classes = fed.model.classes_known
        known, prototypes = x.new_zeros(classes), x.new_zeros(classes, width)
        return State(
            shared=self.shared_part(fed.model).of(x),
            heads=heads,
            prototypes=prototypes,
            known=known,
            mixtures=torch.eye(fed.n, dtype=x.dtype, device=x.device),
        )

    def round(self, fed: Federation, s: State, t: int) -> State:
        ids = fed.sample(t, self.participation)
        each = {"head": s.heads if ids is None else s.heads[ids]}
        r = fed.map(self.train, to=ids, each=each, shared=s.shared, prototypes=s.prototypes, known=s.known)
        body = r.mean("shared", uniform=self.weighting == "uniform")
        counts = r["counts"].sum(0)
        prototypes = r["sums"].sum(0) / counts.clamp(min=1).unsqueeze(-1)
        rows = r["counts"].sum(-1, keepdim=True).clamp(min=1)
        means = r["sums"].flatten(1) / rows
        spread = (r["square"] - means.square().sum(-1, keepdim=True)).clamp(min=0) / rows
        before = onto_simplex(s.mixtures[r.ids][:, r.ids])  # from which the search for the best begins
        mixtures = best_mixtures(means, spread.squeeze(-1), start=before)
        heads = mixtures @ r["head"]
        return State(
            shared=body,
            heads=s.heads.index_copy(0, r.ids, heads),
            prototypes=torch.where((counts > 0).unsqueeze(-1), prototypes, s.prototypes),
            known=torch.maximum((counts > 0).to(s.known), s.known),
            mixtures=s.mixtures.index_put((r.ids.unsqueeze(-1), r.ids), mixtures),
        )

    def train(  # type: ignore[override]
        self, client: Client, head: Tensor, shared: Tensor, prototypes: Tensor, known: Tensor
    ) -> dict[str, Tensor]:
        own, body = self.own_part(client.model), self.shared_part(client.model)
        w = own.into(body.into(client.initial_model(), shared), head)
        sums, counts, square = client.class_sums(w)
        pull = Centres(prototypes, known, 2 * self.lam / prototypes.shape[-1])
        w = client.sgd(w, self.lr, self.head_steps, mask=own.mask, stream="head")
        w = client.sgd(w, self.lr, self.steps, mask=body.mask, centres=pull)
        return {
            "shared": body.of(w),
            "head": own.of(w),
            "sums": sums,
            "counts": counts,
            "square": square,
        }

    def deploy(self, client: Client, head: Tensor, shared: Tensor) -> Tensor:  # type: ignore[override]
        return self.own_part(client.model).into(
            self.shared_part(client.model).into(client.initial_model(), shared), head
        )

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"shared": s.shared}, {"head": s.heads}

    def common(self, fed: Federation, s: State) -> Tensor:
        return self.own_part(fed.model).into(super().common(fed, s), s.heads.mean(0))

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"train": (d, d)}

    def traffic_of(self, model: Model) -> dict[str, tuple[int, int]]:
        size = model.d + model.classes_known * (last_linear(model, self.name).width + 1)
        return {"train": (size, size + 1)}

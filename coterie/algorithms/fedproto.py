"""FedProto: models of one's own that agree on where each class lies among the features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.models.base import Model
from coterie.models.heads import last_linear
from coterie.models.local_sgd import Centres
from coterie.models.zoo import mlp

FAR = 1e4  # score below all others, for a class of which nobody has a row


@dataclass(frozen=True)
class FedProto(Algorithm):
    """Prototypes instead of models (Tan et al., AAAI 2022, arXiv:2105.00243).

    v_i <- v_i - lr grad [f_i(v_i) + lam mean_b |h(x_b; v_i) - c_{y_b}|^2 / width],   h the features before the head
    c_k <- mean of h(x_b; v_i) over all rows b of class k of the clients that answered

    Only sums of features by class and numbers of rows travel. Client i predicts the class whose prototype c_k is
    nearest to h(x; v_i), which is a linear head: |h - c_k|^2 = |h|^2 - (2 c_k'h - |c_k|^2). Numbers are one class
    and are predicted by the client's own head.
    """

    lr: float = setting(0.05, "step size", above=0, tune=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0))
    lam: float = setting(1.0, "strength of the pull to the prototypes", low=0, tune=(0.1, 1.0, 10.0))
    steps: int = setting(5, "local steps per round", low=1)
    predict: str = setting("prototypes", "what predicts classes", options=("prototypes", "head"))
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    row_by_row: ClassVar[bool] = True
    reveals: ClassVar[Reveals] = {"train": "values"}

    def start(self, fed: Federation) -> State:
        layer = last_linear(fed.model, self.name)
        prototypes = fed.initial_model().new_zeros(fed.model.classes_known, layer.width)
        return State(prototypes=prototypes, known=prototypes.new_zeros(len(prototypes)))

    def round(self, fed: Federation, s: State, t: int) -> State:
        r = fed.map(self.train, prototypes=s.prototypes, known=s.known, to=fed.sample(t, self.participation))
        counts = r.sum("counts")
        prototypes = r.sum("sums") / counts.clamp(min=1).unsqueeze(-1)
        seen = (counts > 0).to(counts.dtype)
        return State(
            prototypes=torch.where(seen.unsqueeze(-1) > 0, prototypes, s.prototypes),
            known=torch.maximum(seen, s.known),
        )

    def begin(self, client: Client) -> None:
        client.keep.personal = client.initial_model()

    def train(self, client: Client, prototypes: Tensor, known: Tensor) -> dict[str, Tensor]:
        pull = Centres(prototypes, known, 2 * self.lam / prototypes.shape[-1])
        v = client.sgd(client.keep.personal, self.lr, self.steps, centres=pull)
        client.keep.personal = v
        sums, counts, _ = client.class_sums(v)
        return {"sums": sums, "counts": counts}

    def deploy(self, client: Client, prototypes: Tensor, known: Tensor) -> Tensor:
        v = client.keep.personal
        if self.predict == "head" or client.model.task == "regression":
            return v
        weight, bias = 2 * prototypes, -prototypes.square().sum(-1) - FAR * (1 - known)
        if client.model.task == "binary":
            weight, bias = weight[..., 1:, :] - weight[..., :1, :], bias[..., 1:] - bias[..., :1]
        near = last_linear(client.model, self.name).filled(v, weight, bias)
        return torch.where(known.sum(-1, keepdim=True) > 0, near, v)

    def common(self, fed: Federation, s: State) -> None:
        return None

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (0, 0), "train": (d, d)}

    def traffic_of(self, model: Model) -> dict[str, tuple[int, int]]:
        return self.traffic(model.classes_known * (last_linear(model, self.name).width + 1))

    def trial_model(self, rounds: int) -> Model:
        return mlp((4,), stacked=False)

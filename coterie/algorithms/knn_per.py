"""kNN-Per: one shared model, whose predictions each client mixes with those of its nearest rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from coterie._core.errors import SettingError
from coterie.algorithms.base import setting
from coterie.algorithms.partly_shared import PartlyShared
from coterie.engine.client import Client
from coterie.models.base import Model
from coterie.models.neighbours import Neighbours, with_neighbours
from coterie.models.zoo import mlp

GRID = (0.5, 0.0, 0.25, 0.75, 1.0)  # the first where there are no validation rows


@dataclass(frozen=True)
class KNNPer(PartlyShared):
    """A shared model and k nearest neighbours at each client (Marfoq et al., ICML 2022, arXiv:2111.09360).

    x as in FedAvg;   client i predicts lam_i p_knn + (1 - lam_i) p_x
    p_knn(y) proportional to the sum of exp(-|h(row; x) - h(b; x)| / scale) over the k nearest rows b with y_b = y

    h are the features before the last layer of x. The store of features and targets is made when a client deploys,
    from its training rows, and never leaves it. Each client chooses lam_i on its validation rows.
    """

    lam: float | str = setting(
        "auto", "weight of the neighbours, 0 to 1, or auto: by validation rows", low=0, high=1
    )
    k: int = setting(10, "number of nearest rows", low=1, tune=(5, 10, 30))
    scale: float = setting(1.0, "distance at which a row counts 1/e", above=0, tune=(0.3, 1.0, 3.0))
    personal: str = setting("store", "parameter groups that stay at the clients", options=("store",))

    row_by_row: ClassVar[bool] = True
    remedy: ClassVar[str] = (
        "pass model=coterie.models.with_neighbours(coterie.models.mlp()) to the federation"
    )
    begin: ClassVar[None] = None  # type: ignore[assignment]  # the store is made when it is needed

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.lam, str) and self.lam != "auto":
            raise SettingError(f"{self.name}: lam = {self.lam!r} is neither a number nor auto")

    def train(self, client: Client, shared: Tensor) -> Tensor:
        x = self.shared_part(client.model)
        return x.of(client.sgd(x.into(client.initial_model(), shared), self.lr, self.steps))

    def deploy(self, client: Client, shared: Tensor) -> Tensor:
        x = self.shared_part(client.model).into(client.initial_model(), shared)
        features, targets, weight = client.features(x)
        there = (weight > 0).to(x.dtype)
        rows = torch.cat([features, targets.to(x.dtype).unsqueeze(-1), there.unsqueeze(-1)], -1)
        rows = rows * there.unsqueeze(-1)
        assert isinstance(client.model, Neighbours)
        room = client.model.rows - rows.shape[-2]
        store = functional.pad(rows, (0, 0, 0, room)).flatten(-2)  # a negative pad leaves rows out
        tried = [
            self._mixed(client, x, store, lam) for lam in (GRID if self.lam == "auto" else [float(self.lam)])
        ]
        if len(tried) == 1:
            return tried[0]
        errors = torch.cat([client.error(model, "validation") for model in tried], -1)
        best = errors.argmin(-1)[..., None, None].expand(*x.shape[:-1], 1, x.shape[-1])
        return torch.stack(tried, -2).gather(-2, best).squeeze(-2)

    def _mixed(self, client: Client, x: Tensor, store: Tensor, lam: float) -> Tensor:
        """Return the model with this store, in which neighbours have the weight lam."""
        how = x.new_tensor([lam, self.k, self.scale]).expand(*x.shape[:-1], 3)
        return self.own_part(client.model).into(x, torch.cat([how, store], -1))

    def own_model(self, rounds: int) -> Model:
        return with_neighbours(mlp((64,)))

    def trial_model(self, rounds: int) -> Model:
        return with_neighbours(mlp((4,), stacked=False), rows=8)

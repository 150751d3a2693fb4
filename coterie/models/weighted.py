"""A model whose rows carry weights of their own, in the last column of the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from coterie.models.base import Model
from coterie.models.metrics import Metric


@dataclass(frozen=True, eq=False)
class Weighted(Model):
    """A model of weighted rows: sum_b weight_b v_b loss(w; x_b, y_b), with v_b in the last column of the inputs.

    The weights of a client's rows should have the mean one, so that its loss is a weighted mean.

    Parameters
    ----------
    base
        The model of the other columns.

    Examples
    --------
    A row of weight two counts like two rows.

    >>> import torch, coterie
    >>> base, y = coterie.models.linear(), torch.tensor([1.0, 3.0])
    >>> model = Weighted(base).fit_to(torch.tensor([[1.0, 4 / 3], [2.0, 2 / 3]]), y)
    >>> rows = model.prepare(torch.tensor([[1.0, 4 / 3], [2.0, 2 / 3]]))
    >>> twice = base.fit_to(torch.ones(3, 1), torch.ones(3))
    >>> x, w = torch.tensor([[1.0], [1.0], [2.0]]), torch.tensor([0.5])
    >>> expected = twice.grad(w, x, torch.tensor([1.0, 1.0, 3.0]), torch.full((3,), 1 / 3))
    >>> torch.allclose(model.grad(w, rows, y, torch.full((2,), 1 / 2)), expected)
    True
    """

    base: Model

    @property
    def d(self) -> int:
        return self.base.d

    @property
    def task(self) -> str:
        return self.base.task

    @property
    def outputs(self) -> int | None:
        return self.base.outputs

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        return replace(self, base=self.base.fit_to(x[:, :-1], y))

    def prepare(self, x: Tensor) -> Tensor:
        return torch.cat([self.base.prepare(x[:, :-1]), x[:, -1:]], -1)

    def initial(self, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        return self.base.initial(seed, dtype, device)

    def loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self.base.loss(w, *_rows(x, y, weight))

    def grad(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self.base.grad(w, *_rows(x, y, weight))

    def hvp(self, w: Tensor, v: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self.base.hvp(w, v, *_rows(x, y, weight))

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        return self.base.scores(w, x[..., :-1])

    def measure(
        self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, metrics: Sequence[Metric]
    ) -> dict[str, Tensor]:
        own = weight * x[..., -1]
        share = own * (weight.sum(-1, keepdim=True) / own.sum(-1, keepdim=True).clamp_min(1e-300))
        return super().measure(w, x, y, share.to(weight.dtype), metrics)

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self.base.smoothness(w, *_rows(x, y, weight))

    def convexity(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self.base.convexity(w, *_rows(x, y, weight))

    def solve(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, tol: float, prox: float = 0.0) -> Tensor:
        return self.base.solve(w, *_rows(x, y, weight), tol, prox)

    def module(self, w: Tensor) -> nn.Module:
        return self.base.module(w)

    def describe(self) -> dict[str, Any]:
        return self.base.describe()


def _rows(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs without their weights, targets, and the product of both weights."""
    return x[..., :-1], y, weight * x[..., -1]

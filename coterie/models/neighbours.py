"""A model beside a store of rows: predictions are mixed with those of the nearest rows in the store."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie._core.errors import SettingError
from coterie.models.base import Model
from coterie.models.glm import Glm
from coterie.models.groups import ParameterGroups
from coterie.models.network import Network
from coterie.models.predictor import predictions

TINY = 1e-12  # least probability, whose logarithm is a score


@dataclass(frozen=True, eq=False)
class Neighbours(Model):
    """Model `base` with a store of up to `rows` rows: mix * neighbours' prediction + (1 - mix) * base's.

    Parameters are those of the base, then [mix, count, scale], then the rows of the store: their features (what
    reaches the base's last layer), target, and 1 if there is a row. The base alone is trained.
    """

    base: Model = Model()  # noqa: RUF009
    rows: int = 256

    @property
    def width(self) -> int:
        """Number of features of a row in the store."""
        if isinstance(self.base, Glm):
            return int(self.base.features or 0)
        assert isinstance(self.base, Network)
        head = self.base.flat_module.head
        if head is None:
            raise SettingError("the network has no nn.Linear, so there are no features to compare rows by")
        return int(self.base.flat_module.module.get_submodule(head).in_features)  # type: ignore[arg-type]

    @functools.cached_property
    def d(self) -> int:
        return self.base.d + 3 + self.rows * (self.width + 2)

    @property
    def task(self) -> str:
        return self.base.task

    @property
    def outputs(self) -> int | None:
        return self.base.outputs

    @property
    def reduction(self) -> str:
        return self.base.reduction

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        return replace(self, base=self.base.fit_to(x, y))

    def prepare(self, x: Tensor) -> Tensor:
        return self.base.prepare(x)

    def initial(self, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        start = self.base.initial(seed, dtype, device)
        return functional.pad(start, (0, self.d - self.base.d))

    @property
    def groups(self) -> ParameterGroups:
        """Groups of the base, and "store": everything that is not trained."""
        base, store = self.base.groups, [slice(self.base.d, self.d)]
        return ParameterGroups(self.d, {**base.slices, "all": [slice(0, self.d)], "store": store})

    def loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self.base.loss(w[..., : self.base.d], x, y, weight)

    def grad(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self._padded(self.base.grad(w[..., : self.base.d], x, y, weight))

    def hvp(self, w: Tensor, v: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        d = self.base.d
        return self._padded(self.base.hvp(w[..., :d], v[..., :d], x, y, weight))

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self.base.smoothness(w[..., : self.base.d], x, y, weight)

    def solve(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, tol: float, prox: float = 0.0) -> Tensor:
        solved = self.base.solve(w[..., : self.base.d], x, y, weight, tol, prox)
        return torch.cat([solved, w[..., self.base.d :]], -1)

    def hidden_features(self, w: Tensor, x: Tensor) -> Tensor:
        return self.base.hidden_features(w[..., : self.base.d], x)

    def feature_grad(self, w: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        return self._padded(self.base.feature_grad(w[..., : self.base.d], x, slope))

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        """Return the base's scores where the store is empty, else those that give the mixed prediction."""
        d, lead = self.base.d, w.shape[:-1]
        scores, (mix, count, scale) = self.base.scores(w[..., :d], x), w[..., d : d + 3, None].unbind(-2)
        store = w[..., d + 3 :].reshape(*lead, self.rows, self.width + 2)
        features, targets, there = store[..., :-2], store[..., -2], store[..., -1] > 0
        found = self.hidden_features(w, x).to(w.dtype)
        apart = torch.cdist(found, features, compute_mode="donot_use_mm_for_euclid_dist")  # no digits cancel
        apart = apart.masked_fill(~there.unsqueeze(-2), torch.inf)
        near = apart.argsort(dim=-1, stable=True).argsort(dim=-1) < count.unsqueeze(-1)
        share = torch.softmax(
            (-apart / scale.unsqueeze(-1).clamp(min=TINY)).masked_fill(~near, -torch.inf), -1
        )
        usable = (there.any(-1, keepdim=True) & (mix > 0)).unsqueeze(-1)
        mix = mix.unsqueeze(-1)
        if self.task == "regression":
            mixed = mix * share @ targets.unsqueeze(-1) + (1 - mix) * scores
            return torch.where(usable, mixed, scores)
        voted = share @ self.hits(targets, torch.ones_like(targets))
        known = torch.softmax(scores, -1)
        if self.task == "binary":
            known = torch.sigmoid(torch.cat([-scores, scores], -1))
        likely = (mix * voted + (1 - mix) * known).clamp(min=TINY).log()
        if self.task == "binary":
            likely = likely[..., 1:] - likely[..., :1]
        return torch.where(usable, likely, scores)

    def module(self, w: Tensor) -> nn.Module:
        return _Predictor(self, w.detach())

    def describe(self) -> dict[str, Any]:
        return {"model": "with_neighbours", "base": self.base.describe(), "rows": self.rows}

    def _padded(self, gradient: Tensor) -> Tensor:
        return functional.pad(gradient, (0, self.d - self.base.d))


class _Predictor(nn.Module):
    """Predictions of the mixture for raw inputs."""

    def __init__(self, model: Neighbours, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.clone(), requires_grad=False)
        self._model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return values, or probabilities."""
        inputs = self._model.prepare(x.to(self.w.dtype) if x.is_floating_point() else x)
        return predictions(self._model.scores(self.w, inputs), self._model.task)


def with_neighbours(base: Model, rows: int = 256) -> Neighbours:
    """Return a model whose predictions are mixed with those of the nearest rows in a store, for `knn-per`.

    Parameters
    ----------
    base
        A network or a linear model.
    rows
        Rows of a client that its store has room for.

    Returns
    -------
    Neighbours
        The model. Its store is a part of the parameter vector, empty at first; `knn-per` fills it.

    Examples
    --------
    >>> import torch, coterie
    >>> model = coterie.models.with_neighbours(coterie.models.mlp((8,)), rows=10)
    >>> model = model.fit_to(torch.randn(20, 3), torch.arange(20) % 4)
    >>> model.base.d, model.d
    (68, 171)
    """
    if not isinstance(base, Network | Glm):
        raise SettingError(f"with_neighbours needs a network or a linear model, not {type(base).__name__}")
    if rows < 1:
        raise SettingError(f"rows={rows}: give 1 or more.")
    return Neighbours(base, int(rows))

"""A weighted mean of the predictions of several trained models, as one model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie._core.errors import DataError, SettingError
from coterie.data.preprocess import BOTH, RAW
from coterie.models.base import Model, dot
from coterie.models.groups import ParameterGroups
from coterie.models.metrics import ScoredRows


@dataclass(frozen=True, eq=False)
class Ensemble(Model):
    """Weighted mean of the predictions (probabilities, for classes) of members, each with parameters of its own.

    Parameters are those of all members, one after the other, and a weight for each member. Members may share a base:
    the models of two methods that train the same linear model are two members of one base.
    """

    bases: tuple[Model, ...] = ()
    members: tuple[int, ...] = ()
    best: str = ""  # the method that trained the best member

    def __post_init__(self) -> None:
        if not self.members or {*self.members} != {*range(len(self.bases))}:
            raise SettingError("an ensemble has members, each with one of the bases")
        if len({(base.task, base.outputs) for base in self.bases}) > 1:
            raise SettingError("the members of an ensemble predict the same classes, or all of them a number")

    @functools.cached_property
    def d(self) -> int:
        return sum(self.bases[at].d for at in self.members) + len(self.members)

    @property
    def task(self) -> str:
        return self.bases[0].task

    @property
    def outputs(self) -> int | None:
        return self.bases[0].outputs

    @property
    def encoding(self) -> str:
        kinds = {base.encoding for base in self.bases}
        return kinds.pop() if len(kinds) == 1 else BOTH

    @functools.cached_property
    def features(self) -> int:
        """Number of inputs of all encodings together."""
        return sum({base.encoding: _width(base) for base in self.bases}.values())

    def with_levels(self, levels: Sequence[int]) -> Self:
        given = [base.with_levels(levels[self._inputs(base)]) for base in self.bases]
        return replace(self, bases=tuple(given))

    def with_class_weights(self, weights: Sequence[float]) -> Self:
        """Return the ensemble itself: its members were trained before."""
        return self

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        if x.shape[1] != self.features:
            raise DataError(f"The ensemble expects {self.features} features; these rows have {x.shape[1]}.")
        return replace(self, bases=tuple(base.fit_to(x[:, self._inputs(base)], y) for base in self.bases))

    def prepare(self, x: Tensor) -> Tensor:
        """Return the inputs of each base, as it takes them, side by side."""
        return torch.cat([base.prepare(x[:, self._inputs(base)]) for base in self.bases], 1)

    @property
    def groups(self) -> ParameterGroups:
        """Everything, and "weights": one of each member."""
        whole, last = [slice(0, self.d)], [slice(self.d - len(self.members), self.d)]
        return ParameterGroups(
            self.d, {"all": whole, "head": whole, "body": [], "buffers": [], "weights": last}
        )

    def initial(self, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Return the starts of all members, with equal weights."""
        starts = [self.bases[at].initial(seed, dtype, device) for at in self.members]
        return self.join(starts, torch.full((len(starts),), 1 / len(starts), dtype=dtype, device=device))

    def join(self, parts: Sequence[Tensor], weights: Tensor) -> Tensor:
        """Return the parameters [..., d] of members with these parameters [..., d_k] and weights [..., K]."""
        return torch.cat([*parts, weights.to(parts[0])], -1)

    def parts(self, w: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the parameters of the members and their weights [..., K], which sum to one."""
        *parts, weights = w.split([*(self.bases[at].d for at in self.members), len(self.members)], -1)
        return list(parts), weights / weights.sum(-1, keepdim=True)

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        parts, weights = self.parts(w)
        widths = [base.prepare(torch.zeros(1, _width(base))).shape[1] for base in self.bases]
        inputs = x.split(widths, -1)
        total: Tensor | None = None
        for k, (at, part) in enumerate(zip(self.members, parts, strict=True)):
            share = weights[..., k, None, None]
            own = self.bases[at].scores(part, inputs[at])
            added = share * own if self.task == "regression" else share.log() + self._log_likely(own)
            join = torch.add if self.task == "regression" else torch.logaddexp
            total = added if total is None else join(total, added)
        assert total is not None
        return total[..., 1:] - total[..., :1] if self.task == "binary" else total

    def loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return dot(ScoredRows(self.task, self.scores(w, x), y, weight).row_loss, weight)

    def grad(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        raise SettingError("an ensemble is made of trained models; train its members instead")

    def module(self, w: Tensor) -> nn.Module:
        parts, weights = self.parts(w.detach())
        modules = [self.bases[at].module(part) for at, part in zip(self.members, parts, strict=True)]
        inputs = [self._inputs(self.bases[at]) for at in self.members]
        return EnsemblePredictor(modules, inputs, weights)

    def describe(self) -> dict[str, Any]:
        described = [base.describe() for base in self.bases]
        return {"model": "ensemble", "bases": described, "members": list(self.members), "best": self.best}

    def _log_likely(self, scores: Tensor) -> Tensor:
        """Return the logarithms of the probabilities of the classes, [..., B, C]."""
        if self.task == "binary":
            return functional.logsigmoid(torch.cat([-scores, scores], -1))
        return torch.log_softmax(scores, -1)

    def _inputs(self, base: Model) -> slice:
        """Return which columns of the table's encoding a base takes."""
        first = self.features - _width(base) if base.encoding == RAW else 0
        return slice(first, first + _width(base))


class EnsemblePredictor(nn.Module):
    """Weighted mean of the predictions of modules, each for some of the columns."""

    def __init__(self, modules: list[nn.Module], inputs: list[slice], weights: Tensor) -> None:
        super().__init__()
        self.members = nn.ModuleList(modules)
        self.inputs = inputs
        self.register_buffer("weights", weights)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.get_buffer("weights")
        found = [module(x[:, at]) for module, at in zip(self.members, self.inputs, strict=True)]
        total: Tensor = sum(weight * one for weight, one in zip(weights, found, strict=True))
        return total


def _width(base: Model) -> int:
    """Return how many columns of the table's encoding a fitted model takes."""
    shape = getattr(base, "features", None)
    if shape is None:
        raise SettingError("the members of an ensemble are fitted to rows")
    return int(np.prod(shape))


def ensemble(members: Sequence[Model], best: str = "") -> Ensemble:
    """Return the weighted mean of the predictions of several models.

    Parameters
    ----------
    members
        Models fitted to the shapes of their rows, with the same classes; equal ones share a base.

    best
        Name of the method that trained the best one, for those who want that one alone.

    Returns
    -------
    Ensemble
        The model. `join` makes its parameters from those of the members and their weights.

    Examples
    --------
    >>> import torch, coterie
    >>> x, y = torch.eye(2), torch.tensor([1.0, 2.0])
    >>> line = coterie.models.linear().fit_to(x, y)
    >>> both = ensemble([line, line])
    >>> w = both.join([torch.tensor([1.0, 1.0]), torch.tensor([3.0, 5.0])], torch.tensor([0.5, 0.5]))
    >>> both.scores(w, both.prepare(x)).squeeze(-1)
    tensor([2., 3.])
    """
    bases: list[Model] = []
    for one in members:
        if one not in bases:
            bases.append(one)
    return Ensemble(tuple(bases), tuple(bases.index(one) for one in members), best)

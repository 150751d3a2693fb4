"""Stack of models that are combinations of rows, as a tensor that is computed when an operation needs it.

Averaging the models, `weights @ models` with weights [1, k], is one sum over all rows: it needs neither the memory of
the models nor the time to write them. Every other operation sees the written-out tensor.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class Descents(Protocol):
    """Local SGD of the clients of a stack; nothing is computed before the first `compute`."""

    @property
    def witness(self) -> Tensor:
        """Number that is finite only if all numbers are, []."""

    def usual_weights(self, dtype: torch.dtype) -> Tensor | None:
        """Return the weights [k, 1] of the last average asked for, which is likely the next one too."""

    @property
    def usually_written(self) -> bool:
        """Whether the models themselves were needed the last time."""

    def note_weights(self, weights: Tensor | None) -> None:
        """Remember the weights of an average, or that the models themselves were needed."""

    def compute(self, weights: Tensor | None, models: Tensor | None) -> Tensor | None:
        """Return the sum [outputs, columns] of weights[k] shares_k X_k; models [k, outputs, columns] are written to."""


class LazyModels(Tensor):
    """Models  share tables + anchor_share anchors + shares X,  [k, d], computed when they are first needed.

    Rows are then read once for all that is wanted.
    """

    tables: Tensor
    share: float
    anchors: Tensor | None
    anchor_share: float
    descents: Descents
    _begun: bool
    _sum: tuple[Tensor, Tensor] | None
    _written: Tensor | None
    _asked: bool

    @staticmethod
    def __new__(
        cls, tables: Tensor, share: float, anchors: Tensor | None, anchor_share: float, descents: Descents
    ) -> LazyModels:
        """Make a tensor of the right shape that has no memory yet."""
        shape = (tables.shape[0], tables.shape[1:].numel())
        made: LazyModels = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=tables.dtype, device=tables.device
        )
        made.tables, made.share, made.anchors, made.anchor_share = tables, share, anchors, anchor_share
        made.descents, made._begun, made._sum, made._written = descents, False, None, None
        made._asked = False
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Average without writing the models out; write them out for any other operation."""
        if func is aten.mm.default and isinstance(args[1], cls) and args[0].shape[0] == 1:
            return args[1].weighted_sum(materialize(args[0]).t())
        return func(*tree_map(materialize, args), **tree_map(materialize, kwargs or {}))

    def __rmatmul__(self, other: Tensor) -> Tensor:
        """Average without a call of torch's dispatcher, which takes longer than small sums."""
        average = other.dim() == 2 and other.shape[0] == 1
        return self.weighted_sum(materialize(other).t()) if average else other @ self.written()

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what this is without computing it."""
        return f"LazyModels({self.shape[0]} models of {self.shape[1]} parameters)"

    def witness(self) -> Tensor:
        """Return a number that is finite only if all models are."""
        if not self._begun and self.descents.usually_written:
            self.written()
            self._asked = False
        elif not self._begun:
            self._compute(self.descents.usual_weights(self.tables.dtype))
        return self.descents.witness

    def written(self) -> Tensor:
        """Return the models [k, d]."""
        self._asked = True
        if self._written is None:
            result = self.tables.new_empty(self.tables.shape)
            if self._begun:
                self.descents.note_weights(None)
            self._compute(models=result)
            self._written = result.flatten(-2)
        return self._written

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum [1, d] of the models with these weights [k, 1]."""
        if self._written is not None and self._asked:  # those of a guess alone would round differently
            return weights.t() @ self._written
        if self._sum is None or not torch.equal(self._sum[0], weights):
            self._compute(weights)
            self.descents.note_weights(weights)
        assert self._sum is not None
        total = with_combined(self._sum[1], self.tables, weights, self.share)
        if self.anchors is not None:
            total = with_combined(total, self.anchors, weights, self.anchor_share)
        return total.flatten().unsqueeze(0)

    def _compute(self, weights: Tensor | None = None, models: Tensor | None = None) -> None:
        total = self.descents.compute(None if weights is None else weights[:, 0], models)
        self._begun = True
        if weights is not None and total is not None:
            self._sum = weights, total


def materialize(value: Any) -> Any:
    """Write a lazy stack of models out; return anything else as it is."""
    return value.written() if isinstance(value, LazyModels) else value


def finite_witness(value: Tensor) -> Tensor:
    """Return a number that is finite only if all numbers of a tensor are (a sum that overflows is a false alarm)."""
    return value.witness() if isinstance(value, LazyModels) else value.sum()


def with_combined(total: Tensor, tables: Tensor, weights: Tensor, share: float) -> Tensor:
    """Return the total plus `share` times the sum of tables [k, ...] with weights [k, 1]."""
    if tables.stride(0) == 0:
        return total.add(tables[0], alpha=share * float(weights.sum()))
    return total.add((weights.t() @ tables.flatten(1)).view(tables.shape[1:]), alpha=share)

"""Models of clients as combinations of rows, written out when somebody looks at them.

The mean over clients is one sum of all rows: it needs neither the memory of the models nor the time to write them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coterie.data.rows import Rows
from coterie.runtime.workers import side_by_side


class Part(Protocol):
    """The descents of some `clients` of a stack, of which nothing is computed before the first `compute`."""

    @property
    def clients(self) -> slice: ...

    @property
    def size(self) -> Tensor:
        """Rows of each client, [k]."""

    @property
    def witness(self) -> Tensor | float:
        """Finite only if all numbers are."""

    def ask(self, weights: Tensor | None, models: Tensor | None) -> None:
        """Say what is wanted: a sum with these weights [k], models written to this tensor [k, outputs, columns]."""

    def compute(self) -> Tensor | None:
        """Do that; the sum [outputs, columns] of weights[k] shares_k X_k where it was asked for."""


@dataclass(eq=False)
class Unwritten:
    """Models  share tables + centre_share centres + shares X,  [k, d], of clients in parts that are computed at once.

    They are computed when something is first asked of them, so that rows are read once for all that is wanted.
    """

    tables: Tensor
    share: float
    centres: Tensor | None
    centre_share: float
    parts: Sequence[Part]
    rows: Rows
    _begun: bool = False
    _sums: tuple[Tensor, list[Tensor]] | None = None  # for which weights, of each part

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.tables), self.tables[0].numel()))

    def numel(self) -> int:
        return self.tables.numel()

    def element_size(self) -> int:
        return self.tables.element_size()

    def is_floating_point(self) -> bool:
        return True

    def sum(self) -> Tensor:
        """What tells whether all numbers are finite, as the sum of a tensor does."""
        if not self._begun:
            usual = self.rows.notes.get("mean")  # what was asked for the last time will be again
            self._compute(None if usual is None else self._weights(usual))
        return torch.as_tensor(sum(part.witness for part in self.parts))

    @functools.cached_property
    def tensor(self) -> Tensor:
        """The models [k, d]."""
        result = self.tables.new_empty(self.tables.shape)
        if self._begun:
            self.rows.notes.pop("mean", None)
        self._compute(models=result)
        return result.flatten(-2)

    def mean(self, weights: Tensor) -> Tensor:
        """The mean [d] with these weights [k, 1]."""
        weights = weights / weights.sum()
        if self._sums is None or not torch.equal(self._sums[0], weights):
            self._compute(weights)
            kinds = (kind for kind in (_even, _by_rows) if torch.equal(self._weights(kind), weights))
            self.rows.notes["mean"] = next(kinds, None)
        total = _mean(self.tables, weights).mul_(self.share)
        if self.centres is not None:
            total.add_(_mean(self.centres, weights), alpha=self.centre_share)
        for part in self._sums[1] if self._sums is not None else []:
            total += part
        return total.flatten()

    def _weights(self, kind: Callable[[Tensor, torch.dtype], Tensor]) -> Tensor:
        return kind(torch.cat([part.size for part in self.parts]), self.tables.dtype)

    def _compute(self, weights: Tensor | None = None, models: Tensor | None = None) -> None:
        """Parts are asked here: threads that ask for Python's lock by turns are slow."""
        for part in self.parts:
            k = part.clients
            part.ask(None if weights is None else weights[k, 0], None if models is None else models[k])
        sums = side_by_side(lambda part: part.compute(), self.parts)
        self._begun = True
        if weights is not None:
            self._sums = weights, [part for part in sums if part is not None]


def written_out(value: Tensor | Unwritten) -> Tensor:
    """The tensor itself."""
    return value.tensor if isinstance(value, Unwritten) else value


def _even(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    ones = torch.ones((len(sizes), 1), dtype=dtype)
    return ones / ones.sum()


def _by_rows(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    rows = sizes.to(dtype).unsqueeze(-1)
    return rows / rows.sum()


def _mean(tables: Tensor, weights: Tensor) -> Tensor:
    """Of tables [k, ...] with weights [k, 1] that sum to one, a new tensor."""
    if tables.stride(0) == 0:
        return tables[0].clone()
    return (weights.t() @ tables.flatten(1)).view(tables.shape[1:])

"""Models of clients as combinations of rows, written out when somebody looks at them.

The mean over clients is one sum of all rows: it needs neither the memory of the models nor the time to write them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coterie.data.rows import Rows


class Descents(Protocol):
    """Local SGD of the clients of a stack, of which nothing is computed before the first `compute`."""

    @property
    def sizes(self) -> Tensor:
        """Rows of each client, [k]."""

    @property
    def witness(self) -> Tensor:
        """What is finite only if all numbers are, []."""

    def compute(self, weights: Tensor | None, models: Tensor | None) -> Tensor | None:
        """The sum [outputs, columns] of weights[k] shares_k X_k; models [k, outputs, columns] are written to."""


@dataclass(eq=False)
class Unwritten:
    """Models  share tables + centre_share centres + shares X,  [k, d].

    They are computed when something is first asked of them, so that rows are read once for all that is wanted.
    """

    tables: Tensor
    share: float
    centres: Tensor | None
    centre_share: float
    descents: Descents
    rows: Rows
    _begun: bool = False
    _sum: tuple[Tensor, Tensor | None] | None = None  # of shares X, with which weights

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
            self._compute(None if usual is None else usual(self.descents.sizes, self.tables.dtype))
        return self.descents.witness

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
        if self._sum is None or not torch.equal(self._sum[0], weights):
            self._compute(weights)
            known = (kind(self.descents.sizes, weights.dtype) for kind in KINDS)
            found = (kind for kind, other in zip(KINDS, known, strict=True) if torch.equal(other, weights))
            self.rows.notes["mean"] = next(found, None)
        assert self._sum is not None and self._sum[1] is not None
        total = self._sum[1].add(_mean(self.tables, weights), alpha=self.share)
        if self.centres is not None:
            total.add_(_mean(self.centres, weights), alpha=self.centre_share)
        return total.flatten()

    def _compute(self, weights: Tensor | None = None, models: Tensor | None = None) -> None:
        total = self.descents.compute(None if weights is None else weights[:, 0], models)
        self._begun, self._sum = True, self._sum if weights is None else (weights, total)


def written_out(value: Tensor | Unwritten) -> Tensor:
    """The tensor itself."""
    return value.tensor if isinstance(value, Unwritten) else value


def _even(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full((len(sizes), 1), 1 / len(sizes), dtype=dtype)


def _by_rows(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    rows = sizes.to(dtype).unsqueeze(-1)
    return rows / rows.sum()


KINDS = (_even, _by_rows)


def _mean(tables: Tensor, weights: Tensor) -> Tensor:
    """Of tables [k, ...] with weights [k, 1] that sum to one."""
    if tables.stride(0) == 0:
        return tables[0]
    return (weights.t() @ tables.flatten(1)).view(tables.shape[1:])

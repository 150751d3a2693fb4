"""Models of clients as combinations of rows, written out when somebody looks at them.

The mean over clients is one sum of all rows: it needs neither the memory of the models nor the time to write them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.models.ragged import add_rows, combine_rows, scripted
from coterie.runtime.workers import side_by_side

if TYPE_CHECKING:
    from coterie.models.span import Own


@dataclass(eq=False)
class Unwritten:
    """Models  share tables + centre_share centres + shares X,  [k, d], of clients in parts that are computed at once.

    `shares` are [outputs, rows] for each part; `witness` [] is finite only if all numbers are.
    """

    tables: Tensor
    share: float
    centres: Tensor | None
    centre_share: float
    parts: list[Own]
    shares: dict[Own, Tensor]
    witness: Tensor

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
        return self.witness

    @functools.cached_property
    def tensor(self) -> Tensor:
        """The models [k, d]."""
        result = self.tables.new_empty(self.tables.shape)

        def write(own: Own) -> None:
            k = own.clients
            centres = None if self.centres is None else self.centres[k]
            rows = (self.shares[own], own.rows, own.layout)
            scripted(combine_rows)(result[k], self.tables[k], self.share, centres, self.centre_share, *rows)

        side_by_side(write, self.parts)
        return result.flatten(-2)

    def mean(self, weights: Tensor) -> Tensor:
        """The mean [d] with these weights [k, 1]."""
        weights = weights / weights.sum()
        total = _mean(self.tables, weights).mul_(self.share)
        if self.centres is not None:
            total.add_(_mean(self.centres, weights), alpha=self.centre_share)

        def add(own: Own) -> Tensor:
            return scripted(add_rows)(
                self.shares[own], weights[own.clients, 0], own.rows, own.layout, own.alone
            )

        for part in side_by_side(add, self.parts):
            total += part
        return total.flatten()


def written_out(value: Tensor | Unwritten) -> Tensor:
    """The tensor itself."""
    return value.tensor if isinstance(value, Unwritten) else value


def _mean(tables: Tensor, weights: Tensor) -> Tensor:
    """Of tables [k, ...] with weights [k, 1] that sum to one, a new tensor."""
    if tables.stride(0) == 0:
        return tables[0].clone()
    return (weights.t() @ tables.flatten(1)).view(tables.shape[1:])

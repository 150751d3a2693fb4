"""The answers to one call of `map`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.errors import NobodyAnswered
from coterie.models.unwritten import Unwritten, written_out

UNNAMED = ""  # the name of a reply that is one tensor rather than a dict


@dataclass(frozen=True)
class Replies:
    """Row k of every value is the answer of client `ids[k]`; clients that dropped out are not there.

    `weights` [k, 1] are the numbers of training rows. A phase that returned one tensor is read as
    `replies.values`, one that returned a dict as `replies["name"]`.
    """

    ids: Tensor
    named: dict[str, Any]
    weights: Tensor

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __getitem__(self, name: str) -> Tensor:
        return written_out(self.named[name])

    @property
    def values(self) -> Tensor:
        return self[UNNAMED]

    def mean(
        self,
        name: str = UNNAMED,
        *,
        uniform: bool = False,
        by: Tensor | None = None,
        default: Tensor | None = None,
    ) -> Tensor:
        """Average over the clients that answered, weighted by their rows unless `uniform`.

        `by` (cluster of every client, [n]) gives one average per cluster; a cluster without an answer
        keeps its row of `default` [K, ...]. When nobody answered, `default` or `NobodyAnswered`.
        """
        if len(self) == 0:
            if default is None:
                raise NobodyAnswered("no client answered, so there is nothing to average")
            return default
        weights = torch.ones_like(self.weights) if uniform else self.weights
        answer = self.named[name]
        if isinstance(answer, Unwritten) and by is None:
            return answer.mean(weights)
        values = written_out(answer)
        flat = values.reshape(len(self), -1)
        weights = weights.to(flat.dtype)
        if by is None:
            return (weights.t() @ flat).div_(weights.sum()).view(values.shape[1:])
        count = len(default) if default is not None else int(by.max()) + 1
        member = by[self.ids] == torch.arange(count, device=by.device).unsqueeze(-1)
        share = member.to(weights.dtype) * weights.t()
        total = share.sum(-1, keepdim=True)
        average = ((share @ flat) / total.clamp(min=torch.finfo(total.dtype).tiny)).view(
            count, *values.shape[1:]
        )
        if default is None:
            return average
        empty = (total == 0).view(-1, *[1] * (values.dim() - 1))
        return torch.where(empty, default, average)

    def put(self, rows: Tensor, name: str = UNNAMED) -> Tensor:
        """A copy of `rows` [n, ...] in which the clients that answered have their new value."""
        return rows.index_copy(0, self.ids, self[name])

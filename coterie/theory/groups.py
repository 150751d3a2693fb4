"""Sums over clusters and what comes back to their members."""

from __future__ import annotations

import torch
from torch import Tensor


class Groups:
    """Rows [n, d] by group `of` [n]. Groups of one size that stand side by side are a view, without an index."""

    def __init__(self, of: Tensor, count: int) -> None:
        size = max(1, len(of) // max(1, count))
        ordered = torch.arange(len(of), device=of.device) // size
        self.of, self.count = of, count
        self.shape = (count, size, -1) if len(of) == count * size and torch.equal(of, ordered) else None

    def sum(self, values: Tensor) -> Tensor:
        """Sums by group, [count, d]."""
        if self.shape is None:
            return values.new_zeros((self.count, *values.shape[1:])).index_add_(0, self.of, values)
        return values.reshape(self.shape).sum(1)

    def blend(self, groups: Tensor, own: Tensor, values: Tensor, out: Tensor) -> Tensor:
        """groups[of] + own[of] * values into `out`, for groups [count, d], own [count, 1] and values [n, d]."""
        if self.shape is None:
            torch.index_select(groups, 0, self.of, out=out)
            return torch.addcmul(out, own[self.of], values, out=out)
        torch.addcmul(
            groups.unsqueeze(1), own.unsqueeze(1), values.view(self.shape), out=out.view(self.shape)
        )
        return out

"""Sums over clusters, and values per cluster handed back to their members."""

from __future__ import annotations

import torch
from torch import Tensor


class Groups:
    """Rows [n, d] that belong to groups; groups of one size that follow each other are a view, without an index.

    Parameters
    ----------
    of
        Group of each row, int64 [n].
    count
        Number of groups.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.groups import Groups
    >>> Groups(torch.tensor([0, 1, 0]), 2).sum(torch.tensor([[1.0], [2.0], [3.0]])).tolist()
    [[4.0], [2.0]]
    """

    def __init__(self, of: Tensor, count: int) -> None:
        size = max(1, len(of) // max(1, count))
        ordered = torch.arange(len(of), device=of.device) // size
        self.of, self.count = of, count
        self.shape = (count, size, -1) if len(of) == count * size and torch.equal(of, ordered) else None

    def sum(self, values: Tensor) -> Tensor:
        """Return the sums of rows [n, d] by group, [count, d]."""
        if self.shape is None:
            return values.new_zeros((self.count, *values.shape[1:])).index_add_(0, self.of, values)
        return values.reshape(self.shape).sum(1)

    def blend(self, groups: Tensor, own: Tensor, values: Tensor, out: Tensor) -> Tensor:
        """Write groups[of] + own[of] * values into `out` and return it.

        Parameters
        ----------
        groups
            A row per group, [count, d].
        own
            A factor per group, [count, 1].
        values
            A row per member, [n, d].
        out
            Where the result goes, [n, d].

        Returns
        -------
        Tensor
            `out`.
        """
        if self.shape is None:
            torch.index_select(groups, 0, self.of, out=out)
            return torch.addcmul(out, own[self.of], values, out=out)
        torch.addcmul(
            groups.unsqueeze(1), own.unsqueeze(1), values.view(self.shape), out=out.view(self.shape)
        )
        return out


def group_sum(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the sums of rows [n, ...] by group, [count, ...]."""
    if count == 1:
        return values.sum(0, keepdim=True)
    return values.new_zeros((count, *values.shape[1:])).index_add_(0, groups, values)

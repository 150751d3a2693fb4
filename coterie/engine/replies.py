"""The replies of clients to one call of `Federation.map`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered

UNNAMED = ""  # the name of a reply that is one tensor rather than a dict


@dataclass(frozen=True)
class Replies:
    """Replies of the clients that answered a call; row k of every value is the reply of client `ids[k]`.

    Clients that dropped out, or answered NaN, are missing. A phase that returned one tensor is read as
    `replies.values`, one that returned a dict as `replies["name"]`.

    Parameters
    ----------
    ids
        Index of each client that answered, int64 [k].
    named
        The replies by name, [k, ...] each; one tensor without a name is under "".
    weights
        Number of training rows of each client that answered, [k, 1].

    Examples
    --------
    >>> import torch
    >>> from coterie.engine.replies import Replies
    >>> replies = Replies(torch.tensor([0, 2]), {"": torch.tensor([[1.0], [4.0]])}, torch.tensor([[10.0], [20.0]]))
    >>> len(replies), replies.mean().item(), replies.mean(uniform=True).item()
    (2, 3.0, 2.5)
    >>> replies.put(torch.zeros(3, 1)).tolist()
    [[1.0], [0.0], [4.0]]
    """

    ids: Tensor
    named: dict[str, Any]
    weights: Tensor

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self.named[name]
        return found

    @property
    def values(self) -> Tensor:
        """Replies of a phase that returned one tensor, [k, ...]."""
        return self[UNNAMED]

    def mean(
        self,
        name: str = UNNAMED,
        *,
        uniform: bool = False,
        by: Tensor | None = None,
        default: Tensor | None = None,
    ) -> Tensor:
        """Average over the clients that answered.

        Parameters
        ----------
        name
            Which reply; by default the one of a phase that returned one tensor.
        uniform
            Weigh clients equally instead of by their numbers of training rows.
        by
            Cluster of every client of the federation, [n], for one average per cluster.
        default
            What to return if nobody answered; with `by`, row k [K, ...] is for a cluster k without an answer.

        Returns
        -------
        Tensor
            The average [...], or with `by` one for each cluster, [K, ...].

        Raises
        ------
        NobodyAnswered
            If no client answered and there is no default.
        """
        if len(self) == 0:
            if default is None:
                raise NobodyAnswered("no client answered, so there is nothing to average")
            return default
        weights = torch.ones_like(self.weights) if uniform else self.weights
        values = self[name]
        flat = values if values.dim() == 2 else values.reshape(len(self), -1)
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
        """Return a copy of `rows` with the rows of the clients that answered replaced by their replies.

        Parameters
        ----------
        rows
            One row per client of the federation, [n, ...].
        name
            Which reply; by default the one of a phase that returned one tensor.

        Returns
        -------
        Tensor
            [n, ...].
        """
        return rows.index_copy(0, self.ids, self[name])

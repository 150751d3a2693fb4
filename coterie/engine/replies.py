"""The replies of clients to one call of `Federation.map`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered
from coterie.engine.aggregate import PLAIN, Aggregate
from coterie.models.fast.lazy_models import LazyModels

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
    aggregate
        How `mean` combines the replies; the plain weighted mean by default.
    note
        Called with the clients whose replies are left out of a mean, and with those whose steps are shortened in it.
    origin
        What the clients were sent and their replies are moved copies of, [k, ...]; None: zero.

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
    aggregate: Aggregate = PLAIN
    note: Callable[[Tensor, Tensor], None] = lambda far, long: None
    origin: Tensor | None = None

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self.named[name]
        return found

    @property
    def single(self) -> bool:
        """True if the answer of each client can be read; False where only sums are known."""
        return True

    @property
    def values(self) -> Tensor:
        """Replies of a phase that returned one tensor, [k, ...]."""
        return self[UNNAMED]

    def mean(
        self,
        name: str = UNNAMED,
        *,
        uniform: bool = False,
        by: Tensor | str | None = None,
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
            Cluster of every client of the federation, [n], or the name of the reply [k, 1] in which clients tell it,
            for one average per cluster.
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
            if not self.aggregate.plain:
                return self._robust(flat, weights, slice(None)).view(values.shape[1:])
            return (weights.t() @ flat).div_(weights.sum()).view(values.shape[1:])
        labels = self._labels(by)
        count = len(default) if default is not None else int(labels.max()) + 1
        member = labels == torch.arange(count, device=labels.device).unsqueeze(-1)
        share = member.to(weights.dtype) * weights.t()
        total = share.sum(-1, keepdim=True)
        if self.aggregate.plain:
            average = (share @ flat) / total.clamp(min=torch.finfo(total.dtype).tiny)
        else:
            average = torch.stack(
                [self._robust(flat[own], weights[own], own) if own.any() else 0 * flat[0] for own in member]
            )
        average = average.view(count, *values.shape[1:])
        if default is None:
            return average
        empty = (total == 0).view(-1, *[1] * (values.dim() - 1))
        return torch.where(empty, default, average)

    def sum(self, name: str = UNNAMED) -> Tensor:
        """Return the sum over the clients that answered, whatever the rule for means is.

        Parameters
        ----------
        name
            Which reply; by default the one of a phase that returned one tensor.

        Returns
        -------
        Tensor
            [...].

        Raises
        ------
        NobodyAnswered
            If no client answered.
        """
        if len(self) == 0:
            raise NobodyAnswered("no client answered, so there is nothing to add up")
        return self[name].sum(0)

    def count(self, by: Tensor | str, groups: int, *, uniform: bool = True) -> Tensor:
        """Return how many of the clients that answered are in each cluster, [groups, 1].

        Parameters
        ----------
        by
            Cluster of every client of the federation, [n], or the name of the reply [k, 1] in which clients tell it.
        groups
            Number of clusters; other answers are not counted.
        uniform
            Count clients; if False, their training rows.
        """
        member = self._labels(by) == torch.arange(groups, device=self.ids.device).unsqueeze(-1)
        return member.sum(1, keepdim=True) if uniform else member.to(self.weights.dtype) @ self.weights

    def _robust(self, values: Tensor, weights: Tensor, at: Tensor | slice) -> Tensor:
        """Return what the rule of the run makes of replies [k, d] of the clients `at`, and note whom it changes."""
        origin = None
        if self.origin is not None and self.origin.numel() == len(self) * values.shape[1]:
            origin = self.origin.reshape(len(self), -1)[at].to(values.dtype)
        combined, far, long = self.aggregate.combine(values, weights, origin)
        if (far | long).any():
            self.note(self.ids[at][far], self.ids[at][long])
        return combined

    def _labels(self, by: Tensor | str) -> Tensor:
        """Return the cluster of each client that answered, [k]."""
        return self[by].squeeze(-1).round().long() if isinstance(by, str) else by[self.ids]

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
        found = self[name]
        everybody = torch.arange(len(rows), device=self.ids.device)
        if found.dtype == rows.dtype and torch.equal(self.ids, everybody):
            return found.written() if isinstance(found, LazyModels) else found.clone()
        return rows.index_copy(0, self.ids, found)

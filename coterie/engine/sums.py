"""Answers that are only added up: they stay where they were computed until the server asks for a sum of them.

`Federation.map` returns `SummedReplies` in a run with secure aggregation or with differential privacy of clients. An
algorithm that takes means of answers works unchanged; one that looks at single answers raises `SumsOnly`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered, SettingError
from coterie.engine.protocol import Answer, Call
from coterie.engine.replies import UNNAMED, Replies
from coterie.models.fast.lazy_models import materialize


class SumsOnly(SettingError):
    """A method asks for single answers in a run in which only sums leave a client."""


@dataclass(frozen=True)
class SumRequest:
    """Which sum of held answers the server wants.

    Attributes
    ----------
    name : str or None
        Name of the reply; None asks for the weights alone.
    uniform : bool
        Weigh clients equally instead of by their numbers of training rows.
    groups : Tensor, str or None
        Cluster of every client of the federation [n], name of the reply in which clients tell it, or one sum of all.
    count : int
        Number of clusters.
    clip : float
        Longest difference to what the client was sent that counts in full (differential privacy); 0: no limit.
    """

    name: str | None
    uniform: bool
    groups: Tensor | str | None = None
    count: int = 1
    clip: float = 0.0


@dataclass(frozen=True)
class Total:
    """A sum of answers.

    Attributes
    ----------
    values : Tensor
        The sums, [K, ...].
    weights : Tensor
        The sums of the weights, [K, 1].
    ids : Tensor
        Clients that are in it.
    short : float
        With a clip norm: how many differences were not clipped, less half of them.
    """

    values: Tensor
    weights: Tensor
    ids: Tensor
    short: float = 0.0


class Held(Protocol):
    """Answers to one call that are held where they were computed."""

    def total(self, request: SumRequest) -> Total:
        """Return a sum of the answers."""


class Away(Held, Protocol):
    """Answers to one call that are in other processes of a simulation, which add them up or send them."""

    def __getitem__(self, name: str) -> Tensor:
        """Return the finite answers [k, ...]."""

    def fetched(self, answer: Answer) -> Answer:
        """Return the answer with all its values."""


@dataclass(frozen=True)
class SummedReplies(Replies):
    """Replies of which only sums are known.

    Parameters
    ----------
    held
        Where the answers are.
    asks
        Method and phase, for the error that names them.
    meter
        Called with every sum.
    """

    held: Held | None = None
    asks: str = "this method"
    meter: Callable[[Total], None] = lambda total: None
    _totals: dict[tuple[str, int, bool], Tensor] = field(default_factory=dict)

    @property
    def single(self) -> bool:
        """False: single answers cannot be read."""
        return False

    def __getitem__(self, name: str) -> Tensor:
        raise SumsOnly(
            f"{self.asks} needs the answer of each client, and in this run only sums leave a client (--secure, or "
            "--epsilon for clients). Choose a method that takes means, such as fedavg, fine-tuned, ditto or pfedme."
        )

    def mean(
        self,
        name: str = UNNAMED,
        *,
        uniform: bool = False,
        by: Tensor | str | None = None,
        default: Tensor | None = None,
    ) -> Tensor:
        """Average over the clients that answered; see `Replies.mean`."""
        if len(self) == 0 or self.held is None:
            if default is None:
                raise NobodyAnswered("no client answered, so there is nothing to average")
            return default
        count = 1
        if by is not None:
            if default is None and isinstance(by, str):
                raise SumsOnly(f"{self.asks}: a sum by {by!r} needs a default for each cluster")
            count = len(default) if default is not None else int(by.max()) + 1  # type: ignore[union-attr]
        total = self.held.total(SumRequest(name, uniform, by, count))
        self.meter(total)
        if isinstance(by, str):
            self._totals[by, count, uniform] = total.weights
        weights = total.weights.view(-1, *[1] * (total.values.dim() - 1))
        average = (total.values / weights.clamp(min=torch.finfo(weights.dtype).tiny)).to(self.weights)
        if by is None:
            return average[0]
        return average if default is None else torch.where(weights.to(average.device) <= 0, default, average)

    def sum(self, name: str = UNNAMED) -> Tensor:
        """Return the sum over the clients that answered; see `Replies.sum`."""
        if len(self) == 0 or self.held is None:
            raise NobodyAnswered("no client answered, so there is nothing to add up")
        total = self.held.total(SumRequest(name, uniform=True))
        self.meter(total)
        return total.values[0].to(self.weights)

    def count(self, by: Tensor | str, groups: int, *, uniform: bool = True) -> Tensor:
        """Return how many of the clients that answered are in each cluster; see `Replies.count`."""
        assert self.held is not None
        if not isinstance(by, str):
            return self.held.total(SumRequest(None, uniform, by, groups)).weights
        if (by, groups, uniform) not in self._totals:
            self._totals[by, groups, uniform] = self.held.total(SumRequest(None, uniform, by, groups)).weights
        return self._totals[by, groups, uniform]


@dataclass(frozen=True)
class AwayReplies(SummedReplies):
    """Replies in other processes: means and sums are made there, and single answers fetched when they are read.

    Parameters
    ----------
    away
        Where the answers are; `named` has their shapes and types.
    """

    away: Away | None = None

    @property
    def single(self) -> bool:
        """True: single answers can be read."""
        return True

    def __getitem__(self, name: str) -> Tensor:
        assert self.away is not None
        return self.away[name]

    def mean(
        self,
        name: str = UNNAMED,
        *,
        uniform: bool = False,
        by: Tensor | str | None = None,
        default: Tensor | None = None,
    ) -> Tensor:
        """Average over the clients that answered; see `Replies.mean`."""
        summable = self.aggregate.plain and not (isinstance(by, str) and default is None)
        take = SummedReplies.mean if summable else Replies.mean
        return take(self, name, uniform=uniform, by=by, default=default)

    def sum(self, name: str = UNNAMED) -> Tensor:
        """Return the sum over the clients that answered, in the type of the answers; see `Replies.sum`."""
        if len(self) == 0:
            return Replies.sum(self, name)
        assert self.away is not None
        total = self.away.total(SumRequest(name, uniform=True))
        return total.values[0].to(device=self.weights.device, dtype=self.named[name].dtype)

    def count(self, by: Tensor | str, groups: int, *, uniform: bool = True) -> Tensor:
        """Return how many of the clients that answered are in each cluster; see `Replies.count`."""
        if not isinstance(by, str) or len(self) == 0:
            return Replies.count(self, by, groups, uniform=uniform)
        found = SummedReplies.count(self, by, groups, uniform=uniform).to(self.weights.device)
        return found.round().long() if uniform else found.to(self.weights)


@dataclass(frozen=True)
class HeldByClients:
    """Answers of the clients of one place to one call, and what they were sent.

    Parameters
    ----------
    named
        The answers by name, [k, ...] each.
    ids
        The clients, [k].
    rows
        Their numbers of training rows, [k, 1].
    call
        The call that they answered.
    good
        Which of the answers are finite; None: all.
    """

    named: dict[str, Tensor]
    ids: Tensor
    rows: Tensor
    call: Call
    good: Tensor | None = None

    def values(self, request: SumRequest) -> Tensor:
        """Return the answers as vectors, [k, length]; zero for a client whose answer is not finite."""
        if request.name is None:
            return torch.zeros(len(self.ids), 0, dtype=torch.float64)
        if request.name not in self.named:
            raise SettingError(f"{self.call.phase} has no reply {request.name!r}")
        flat = materialize(self.named[request.name]).reshape(len(self.ids), -1).double()
        return flat if self.good is None else torch.where(self.good.unsqueeze(-1), flat, 0.0)

    def weights(self, request: SumRequest) -> Tensor:
        """Return the weights [k, 1] of the answers; 0 for one that is not finite."""
        weights = torch.ones_like(self.rows) if request.uniform else self.rows
        weights = weights.double()
        return weights if self.good is None else weights * self.good.unsqueeze(-1)

    def members(self, request: SumRequest) -> Tensor:
        """Return which client is in which cluster, [K, k]."""
        if request.groups is None:
            return torch.ones(1, len(self.ids), dtype=torch.float64, device=self.ids.device)
        if isinstance(request.groups, str):
            labels: Tensor = materialize(self.named[request.groups]).squeeze(-1).round().long()
        else:
            labels = request.groups[self.ids]
        return (labels == torch.arange(request.count, device=labels.device).unsqueeze(-1)).double()

    def shape(self, request: SumRequest) -> tuple[int, ...]:
        """Return the shape of one answer."""
        return (0,) if request.name is None else tuple(self.named[request.name].shape[1:])

    def origin(self, request: SumRequest) -> Tensor:
        """Return what each answer started from, [k, length]: zero unless the method declares it (`starts_from`)."""
        values, sent = self.values(request), started_from(self.call, len(self.ids))
        if sent is None or request.name is None:
            return torch.zeros_like(values)
        if isinstance(request.groups, str) and sent.numel() != values.numel():  # of several, the one it chose
            return self.members(request).t() @ sent[0].reshape(request.count, -1).double()
        return sent.reshape(len(values), -1).double()


def started_from(call: Call, count: int) -> Tensor | None:
    """Return what `count` clients moved away from in their replies, [count, ...]; None if the method does not say."""
    name = call.algorithm.starts_from.get(call.phase)
    if name is None:
        return None
    if name in call.each:
        return call.each[name]
    shared = call.shared[name]
    assert isinstance(shared, Tensor)  # `starts_from` names a model
    return shared.expand(count, *shared.shape)


def plain_total(place: HeldByClients, request: SumRequest) -> Total:
    """Return the exact sum of the answers of one place."""
    share = place.members(request) * place.weights(request).t()
    values = (share @ place.values(request)).view(request.count, *place.shape(request))
    keep = slice(None) if place.good is None else place.good
    return Total(values, share.sum(-1, keepdim=True), place.ids[keep])

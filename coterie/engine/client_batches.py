"""The minibatches of a visit: which rows, drawn by the hash, in named streams that are independent of each other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie._core import randomness
from coterie.models.local_sgd import BatchDraws

if TYPE_CHECKING:
    from coterie.data.rows import Batch
    from coterie.engine.local_runtime import LocalRuntime

AHEAD = 4  # steps whose minibatches are drawn at once: small tensors cost their calls, not their numbers

Drawn = tuple[Tensor, Tensor, Tensor]
"""Rows [..., steps, B], weights [..., steps, B] and keys [..., steps] of minibatches."""


class ClientBatches:
    """Minibatches of `size` rows for the clients `at`, drawn with the keys of their visit."""

    def __init__(
        self, runtime: LocalRuntime, at: Tensor | None, keys: Callable[[], Tensor], size: int
    ) -> None:
        self.size, self._runtime, self._at, self._make_keys = size, runtime, at, keys
        self._keys: Tensor | None = None
        self.prefetched: Callable[[str, range, int], tuple[Tensor, ...] | None] | None = None
        self._taken: dict[str, int] = {}  # steps taken so far, by stream
        self._last: tuple[str, int, Batch] | None = None
        self._ahead: tuple[str, range, Drawn] | None = None

    @property
    def keys(self) -> Tensor:
        """Keys [k] of the visits, hashed when they are first asked for."""
        if self._keys is None:
            self._keys = self._make_keys()
        return self._keys

    def next(self, stream: str, again: bool = False) -> Batch:
        """Return the next minibatch of a stream, or `again` the last, which is not drawn twice."""
        number = self._taken.get(stream, 0) + (not again)
        self._taken[stream] = number
        if self._last is None or self._last[:2] != (stream, number):
            rows, weight, keys = self._drawn_ahead(stream, number)
            self._last = stream, number, self._runtime.train.take(rows, weight, keys)
        return self._last[2]

    def next_rows(self, stream: str, again: bool = False) -> tuple[Tensor, Tensor]:
        """Return which rows the next minibatch of a stream has, or `again` the last, and their weights, [..., B]."""
        number = self._taken.get(stream, 0) + (not again)
        self._taken[stream] = number
        rows, weight, _ = self._drawn_ahead(stream, number)
        return rows, weight

    def draws(self, stream: str, steps: int) -> BatchDraws:
        """Return the draws of the next steps of a stream, as fast paths take them."""
        first = self._taken.get(stream, 0) + 1
        numbers = range(first, first + steps)
        keys = functools.partial(self._keys_of, stream)
        return BatchDraws(numbers, self.size, keys, functools.partial(self._drawn, stream, numbers))

    def skip(self, stream: str, steps: int) -> None:
        """Count steps that a fast path has taken."""
        self._taken[stream] = self._taken.get(stream, 0) + steps

    def _keys_of(self, stream: str) -> Tensor:
        return randomness.fold(self.keys, stream) if stream else self.keys

    def _drawn_ahead(self, stream: str, number: int) -> Drawn:
        """Rows, weights and keys of a step's minibatch; after the first step those of several are drawn at once."""
        if self._ahead is None or self._ahead[0] != stream or number not in self._ahead[1]:
            numbers = range(number, number + (1 if number <= 1 else AHEAD))
            visits = self._keys_of(stream)
            steps = torch.arange(numbers.start, numbers.stop, device=visits.device)
            keys = randomness.fold(visits.unsqueeze(-1), steps)
            self._ahead = stream, numbers, (*self._runtime.train.draw(self._at, keys, self.size), keys)
        _, numbers, (rows, weight, keys) = self._ahead
        at = number - numbers.start
        return rows[..., at, :], weight[..., at, :], keys[..., at]

    def _drawn(self, stream: str, numbers: range) -> Drawn:
        """Rows and weights [k, steps, B] of these minibatches, and keys [k, steps] of their draws."""
        rows = self._runtime.train
        known = None if self.prefetched is None else self.prefetched(stream, numbers, self.size)
        if known is not None:
            drawn, weight, keys = known
        else:
            keys = randomness.fold(self._keys_of(stream).unsqueeze(-1), torch.as_tensor(numbers))
            drawn, weight = rows.draw(self._at, keys, self.size)
        if self._runtime.model.reduction == "sum":
            sizes = rows.size if self._at is None else rows.size[self._at]
            weight = weight * sizes.view(-1, 1, 1)
        return drawn, weight, keys

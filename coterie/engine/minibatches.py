"""Minibatches of coming rounds, drawn at once: small tensors cost their calls, not their numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie._core import randomness
from coterie.data.rows import Rows
from coterie.engine.protocol import Call, Visits

NUMBERS = 1 << 16  # draws made at once at most
KINDS = 32  # calls and their minibatches that are known at most


@dataclass(frozen=True)
class PrefetchedBatches:
    """Rows and weights [rounds, k, steps, B] of some rounds, keys [rounds, k, steps], and their clients [rounds, k]."""

    rounds: range
    at: Tensor | None
    rows: Tensor
    weight: Tensor
    keys: Tensor

    def of(self, t: int, at: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the prefetched minibatches of round t for these clients (None: everybody), or None."""
        k = t - self.rounds.start
        if t not in self.rounds or (at is None) != (self.at is None):
            return None
        if at is not None and self.at is not None and not torch.equal(self.at[k], at):
            return None
        return self.rows[k], self.weight[k], self.keys[k]


class MinibatchPrefetch:
    """The minibatches of all visits of a call.

    They are functions of seed, phase, round, call and client. So for a call that comes in one round after the other
    as many rounds are drawn ahead as it has come before, if it can be known whom it will visit.
    """

    def __init__(self, seed: int, rows: Rows, ids: Tensor) -> None:
        self.seed, self.rows, self.ids = seed, rows, ids
        self._known: dict[tuple[str, int, str, range, int], PrefetchedBatches] = {}

    def of(
        self, call: Call, visits: Visits, stream: str, numbers: range, batch: int
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return rows, weights and keys of these minibatches of a stream; None where a client is visited twice."""
        if visits.nth is not None:
            return None
        kind = (call.phase, call.call, stream, numbers, batch)
        known = self._known.get(kind)
        found = None if known is None else known.of(call.round, visits.at)
        if found is not None:
            return found
        most = NUMBERS // (len(self.ids if visits.at is None else visits.at) * len(numbers) * batch)
        if most <= 1 or (visits.at is not None and visits.coming is None):
            made = self._make(call, visits, stream, numbers, batch, 1)
        else:
            before = len(known.rounds) if known is not None and known.rounds.stop == call.round else 0
            made = self._make(call, visits, stream, numbers, batch, max(1, min(2 * before, most)))
            if len(self._known) >= KINDS:
                self._known.clear()
            self._known[kind] = made
        return made.rows[0], made.weight[0], made.keys[0]

    def _make(
        self, call: Call, visits: Visits, stream: str, numbers: range, batch: int, count: int
    ) -> PrefetchedBatches:
        rounds, at = range(call.round, call.round + count), None
        if visits.at is not None:
            at = torch.stack([visits.at, *(visits.coming(t) for t in rounds[1:] if visits.coming)])
        places = torch.arange(len(self.ids)).expand(count, -1) if at is None else at
        base = randomness.key(self.seed, call.phase, torch.arange(rounds.start, rounds.stop), call.call)
        visit = randomness.fold(base.unsqueeze(-1), self.ids[places])
        visit = randomness.fold(visit, stream) if stream else visit
        keys = randomness.fold(visit.unsqueeze(-1), torch.as_tensor(numbers))
        return PrefetchedBatches(rounds, at, *self.rows.draw(places, keys, batch), keys)

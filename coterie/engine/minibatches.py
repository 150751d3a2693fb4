"""Hash keys and minibatches of coming rounds, drawn at once: small tensors cost their calls, not their numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie._core import randomness
from coterie.data.rows import Rows
from coterie.engine.protocol import Call, Visits, visit_keys

NUMBERS = 1 << 16  # draws made at once at most
KINDS = 32  # kinds of draws that are known at most

Parts = tuple[Tensor, ...]


@dataclass(frozen=True)
class PrefetchedDraws:
    """Draws [rounds, k, ...] of some rounds, and their clients [rounds, k] (None: everybody)."""

    rounds: range
    at: Tensor | None
    parts: Parts

    def of(self, t: int, at: Tensor | None) -> Parts | None:
        """Return the prefetched draws of round t for these clients (None: everybody), or None."""
        if t not in self.rounds or (at is None) != (self.at is None):
            return None
        k = t - self.rounds.start
        if at is not None and self.at is not None and not torch.equal(self.at[k], at):
            return None
        return tuple(part[k] for part in self.parts)


class MinibatchPrefetch:
    """The draws of all visits of a call: their hash keys, and their minibatches.

    They are functions of seed, phase, round, call and client. So for a call that comes in one round after the other
    as many rounds are drawn ahead as it has come before, if it can be known whom it will visit.
    """

    def __init__(self, seed: int, rows: Rows, ids: Tensor) -> None:
        self.seed, self.rows, self.ids = seed, rows, ids
        self._known: dict[Hashable, PrefetchedDraws] = {}

    def keys(self, call: Call, visits: Visits) -> Tensor:
        """Return the hash keys of all visits of a call, [k]."""
        if visits.nth is not None:
            assert visits.at is not None
            return visit_keys(self.seed, call, self.ids[visits.at], visits.nth)

        def make(rounds: range, places: Tensor) -> Parts:
            return (self._visit_keys(call, rounds, places),)

        return self._prefetched((call.phase, call.call), call, visits, 1, make)[0]

    def of(self, call: Call, visits: Visits, stream: str, numbers: range, batch: int) -> Parts | None:
        """Return rows, weights and keys of these minibatches of a stream; None where a client is visited twice."""
        if visits.nth is not None:
            return None

        def make(rounds: range, places: Tensor) -> Parts:
            visit = self._visit_keys(call, rounds, places)
            visit = randomness.fold(visit, stream) if stream else visit
            keys = randomness.fold(visit.unsqueeze(-1), torch.as_tensor(numbers))
            return (*self.rows.draw(places, keys, batch), keys)

        kind = (call.phase, call.call, stream, numbers, batch)
        return self._prefetched(kind, call, visits, len(numbers) * batch, make)

    def _visit_keys(self, call: Call, rounds: range, places: Tensor) -> Tensor:
        """Return the keys of visits in several rounds, [rounds, k]."""
        base = randomness.key(self.seed, call.phase, torch.arange(rounds.start, rounds.stop), call.call)
        return randomness.fold(base.unsqueeze(-1), self.ids[places])

    def _prefetched(
        self,
        kind: Hashable,
        call: Call,
        visits: Visits,
        each: int,
        make: Callable[[range, Tensor], Parts],
    ) -> Parts:
        """Return the draws of this round, `each` numbers for a visit, made for as many rounds as pays."""
        known, at = self._known.get(kind), visits.at
        found = None if known is None else known.of(call.round, at)
        if found is not None:
            return found
        clients = len(self.ids) if at is None else len(at)
        most, count = NUMBERS // max(1, clients * each), 1
        foreseen = most > 1 and (at is None or visits.coming is not None)
        if foreseen and known is not None and known.rounds.stop == call.round:
            count = min(2 * len(known.rounds), most)
        rounds, cohorts = range(call.round, call.round + count), None
        if at is not None:
            cohorts = torch.stack([at, *(visits.coming(t) for t in rounds[1:] if visits.coming)])
        places = torch.arange(clients).expand(count, -1) if cohorts is None else cohorts
        made = PrefetchedDraws(rounds, cohorts, make(rounds, places))
        if foreseen:
            if len(self._known) >= KINDS:
                self._known.clear()
            self._known[kind] = made
        return tuple(part[0] for part in made.parts)

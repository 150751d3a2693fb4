"""Random draws of the server, made for several rounds at once because calls cost more than numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie._core import randomness

NUMBERS = 1 << 15  # draws for coming rounds that are made at once
COHORT_NUMBERS = 1 << 11  # ids in the cohorts that are drawn at once
MOST_HELD = 8  # kinds of draws that are cached


class ServerDraws:
    """Cached draws of the server; each is the function of seed, purpose and round that `randomness` defines."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._uniform: dict[tuple[str, int], tuple[int, Tensor]] = {}  # first round and draws [rounds, count]
        self._cohorts: dict[tuple[int, int, int], Tensor] = {}  # [rounds of a block, count]

    def uniform(self, purpose: str, t: int, count: int) -> Tensor:
        """Return `count` draws from [0, 1) for a purpose in round t."""
        if 2 * count > NUMBERS:
            return self._drawn(purpose, torch.tensor(t), count)
        first, held = self._uniform.get((purpose, count), (t, torch.empty(0)))
        if not first <= t < first + len(held):
            follows = t == first + len(held) and len(held) > 0
            rounds = torch.arange(t, t + (NUMBERS // max(1, count) if follows else 1))
            first, held = t, self._drawn(purpose, rounds, count)
            if len(self._uniform) >= MOST_HELD:
                self._uniform.clear()
            self._uniform[purpose, count] = first, held
        return held[t - first].clone()

    def cohort(self, t: int, n: int, count: int) -> Tensor:
        """Return `count` of the clients 0..n-1 to ask in round t, ascending."""
        size = max(1, COHORT_NUMBERS // count)
        block = (t // size, n, count)
        if block not in self._cohorts:
            if len(self._cohorts) >= MOST_HELD:
                self._cohorts.clear()
            rounds = torch.arange(block[0] * size, (block[0] + 1) * size)
            self._cohorts[block] = randomness.choose(randomness.key(self.seed, "sample", rounds), n, count)
        return self._cohorts[block][t % size].clone()

    def _drawn(self, purpose: str, rounds: Tensor, count: int) -> Tensor:
        return randomness.uniform(randomness.slots(randomness.key(self.seed, purpose, rounds), count))

"""Ragged clients in one flat array: a client is (start, size), a minibatch is a gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from coterie._core import randomness

PADDED_ELEMENTS = 1 << 25  # largest padded batch made at once; larger groups of clients are cut
CACHED_ELEMENTS = 1 << 26  # largest padded copy of all clients worth keeping between rounds


@dataclass(frozen=True)
class Batch:
    """Rows of a stack of clients: x [..., B, *], y [..., B], weight [..., B] (zero on padding)."""

    x: Tensor
    y: Tensor
    weight: Tensor


Augment = Callable[[Tensor, Tensor], Tensor]
"""(x [..., *], keys [...]) -> x, changed by random numbers from the keys alone."""


@dataclass(frozen=True, eq=False)
class Rows:
    """All rows of one split, client after client. `size` may be zero for some clients."""

    x: Tensor
    y: Tensor
    start: Tensor
    size: Tensor
    augment: Augment | None = None
    """What a minibatch goes through, with keys of its own for every row."""
    largest: int = field(init=False)
    smallest: int = field(init=False)
    _cache: dict[str, list[tuple[Tensor | None, Batch]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "largest", int(self.size.max()) if len(self.size) else 0)
        object.__setattr__(self, "smallest", int(self.size.min()) if len(self.size) else 0)
        object.__setattr__(self, "_cache", {})

    def __len__(self) -> int:
        return self.size.shape[0]

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the rows of one client."""
        first, count = int(self.start[client]), int(self.size[client])
        return self.x[first : first + count], self.y[first : first + count]

    def to(self, device: torch.device | str) -> Rows:
        """Return the same rows on another device."""
        return Rows(
            self.x.to(device), self.y.to(device), self.start.to(device), self.size.to(device), self.augment
        )

    def subset(self, clients: Tensor) -> Rows:
        """Return the rows of some clients only, as a node of a federation would hold them."""
        size = self.size[clients]
        inside = torch.arange(int(size.sum())) - torch.repeat_interleave(size.cumsum(0) - size, size)
        rows = torch.repeat_interleave(self.start[clients], size) + inside
        return Rows(self.x[rows], self.y[rows], size.cumsum(0) - size, size, self.augment)

    def draw(self, at: Tensor | None, keys: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Draw `batch` rows of each client with replacement: which rows, [..., batch], and their weights.

        A client with no more rows than that gives them all. `at` are positions [k] (None: every client) or one
        position [] for a single client; `keys` has the same shape, or [k, steps] for minibatches of several steps.
        Weights sum to one.
        """
        start, size = (self.start, self.size) if at is None else (self.start[at], self.size[at])
        axes = (1,) * (keys.dim() - size.dim() + 1)
        start, size = start.view(*start.shape, *axes), size.view(*size.shape, *axes)
        row = randomness.integers(randomness.slots(keys, batch), size)
        weight = torch.full((), 1.0 / batch, dtype=self.dtype, device=row.device).expand(row.shape)
        whole = size <= batch
        if self.smallest <= batch and (row.device.type != "cpu" or whole.any()):  # a GPU is not waited for
            slot = torch.arange(batch, device=row.device)
            row = torch.where(whole, slot % size, row)
            weight = torch.where(whole, (slot < size) / size.to(self.dtype), weight)
        return start + row, weight

    def take(self, rows: Tensor, weight: Tensor, keys: Tensor) -> Batch:
        """Return the minibatch of these rows; `keys` are those it was drawn with."""
        drawn = self._gather(rows, weight)
        if self.augment is None:
            return drawn
        batch = rows.shape[-1]
        return replace(
            drawn, x=self.augment(drawn.x, randomness.slots(randomness.fold(keys, "augment"), batch))
        )

    def full(self, at: Tensor | None) -> Iterator[tuple[Tensor | None, Batch]]:
        """Yield all rows, padded, in groups of clients of similar size.

        Yields (positions in the stack, batch); the positions are None when one group holds the whole
        stack. Weights sum to one per client and are zero on padding.
        """
        if at is not None and self._holds(at):
            ((_, everyone),) = self._cache["all"]
            parts = (everyone.x, everyone.y, everyone.weight)
            yield None, Batch(*(part.index_select(0, at) for part in parts))
        elif at is not None:
            yield from self._groups(at)
        elif self._cache or self._padded_size() <= CACHED_ELEMENTS:
            if "all" not in self._cache:
                self._cache["all"] = list(self._groups(None))
            yield from self._cache["all"]
        else:
            yield from self._groups(None)

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights: that of the inputs, or torch's default where they are whole numbers."""
        return self.x.dtype if self.x.is_floating_point() else torch.get_default_dtype()

    def _row_elements(self) -> int:
        return max(1, self.x[0].numel()) if len(self.x) else 1

    def _padded_size(self) -> int:
        return 2 * len(self.x) * self._row_elements()

    def _holds(self, at: Tensor) -> bool:
        """Whether all rows of these clients are in the copy of everybody's, with no padding among them."""
        fits = at.dim() == 1 and len(at) * self.largest * self._row_elements() <= PADDED_ELEMENTS
        return fits and self.smallest == self.largest and len(self._cache.get("all", [])) == 1

    def _groups(self, at: Tensor | None) -> Iterator[tuple[Tensor | None, Batch]]:
        start, size = (self.start, self.size) if at is None else (self.start[at], self.size[at])
        if size.dim() == 0:
            yield None, self._padded(start, size, int(size))
            return
        level = torch.log2(size.clamp(min=1).double()).ceil().long()
        for value in level.unique().tolist():
            members = (level == value).nonzero().squeeze(-1)
            width = int(size[members].max())
            step = max(1, PADDED_ELEMENTS // max(1, width * self._row_elements()))
            for part in members.split(step):
                whole = len(part) == len(size)
                yield None if whole else part, self._padded(start[part], size[part], width)

    def _padded(self, start: Tensor, size: Tensor, width: int) -> Batch:
        """Return all rows of these clients; a client without rows gets somebody's row with weight 0."""
        size, slot = size.unsqueeze(-1), torch.arange(width, device=size.device)
        weight = (slot < size).to(self.dtype) / size.clamp(min=1)
        rows = start.unsqueeze(-1) + torch.minimum(slot, (size - 1).clamp(min=0))
        return self._gather(rows.clamp(max=max(0, len(self.x) - 1)), weight)

    def _gather(self, rows: Tensor, weight: Tensor) -> Batch:
        flat = rows.flatten().clamp(
            max=max(len(self.x) - 1, 0)
        )  # a last client without rows begins after the end
        if len(self.x) == 0:
            flat = flat[:0]
        x = self.x.index_select(0, flat).view(*rows.shape, *self.x.shape[1:])
        return Batch(x, self.y.index_select(0, flat).view(rows.shape), weight)

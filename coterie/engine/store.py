"""What clients keep between rounds: named rows, allocated only for clients that have been visited.

Beyond a given number of bytes the rows live in a memory-mapped file, so that only those of the clients at work take
memory.
"""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from coterie._core import systems


class Column:
    """Rows of one kept value; a client gets a slot when it is first written, so memory follows the visited clients."""

    def __init__(self, clients: int, like: Tensor) -> None:
        self.slot = torch.full((clients,), -1, dtype=torch.long, device=like.device)
        self.rows = like.new_zeros((0, *like.shape))
        self.used = 0
        self.on_disk = False
        self._everyone_in_order = False  # slot[i] == i for all clients: no gather or scatter is needed
        self._lent = False  # `rows` may be shared: copy before changing it in place

    @classmethod
    def restore(cls, slot: Tensor, rows: Tensor) -> Column:
        """Return a column from the tensors of a checkpoint."""
        column = cls(len(slot), rows[0])
        column.slot, column.rows, column.used = slot, rows, len(rows)
        column._everyone_in_order = torch.equal(slot, torch.arange(len(slot), device=slot.device))
        return column

    def held(self) -> Column:
        """Return a copy of this column that later writes do not change."""
        column = copy.copy(self)
        column.slot = self.slot.clone()
        if self.on_disk:
            column.rows = self.rows.clone()
        else:
            self._lent = column._lent = True
        return column

    def read(self, at: Tensor | None) -> Tensor:
        """Return the rows of the clients at these positions (None: all); raise KeyError if one has none."""
        if at is None and self._everyone_in_order:
            self._lent = not self.on_disk
            return self.rows.clone() if self.on_disk else self.rows
        slots = self.slot if at is None else self.slot[at]
        if (slots < 0).any():
            raise KeyError
        return self.rows.index_select(0, slots.reshape(-1)).view(*slots.shape, *self.rows.shape[1:])

    def write(self, at: Tensor | None, values: Tensor) -> None:
        """Replace the rows of the clients at these positions (None: all)."""
        if at is None and (self._everyone_in_order or self.used == 0):
            if self.on_disk:
                self.rows.copy_(values)
            else:
                self.rows, self._lent = values.contiguous(), True
            if self.used == 0:
                self.used, self._everyone_in_order = len(self.slot), True
                self.slot = torch.arange(self.used, device=self.slot.device)
            return
        at = torch.arange(len(self.slot), device=self.slot.device) if at is None else at.reshape(-1)
        fresh = at[self.slot[at] < 0]
        if len(fresh):
            self._grow(fresh)
        if self._lent:
            self.rows, self._lent = self.rows.clone(), False
        self.rows.index_copy_(0, self.slot[at], values.reshape(len(at), *self.rows.shape[1:]))

    def bytes_for(self, clients: int) -> int:
        """Return how many bytes the rows of so many clients take."""
        return clients * max(1, self.rows.shape[1:].numel()) * self.rows.element_size()

    def move_to_disk(self) -> None:
        """Move the rows to a sparse file with room for all clients; the disk holds only what has been written."""
        rows = mapped(len(self.slot), self.rows)
        rows[: self.used] = self.rows[: self.used]
        self.rows, self.on_disk, self._lent = rows, True, False

    def _grow(self, fresh: Tensor) -> None:
        """Give slots to clients that have none yet, and make room for them."""
        needed = self.used + len(fresh)
        if needed > len(self.rows):
            room = min(len(self.slot), max(needed, 2 * len(self.rows)))
            rows = self.rows.new_zeros((room, *self.rows.shape[1:]))
            rows[: self.used] = self.rows[: self.used]
            self.rows, self._lent = rows, False
        self.slot[fresh] = torch.arange(self.used, needed, device=self.slot.device)
        self.used = needed


class Store:
    """All kept values of the clients of one runtime, by name."""

    def __init__(self, clients: int, memory: int | None = None) -> None:
        self.clients, self.memory = clients, memory  # bytes of rows that stay in memory; None: all
        self.columns: dict[str, Column] = {}
        self.writes = 0  # number of writes, which tells whether a call changed anything

    def read(self, name: str, at: Tensor | None) -> Tensor:
        """Return the rows of a kept value (`at` None: of all clients); raise KeyError if a client has none."""
        if name not in self.columns:
            raise KeyError
        return self.columns[name].read(at)

    def read_or_zero(self, name: str, at: Tensor | None, like: Tensor) -> Tensor:
        """Return rows of the shape of `like` for the clients at these positions, zeros where there are none."""
        if name not in self.columns:
            return torch.zeros_like(like)
        column = self.columns[name]
        slots = column.slot if at is None else column.slot[at]
        rows = column.rows.index_select(0, slots.clamp(min=0).reshape(-1)).view_as(like)
        return torch.where((slots >= 0).view(*slots.shape, *[1] * (like.dim() - slots.dim())), rows, 0.0)

    def write(self, name: str, at: Tensor | None, values: Tensor) -> None:
        """Keep the rows of the clients at these positions (None: all) under a name."""
        self.writes += 1
        if name not in self.columns:
            like = values if at is not None and at.dim() == 0 else values[0]
            self.columns[name] = Column(self.clients, like)
        column = self.columns[name]
        if self.memory is not None and not column.on_disk:
            fresh = self.clients if at is None else column.used + at.numel()
            self._make_room(column, min(self.clients, fresh))
        column.write(at, values)

    def _make_room(self, column: Column, clients: int) -> None:
        """Move a column to disk if it and the others would not fit into memory; on a GPU all stay there."""
        assert self.memory is not None
        others = (part for part in self.columns.values() if part is not column and not part.on_disk)
        held = sum(part.bytes_for(len(part.rows)) for part in others)
        if held + column.bytes_for(clients) > self.memory and column.rows.device.type == "cpu":
            column.move_to_disk()

    def held(self) -> dict[str, Column]:
        """Return copies of all columns that later writes do not change."""
        return {name: column.held() for name, column in self.columns.items()}

    def snapshot(self) -> dict[str, Tensor]:
        """Return tensors for a checkpoint: `name.slot` and `name.rows`."""
        tensors = {}
        for name, column in self.columns.items():
            tensors[f"{name}.slot"] = column.slot
            tensors[f"{name}.rows"] = column.rows[: column.used]
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take up the tensors of a checkpoint."""
        self.columns = {
            name.removesuffix(".slot"): Column.restore(slot, tensors[name.removesuffix(".slot") + ".rows"])
            for name, slot in tensors.items()
            if name.endswith(".slot")
        }
        if self.memory is not None:
            for column in self.columns.values():
                self._make_room(column, column.used)


def mapped(count: int, like: Tensor) -> Tensor:
    """Return zeros [count, *] like `like` [n, *] in an unnamed file, which is deleted together with the tensor."""
    shape = (count, *like.shape[1:])
    handle, path = tempfile.mkstemp(prefix="coterie-state-")
    try:
        os.truncate(handle, max(1, torch.Size(shape).numel()) * like.element_size())
        flat = torch.from_file(path, shared=True, size=torch.Size(shape).numel(), dtype=like.dtype)
    finally:
        os.close(handle)
        systems.discard(Path(path))
    return flat.view(shape)

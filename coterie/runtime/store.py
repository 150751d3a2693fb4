"""What clients keep between rounds: named rows, held only for clients that have been visited.

Beyond a given number of bytes rows live in a file that is mapped into memory, so that only those of the clients at
work are in memory.
"""

from __future__ import annotations

import copy
import os
import tempfile

import torch
from torch import Tensor


class Column:
    """Rows of one kept value. Slots are given on first write, so memory follows the visited clients."""

    def __init__(self, clients: int, like: Tensor) -> None:
        self.slot = torch.full((clients,), -1, dtype=torch.long, device=like.device)
        self.rows = like.new_zeros((0, *like.shape))
        self.used = 0
        self.on_disk = False
        self._everyone_in_order = False  # slot[i] == i for all clients: no gather, no scatter
        self._lent = False  # somebody else may hold `rows`: copy before changing it in place

    @classmethod
    def restore(cls, slot: Tensor, rows: Tensor) -> Column:
        """A column from a checkpoint."""
        column = cls(len(slot), rows[0])
        column.slot, column.rows, column.used = slot, rows, len(rows)
        column._everyone_in_order = torch.equal(slot, torch.arange(len(slot), device=slot.device))
        return column

    def held(self) -> Column:
        """This column as it is now, whatever becomes of it."""
        column = copy.copy(self)
        column.slot = self.slot.clone()
        if self.on_disk:
            column.rows = self.rows.clone()
        else:
            self._lent = column._lent = True
        return column

    def read(self, at: Tensor | None) -> Tensor:
        """Rows of the clients at these positions (None: all); KeyError if one has none."""
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
        """What the rows of so many clients weigh."""
        return clients * max(1, self.rows.shape[1:].numel()) * self.rows.element_size()

    def move_to_disk(self) -> None:
        """From now on rows are in a file with room for everybody, of which the disk holds what was written."""
        rows = mapped(len(self.slot), self.rows)
        rows[: self.used] = self.rows[: self.used]
        self.rows, self.on_disk, self._lent = rows, True, False

    def _grow(self, fresh: Tensor) -> None:
        needed = self.used + len(fresh)
        if needed > len(self.rows):
            room = min(len(self.slot), max(needed, 2 * len(self.rows)))
            rows = self.rows.new_zeros((room, *self.rows.shape[1:]))
            rows[: self.used] = self.rows[: self.used]
            self.rows, self._lent = rows, False
        self.slot[fresh] = torch.arange(self.used, needed, device=self.slot.device)
        self.used = needed


class Store:
    """All kept values of the clients in one place, by name."""

    def __init__(self, clients: int, memory: int | None = None) -> None:
        self.clients, self.memory = clients, memory  # bytes of rows that stay in memory; None: all
        self.columns: dict[str, Column] = {}
        self.writes = 0  # how often something was kept, which tells whether a call changed anything

    def read(self, name: str, at: Tensor | None) -> Tensor:
        if name not in self.columns:
            raise KeyError
        return self.columns[name].read(at)

    def read_or_zero(self, name: str, at: Tensor | None, like: Tensor) -> Tensor:
        """Rows like `like` [..., *] of the clients at these positions, zeros where there are none yet."""
        if name not in self.columns:
            return torch.zeros_like(like)
        column = self.columns[name]
        slots = column.slot if at is None else column.slot[at]
        rows = column.rows.index_select(0, slots.clamp(min=0).reshape(-1)).view_as(like)
        return torch.where((slots >= 0).view(*slots.shape, *[1] * (like.dim() - slots.dim())), rows, 0.0)

    def write(self, name: str, at: Tensor | None, values: Tensor) -> None:
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
        """Move a column to disk where it and the others would not fit into memory; on a GPU all stay."""
        assert self.memory is not None
        others = (part for part in self.columns.values() if part is not column and not part.on_disk)
        held = sum(part.bytes_for(len(part.rows)) for part in others)
        if held + column.bytes_for(clients) > self.memory and column.rows.device.type == "cpu":
            column.move_to_disk()

    def held(self) -> dict[str, Column]:
        """All columns as they are now."""
        return {name: column.held() for name, column in self.columns.items()}

    def snapshot(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint: `name.slot` and `name.rows`."""
        tensors = {}
        for name, column in self.columns.items():
            tensors[f"{name}.slot"] = column.slot
            tensors[f"{name}.rows"] = column.rows[: column.used]
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.columns = {
            name.removesuffix(".slot"): Column.restore(slot, tensors[name.removesuffix(".slot") + ".rows"])
            for name, slot in tensors.items()
            if name.endswith(".slot")
        }
        if self.memory is not None:
            for column in self.columns.values():
                self._make_room(column, column.used)


def mapped(count: int, like: Tensor) -> Tensor:
    """Zeros [count, *] of the kind of `like` [n, *] in a file without a name, which goes when the tensor goes."""
    shape = (count, *like.shape[1:])
    handle, path = tempfile.mkstemp(prefix="coterie-state-")
    try:
        os.truncate(handle, max(1, torch.Size(shape).numel()) * like.element_size())
        flat = torch.from_file(path, shared=True, size=torch.Size(shape).numel(), dtype=like.dtype)
    finally:
        os.close(handle)
        os.unlink(path)
    return flat.view(shape)

"""What crossed the wire: messages, floats and bytes, down and up, per round, phase and link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import polars
    from torch import Tensor

INSIDE = "inside"  # the link of what crosses no wire, which is not counted
PEERS = "client-client"  # from one client to another
COUNTS = ("messages_down", "floats_down", "bytes_down", "messages_up", "floats_up", "bytes_up")


Counts = tuple[int, int, int]  # messages, floats, bytes


class Entry(NamedTuple):
    """Where traffic belongs. `kind` is 'setup', 'train' or 'evaluate'."""

    round: int
    kind: str
    phase: str
    link: str


class Part(NamedTuple):
    """Traffic of one phase on one link."""

    phase: str
    link: str
    down: Counts
    up: Counts


class Ledger:
    """Filled by `Federation` and by nothing else."""

    def __init__(self) -> None:
        self._entries: dict[Entry, list[int]] = {}
        self._rounds: list[
            tuple[Sequence[int], str, Sequence[Part]]
        ] = []  # not entered yet, for who asks only

    @property
    def entries(self) -> dict[Entry, list[int]]:
        """Messages, floats and bytes down, then up, in the order in which they were sent."""
        for rounds, kind, parts in self._rounds:
            self._entries.update(
                (Entry(t, kind, part.phase, part.link), [*part.down, *part.up])
                for t in rounds
                for part in parts
            )
        self._rounds.clear()
        return self._entries

    def add(self, entry: Entry, down: Counts, up: Counts) -> None:
        """Add (messages, floats, bytes) in each direction."""
        counts = self.entries.get(entry)
        if counts is None:
            self.entries[entry] = [*down, *up]
        else:
            for k, value in enumerate((*down, *up)):
                counts[k] += value

    def add_rounds(self, rounds: Sequence[int], kind: str, parts: Sequence[Part]) -> None:
        """The same traffic in each of many rounds, which had none of these phases before."""
        self._rounds.append((rounds, kind, parts))

    def forget_after(self, t: int) -> None:
        """Take rounds after t back."""
        for entry in [entry for entry in self.entries if entry.round > t]:
            del self.entries[entry]

    def total(
        self, count: str, kind: str | None = None, phase: str | None = None, link: str | None = None
    ) -> int:
        """Sum of one of `COUNTS`, optionally of one kind, phase or link. Evaluation counts only if asked for."""
        column = COUNTS.index(count)
        return sum(
            counts[column]
            for entry, counts in self.entries.items()
            if (entry.kind == kind if kind else entry.kind != "evaluate")
            and phase in (None, entry.phase)
            and link in (None, entry.link)
        )

    def frame(self) -> polars.DataFrame:
        """One row per round, kind, phase and link."""
        import polars

        names = [*Entry._fields, *COUNTS]
        rows = [(*entry, *counts) for entry, counts in self.entries.items()]
        text = {"kind", "phase", "link"}
        schema = {name: polars.String if name in text else polars.Int64 for name in names}
        return polars.DataFrame(rows, schema=schema, orient="row")


def weigh(rows: Tensor | None) -> Counts:
    """Messages, floats and bytes of a message for each row."""
    return (0, 0, 0) if rows is None else (len(rows), rows.numel(), rows.numel() * rows.element_size())

"""What crossed the wire: messages, floats and bytes, down and up, per round, phase and link."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import polars

INSIDE = "inside"  # the link of what crosses no wire, which is not counted
PEERS = "client-client"  # from one client to another
COUNTS = ("messages_down", "floats_down", "bytes_down", "messages_up", "floats_up", "bytes_up")


class Entry(NamedTuple):
    """Where traffic belongs. `kind` is 'setup', 'train' or 'evaluate'."""

    round: int
    kind: str
    phase: str
    link: str


class Ledger:
    """Filled by `Federation.map` and by nothing else."""

    def __init__(self) -> None:
        self.entries: dict[Entry, list[int]] = {}

    def add(self, entry: Entry, down: tuple[int, int, int], up: tuple[int, int, int]) -> None:
        """Add (messages, floats, bytes) in each direction."""
        counts = self.entries.get(entry)
        if counts is None:
            self.entries[entry] = [*down, *up]
        else:
            for k, value in enumerate((*down, *up)):
                counts[k] += value

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

"""The ledger: messages, floats and bytes sent down and up, per round, phase and link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import polars
    from torch import Tensor

INSIDE = "inside"  # link of messages that stay on one machine, which are not counted
PEERS = "client-client"  # link of messages from one client to another
COUNTS = ("messages_down", "floats_down", "bytes_down", "messages_up", "floats_up", "bytes_up")


Counts = tuple[int, int, int]  # messages, floats, bytes


class Entry(NamedTuple):
    """Where traffic belongs; `kind` is 'setup', 'train', 'evaluate' or 'refit' (training again on more rows)."""

    round: int
    kind: str
    phase: str
    link: str


class Traffic(NamedTuple):
    """Traffic of one phase on one link: (messages, floats, bytes) down and up."""

    phase: str
    link: str
    down: Counts
    up: Counts


class Ledger:
    """Count of all traffic of a federation; `Federation.map` fills it, and nothing else does.

    Examples
    --------
    >>> from coterie.engine.ledger import Entry, Ledger
    >>> ledger = Ledger()
    >>> ledger.add(Entry(1, "train", "train", "client-server"), down=(3, 30, 120), up=(2, 20, 80))
    >>> ledger.total("bytes_up"), ledger.frame().height
    (80, 1)
    """

    def __init__(self) -> None:
        self._entries: dict[Entry, list[int]] = {}
        self._rounds: list[tuple[Sequence[int], str, Sequence[Traffic]]] = []  # entered when first asked for

    @property
    def entries(self) -> dict[Entry, list[int]]:
        """Messages, floats and bytes down, then up, by entry, in the order in which they were sent."""
        for rounds, kind, parts in self._rounds:
            self._entries.update(
                (Entry(t, kind, part.phase, part.link), [*part.down, *part.up])
                for t in rounds
                for part in parts
            )
        self._rounds.clear()
        return self._entries

    def add(self, entry: Entry, down: Counts, up: Counts) -> None:
        """Add traffic to an entry.

        Parameters
        ----------
        entry
            Round, kind, phase and link.
        down
            (messages, floats, bytes) from the server.
        up
            (messages, floats, bytes) to the server.
        """
        counts = self.entries.get(entry)
        if counts is None:
            self.entries[entry] = [*down, *up]
        else:
            for k, value in enumerate((*down, *up)):
                counts[k] += value

    def add_rounds(self, rounds: Sequence[int], kind: str, parts: Sequence[Traffic]) -> None:
        """Enter the same traffic for each of many rounds, which have had none of these phases before.

        Parameters
        ----------
        rounds
            The rounds.
        kind
            'setup', 'train' or 'evaluate'.
        parts
            Traffic of each phase and link in every one of them.
        """
        self._rounds.append((rounds, kind, parts))

    def forget_after(self, t: int) -> None:
        """Remove the entries of rounds after t."""
        for entry in [entry for entry in self.entries if entry.round > t]:
            del self.entries[entry]

    def total(
        self, count: str, kind: str | None = None, phase: str | None = None, link: str | None = None
    ) -> int:
        """Return the sum of one count; evaluation is counted only if `kind` asks for it.

        Parameters
        ----------
        count
            One of `COUNTS`, such as "bytes_up".
        kind
            Only this kind; by default all but 'evaluate'.
        phase
            Only this phase.
        link
            Only this link.

        Returns
        -------
        int
            The sum.
        """
        column = COUNTS.index(count)
        return sum(
            counts[column]
            for entry, counts in self.entries.items()
            if (entry.kind == kind if kind else entry.kind != "evaluate")
            and phase in (None, entry.phase)
            and link in (None, entry.link)
        )

    def megabytes(self) -> dict[int, tuple[float, float]]:
        """Return the megabytes up and down until the end of every round, without evaluation and refitting.

        Returns
        -------
        dict of int to tuple of float
            By round, in ascending order; rounds without traffic have no entry.
        """
        sent: dict[int, list[int]] = {}
        for entry, counts in self.entries.items():
            if entry.kind in ("setup", "train"):
                both = sent.setdefault(entry.round, [0, 0])
                both[0], both[1] = both[0] + counts[5], both[1] + counts[2]
        up = down = 0
        found: dict[int, tuple[float, float]] = {}
        for t in sorted(sent):
            up, down = up + sent[t][0], down + sent[t][1]
            found[t] = (up / 1e6, down / 1e6)
        return found

    def megabytes_until(self, t: int) -> tuple[float, float]:
        """Return the megabytes up and down until the end of round t, without evaluation and refitting."""
        before = [both for when, both in self.megabytes().items() if when <= t]
        return before[-1] if before else (0.0, 0.0)

    @classmethod
    def from_frame(cls, frame: polars.DataFrame) -> Ledger:
        """Return the ledger that `frame` was made of."""
        ledger = cls()
        for row in frame.select(*Entry._fields, *COUNTS).iter_rows():
            ledger._entries[Entry(*row[:4])] = list(row[4:])
        return ledger

    def frame(self) -> polars.DataFrame:
        """Return the ledger as a table with one row per round, kind, phase and link."""
        import polars

        names = [*Entry._fields, *COUNTS]
        rows = [(*entry, *counts) for entry, counts in self.entries.items()]
        text = {"kind", "phase", "link"}
        schema = {name: polars.String if name in text else polars.Int64 for name in names}
        return polars.DataFrame(rows, schema=schema, orient="row")


def weigh(rows: Tensor | None) -> Counts:
    """Return messages, floats and bytes of a stack that holds one message per row; nothing for None."""
    return (0, 0, 0) if rows is None else (len(rows), rows.numel(), rows.numel() * rows.element_size())

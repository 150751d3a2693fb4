"""Checkpoints: all that a run needs to continue, in one safetensors file, and a pointer with its hash."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from coterie._core import broadcast, files, systems
from coterie._core.errors import RunError
from coterie.engine.federation import Federation
from coterie.engine.ledger import Entry
from coterie.engine.state import State
from coterie.train import private
from coterie.train.history import History


@dataclass
class Best:
    """The round with the lowest validation loss so far, its deployed models and the server's state."""

    round: int = -1
    loss: float = float("inf")
    personal: Tensor | None = None
    state: State | None = None


@dataclass
class Progress:
    """Where a run is after a round.

    Attributes
    ----------
    round : int
        The last round that is done.
    state : State
        The server's state.
    history : History
        Metrics so far.
    best : Best
        The best round so far.
    lost_rounds : int
        Rounds in which nobody answered.
    deployed : Tensor or None
        The models deployed after this round, if scoring them made them already.
    """

    round: int
    state: State
    history: History
    best: Best
    lost_rounds: int = 0
    deployed: Tensor | None = None


POINTER = "checkpoint.json"
SECONDS = 10.0  # between checkpoints, at least
SHARE = 0.05  # of the time that goes into checkpoints, at most


class Clock:
    """When to write a checkpoint: every so many rounds, or by the time spent if `every` is 0."""

    def __init__(self, every: int) -> None:
        self.every, self.wait, self.last = every, SECONDS, time.monotonic()

    def due(self, t: int) -> bool:
        """Return True if a checkpoint should be written after round t."""
        if self.every:
            return t % self.every == 0
        return time.monotonic() - self.last >= self.wait

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure how long the checkpoint inside the block takes, which decides the next wait."""
        started = time.monotonic()
        yield
        self.last = time.monotonic()
        self.wait = max(SECONDS, (self.last - started) / SHARE)


def save(folder: Path, fed: Federation, progress: Progress) -> None:
    """Write a new checkpoint, point to it, then remove the older one."""
    tensors = {f"state.{name}": value for name, value in progress.state.tensors().items()}
    tensors |= {f"store.{name}": value for name, value in fed.runtime.snapshot().items()}
    tensors |= progress.history.tensors()
    tensors["begun"] = fed.begun
    if fed.late is not None:
        tensors |= {f"late.{name}": value for name, value in fed.late.tensors().items()}
    if progress.best.personal is not None:
        tensors["best.personal"] = progress.best.personal
    then = State() if progress.best.state is None else progress.best.state
    tensors |= {f"best.state.{name}": value for name, value in then.tensors().items()}
    note = {
        "round": progress.round,
        "lost_rounds": progress.lost_rounds,
        "numbers": _numbers(progress.state),
        "best_numbers": _numbers(then),
        "history": progress.history.index(),
        "ledger": [[*entry, *counts] for entry, counts in fed.ledger.entries.items()],
        "left_out": fed.left_out,
        "shortened": fed.shortened,
        "privacy": private.state(fed),
        "decisions": fed.model.measured(),
        "best": [progress.best.round, progress.best.loss if progress.best.round >= 0 else None],
    }
    path = folder / f"round-{progress.round:09d}.safetensors"
    files.write_tensors(path, tensors, note)
    files.write_json(
        folder / POINTER, {"file": path.name, "round": progress.round, "sha256": files.sha256(path)}
    )
    for old in folder.glob("round-*.safetensors"):
        if old != path:
            systems.discard(old)


def load(folder: Path, fed: Federation) -> Progress | None:
    """Restore the last complete checkpoint into `fed` and return its progress; None if there is none."""
    if not (folder / POINTER).exists():
        return None
    pointer = files.read_json(folder / POINTER)
    try:
        path, expected = folder / pointer["file"], pointer["sha256"]
    except (KeyError, TypeError) as problem:
        raise RunError(
            f"{folder / POINTER} is damaged ({problem}). Restore it from a copy, or delete {folder} to start this run "
            "again from round 0."
        ) from None
    if not path.is_file() or files.sha256(path) != expected:
        raise RunError(
            f"{path} does not match the hash in {POINTER}: the checkpoint is damaged. Restore it from a copy, or "
            f"delete {folder} to start this run again from round 0."
        )
    tensors, note = files.read_tensors(path)
    tensors = {name: broadcast.to(value, fed.device) for name, value in tensors.items()}
    fed.model.measured().update(note["decisions"])
    fed.runtime.restore(_under("store.", tensors))
    fed.restore_begun(tensors["begun"])
    private.restore(fed, note.get("privacy"))
    if fed.late is not None:
        fed.late.restore(_under("late.", tensors))
    fed.left_out = [(int(t), int(k), str(why)) for t, k, why in note["left_out"]]
    fed.shortened = [(int(t), int(k), str(phase)) for t, k, phase in note.get("shortened", ())]
    for row in note["ledger"]:
        fed.ledger.entries[Entry(*row[:4])] = list(row[4:])
    best = Best()
    if note["best"][0] >= 0:
        then = State(**_under("best.state.", tensors), **note["best_numbers"])
        best = Best(note["best"][0], note["best"][1], tensors.get("best.personal"), then)
    history_tensors = {name: value.cpu() for name, value in tensors.items() if name.startswith("history.")}
    return Progress(
        note["round"],
        State(**_under("state.", tensors), **note["numbers"]),
        History.restore(note["history"], history_tensors),
        best,
        note["lost_rounds"],
    )


def _numbers(state: State) -> dict[str, Any]:
    """Return the fields of a state that are not tensors."""
    return {name: value for name, value in state.fields().items() if not isinstance(value, Tensor)}


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

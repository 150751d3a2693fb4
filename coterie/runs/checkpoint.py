"""Everything a run needs to go on, in one safetensors file, with a pointer that names its hash."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from coterie.errors import RunError
from coterie.federation.federation import Federation
from coterie.federation.ledger import Entry
from coterie.federation.state import State
from coterie.models.shared import moved
from coterie.runs import files
from coterie.runs.history import History


@dataclass
class Best:
    """The round with the lowest validation loss so far, its deployed models and the server's state then."""

    round: int = -1
    loss: float = float("inf")
    personal: Tensor | None = None
    state: State | None = None


@dataclass
class Progress:
    """Where a run stands after a round."""

    round: int
    state: State
    history: History
    best: Best
    lost_rounds: int = 0


POINTER = "checkpoint.json"


def save(folder: Path, fed: Federation, progress: Progress) -> None:
    """Write the new checkpoint, point to it, then remove the older one."""
    tensors = {f"state.{name}": value for name, value in progress.state.tensors().items()}
    tensors |= {f"store.{name}": value for name, value in fed.runtime.snapshot().items()}
    tensors |= progress.history.tensors()
    tensors["begun"] = fed.begun
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
            old.unlink(missing_ok=True)


def load(folder: Path, fed: Federation) -> Progress | None:
    """The last complete checkpoint, put into `fed`; None if the run was killed before the first one."""
    if not (folder / POINTER).exists():
        return None
    pointer = files.read_json(folder / POINTER)
    path = folder / pointer["file"]
    if not path.exists() or files.sha256(path) != pointer["sha256"]:
        raise RunError(
            f"{path} does not match the hash in {POINTER}: the checkpoint is damaged. Restore it from a copy, or "
            f"delete {folder} to start this run again from round 0."
        )
    tensors, note = files.read_tensors(path)
    tensors = {name: moved(value, fed.device) for name, value in tensors.items()}
    fed.runtime.restore(_under("store.", tensors))
    fed.restore_begun(tensors["begun"])
    fed.model.measured().update(note["decisions"])
    fed.left_out = [(int(t), int(k), str(why)) for t, k, why in note["left_out"]]
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
    """The fields of a state that are not tensors."""
    return {name: value for name, value in state.fields().items() if not isinstance(value, Tensor)}


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

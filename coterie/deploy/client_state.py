"""State that a node's clients keep, on its own disk: one whole file per state, named by the call that wrote it.

The server names the state from which a call starts, and the node loads exactly that one. A call that was answered too
late, a node that was killed and a server that went back to an older checkpoint therefore continue from the same bits.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from coterie._core import files, systems

CallId = tuple[int, int]  # round, call


class ClientStateFiles:
    """Saved states of one run on one node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, stamp: CallId, tensors: dict[str, Tensor]) -> None:
        """Write a state; it is on disk when this returns, and replaces one with the same stamp."""
        files.write_tensors(self._path(stamp), tensors)

    def load(self, stamp: CallId) -> dict[str, Tensor] | None:
        """Return the state that a call wrote, or None if it is not on this node."""
        path = self._path(stamp)
        return files.read_tensors(path)[0] if path.exists() else None

    def prune(self, floor: CallId) -> None:
        """Remove states older than `floor`, which the server will not ask for again."""
        oldest = self._path(floor).name
        for path in self.folder.glob("*.safetensors"):
            if path.name < oldest:
                systems.discard(path)

    def clear(self) -> None:
        """Remove all states."""
        for path in self.folder.glob("*.safetensors"):
            systems.discard(path)

    def _path(self, stamp: CallId) -> Path:
        return self.folder / f"{stamp[0]:09d}-{stamp[1]:06d}.safetensors"

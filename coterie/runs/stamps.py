"""What a node's clients keep, on its own disk: a whole file per state, named by the call that left it.

The server says which state a call starts from, and the node loads exactly that one. So a call that was answered too
late, a node that was killed and a server that went back to an older checkpoint all go on from the same bits.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from coterie.runs import files

Stamp = tuple[int, int]  # round, call


class Stamps:
    """States of one run on one node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, stamp: Stamp, tensors: dict[str, Tensor]) -> None:
        """Durable when this returns; the same stamp is replaced whole."""
        files.write_tensors(self._path(stamp), tensors)

    def load(self, stamp: Stamp) -> dict[str, Tensor] | None:
        """The state a call left, None if it is not here."""
        path = self._path(stamp)
        return files.read_tensors(path)[0] if path.exists() else None

    def prune(self, floor: Stamp) -> None:
        """Remove what is older than a state that the server will never go back behind."""
        oldest = self._path(floor).name
        for path in self.folder.glob("*.safetensors"):
            if path.name < oldest:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        for path in self.folder.glob("*.safetensors"):
            path.unlink(missing_ok=True)

    def _path(self, stamp: Stamp) -> Path:
        return self.folder / f"{stamp[0]:09d}-{stamp[1]:06d}.safetensors"

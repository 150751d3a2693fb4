"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coterie._core import files
from coterie._core.errors import RunError


def test_a_full_disk_is_named_whoever_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Safetensors has the system's error as text only."""
    import safetensors
    import safetensors.torch

    def full(*given: object, **more: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(RunError, match="No space left on device") as raised:
        files.write_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(2)})
    assert files.disk_is_full(raised.value) and not list(tmp_path.iterdir())
    assert not files.disk_is_full(RunError("another"))


def test_a_full_disk_of_a_table_is_named(tmp_path: Path) -> None:
    """Polars has the system's error as text only, too."""
    import polars

    def full(path: Path) -> None:
        path.write_bytes(b"half")
        raise polars.exceptions.ComputeError("underlying IO error: No space left on device (os error 28)")

    with pytest.raises(RunError, match="No space left on device") as raised:
        files.write_with(tmp_path / "a.parquet", full)
    assert files.disk_is_full(raised.value) and not list(tmp_path.iterdir())


def test_half_of_an_entry_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "log", files.os.write
    files.append(path, b"first\n")
    monkeypatch.setattr(files.os, "write", lambda descriptor, content: write(descriptor, content[:3]))
    with pytest.raises(OSError, match="No space left"):
        files.append(path, b"second\n")
    assert path.read_bytes() == b"first\n" and path.stat().st_mode & 0o077 == 0

"""The C library is there where it can be, and nothing needs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coterie import native


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.skipif(bool(os.environ.get(native.PLAIN)), reason=f"{native.PLAIN} is set")
def test_it_was_built_when_the_package_was_installed() -> None:
    assert native.library is not None, "install again: pip install -e ."


def test_it_can_be_left_alone() -> None:
    code = "from coterie import native; print(native.library)"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, native.PLAIN: "1"}, capture_output=True, text=True
    )
    assert run.stdout.strip() == "None", run.stderr


def test_one_of_another_machine_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels.so").write_bytes(b"\x7fELF of something else")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.delenv(native.PLAIN, raising=False)
    assert native._load() is None

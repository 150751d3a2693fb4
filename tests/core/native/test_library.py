"""The C library is there where it can be, and nothing needs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coterie._core import native
from coterie._core.native import sources


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.skipif(bool(os.environ.get(native.PLAIN)), reason=f"{native.PLAIN} is set")
def test_it_was_built_when_the_package_was_installed() -> None:
    assert native.library is not None, "install again: pip install -e ."


@pytest.mark.slow
def test_it_can_be_left_alone() -> None:
    code = "from coterie._core.native import library, dual_sgd; print(library, dual_sgd.available)"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, native.PLAIN: "1"}, capture_output=True, text=True
    )
    assert run.stdout.split() == ["None", "False"], run.stderr


def test_one_of_other_sources_or_another_machine_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.delenv(native.PLAIN, raising=False)
    source = tmp_path / "span.c"
    source.write_text("int one(void) { return 1; }")
    made = sources.library(tmp_path)
    made.write_bytes(b"\x7fELF of something else")
    assert native._load() is None
    source.write_text("int one(void) { return 2; }")
    assert sources.library(tmp_path) != made

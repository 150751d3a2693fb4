"""What holds for every test, and for the examples in docstrings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: its second thread would spin beside other tests

# Where Python is told to write no bytecode, every worker and every process that a test starts would compile all
# packages again, which takes longer than most tests. It goes to a folder of pytest's then.
if sys.dont_write_bytecode:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or `python -B` was called
    os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parent / ".pytest_cache" / "bytecode")
    sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ["PYTHONPYCACHEPREFIX"]

import pytest


@pytest.fixture(autouse=True)
def _own_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a metric that one test registers unknown to the next."""
    from coterie.models.metrics import registry

    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

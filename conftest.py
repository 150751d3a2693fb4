"""What holds for every test, and for the examples in docstrings."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: its second thread would spin beside other tests

import pytest


@pytest.fixture(autouse=True)
def _own_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a metric that one test registers unknown to the next."""
    from coterie.models.metrics import registry

    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

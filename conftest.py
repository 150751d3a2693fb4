"""What holds for every test, and for the examples in docstrings."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _own_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a metric that one test registers unknown to the next."""
    from coterie.models.metrics import registry

    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

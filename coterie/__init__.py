"""Personalized federated learning: every client gets the best model it can have.

>>> fed = coterie.Federation.from_table("heart.csv", client="hospital", target="sick")  # doctest: +SKIP
>>> run = coterie.fit(fed, coterie.algorithms.Ditto(lr=0.1), rounds=200)  # doctest: +SKIP
>>> run.model("cleveland")  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import os
from typing import Any

__version__ = "0.1.0"

# Threads that wait for each other sleep rather than spin: on a machine with other things to do, spinning makes torch up
# to fifty times slower. Read when torch is first imported, so it has no effect where that was before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HOME = {
    "Federation": "coterie.federation.federation",
    "State": "coterie.federation.state",
    "Algorithm": "coterie.algorithms.base",
    "setting": "coterie.algorithms.base",
    "fit": "coterie.runs.fit",
    "resume": "coterie.runs.fit",
    "Run": "coterie.runs.run",
    "choose": "coterie.runs.auto",
    "compare": "coterie.runs.compare",
    "advise": "coterie.theory.advisor",
    "check_algorithm": "coterie.runs.conformance",
    "CoterieError": "coterie.errors",
}
_MODULES = ("algorithms", "data", "models", "theory", "report")

__all__ = [*_HOME, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"coterie.{name}")
    raise AttributeError(f"module 'coterie' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

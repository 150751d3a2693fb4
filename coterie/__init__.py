"""Personalized federated learning: every client gets the best model it can have.

>>> fed = coterie.Federation.from_table("heart.csv", client="hospital", target="sick")  # doctest: +SKIP
>>> run = coterie.fit(fed, coterie.algorithms.Ditto(lr=0.1), rounds=200)  # doctest: +SKIP
>>> run.model("cleveland")  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

__version__ = "0.2.0"

# Threads that wait for each other sleep rather than spin: on a machine with other things to do, spinning makes torch up
# to fifty times slower. Read when torch is first imported, so it has no effect where that was before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A library is silent until its user configures logging.
logging.getLogger(__name__).addHandler(logging.NullHandler())

_HOME = {
    "Federation": "coterie.engine.federation",
    "State": "coterie.engine.state",
    "Algorithm": "coterie.algorithms.base",
    "setting": "coterie.algorithms.base",
    "fit": "coterie.select.fit",
    "resume": "coterie.train.fit",
    "load": "coterie.train.load",
    "Run": "coterie.train.run",
    "choose": "coterie.select.auto",
    "compare": "coterie.select.compare",
    "advise": "coterie.select.advise",
    "check_algorithm": "coterie.conformance",
    "Privacy": "coterie.engine.privacy",
    "Lateness": "coterie.engine.late",
    "CoterieError": "coterie._core.errors",
}
_MODULES = ("algorithms", "data", "metrics", "models", "theory", "report")

__all__ = [*_HOME, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"coterie.{name}")
    raise AttributeError(f"module 'coterie' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

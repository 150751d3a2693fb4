"""One file per method. A file in this folder is found by itself; plugins use the entry point group
`coterie.algorithms`. Classes are reached by name: `coterie.algorithms.Ditto`, `find("ditto")`."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from importlib.metadata import entry_points
from typing import Any

from coterie.algorithms.base import Algorithm, parse, setting
from coterie.errors import SettingError, nearest

__all__ = ["Algorithm", "all_algorithms", "find", "make", "setting"]


@functools.cache
def all_algorithms() -> dict[str, type[Algorithm]]:
    """Every algorithm by its name on the command line."""
    found: dict[str, type[Algorithm]] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name != "base":
            _collect(importlib.import_module(f"{__name__}.{module.name}"), found)
    for entry in entry_points(group="coterie.algorithms"):
        found[entry.name] = entry.load()
    return dict(sorted(found.items()))


def find(name: str) -> type[Algorithm]:
    """The algorithm with this name; an unknown one is an error that suggests the nearest."""
    known = all_algorithms()
    if name not in known:
        raise SettingError(f"no algorithm {name!r}.{nearest(name, known)}")
    return known[name]


def make(name: str, **settings: Any) -> Algorithm:
    """An algorithm from its name and hyperparameters (text is converted)."""
    cls = find(name)
    return cls(**parse(cls, settings))


def _collect(module: Any, found: dict[str, type[Algorithm]]) -> None:
    for _, cls in inspect.getmembers(module, inspect.isclass):
        if issubclass(cls, Algorithm) and cls.__module__ == module.__name__:
            found[cls.name] = cls


def __getattr__(name: str) -> type[Algorithm]:
    for cls in all_algorithms().values():
        if cls.__name__ == name:
            return cls
    raise AttributeError(f"coterie.algorithms has no {name!r}")

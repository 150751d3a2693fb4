"""Algorithms, one file each.

A file in this folder is found by itself; plugins register in the entry point group `coterie.algorithms`. Classes are
reached by name: `coterie.algorithms.Ditto`, `find("ditto")`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from importlib.metadata import entry_points
from typing import Any

from coterie._core.errors import SettingError, nearest
from coterie.algorithms.base import Algorithm, parse, setting
from coterie.engine.federation import Federation

__all__ = ["Algorithm", "all_algorithms", "find", "from_the_theory", "make", "setting"]


@functools.cache
def all_algorithms() -> dict[str, type[Algorithm]]:
    """Return all algorithms, those of plugins included, by their names on the command line.

    Returns
    -------
    dict of str to type
        Classes, in alphabetical order of their names.

    Examples
    --------
    >>> from coterie.algorithms import all_algorithms
    >>> list(all_algorithms())[:3]
    ['apfl', 'async-al2sgd+', 'async-l2gd']
    """
    found: dict[str, type[Algorithm]] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name != "base":
            _collect(importlib.import_module(f"{__name__}.{module.name}"), found)
    for entry in entry_points(group="coterie.algorithms"):
        found[entry.name] = entry.load()
    return dict(sorted(found.items()))


def find(name: str) -> type[Algorithm]:
    """Return the class of an algorithm.

    Parameters
    ----------
    name
        Its name on the command line.

    Returns
    -------
    type
        A subclass of `Algorithm`.

    Raises
    ------
    SettingError
        If there is no such algorithm; the message suggests the nearest name.

    Examples
    --------
    >>> from coterie.algorithms import find
    >>> find("fedavg").__name__
    'FedAvg'
    """
    known = all_algorithms()
    if name not in known:
        raise SettingError(f"no algorithm {name!r}.{nearest(name, known)}")
    return known[name]


def make(name: str, **settings: Any) -> Algorithm:
    """Make an algorithm from its name and hyperparameters.

    Parameters
    ----------
    name
        Its name on the command line.
    **settings
        Hyperparameters; text is converted to their types.

    Returns
    -------
    Algorithm
        The algorithm.

    Examples
    --------
    >>> from coterie.algorithms import make
    >>> make("fedavg", lr="0.1", steps=2).lr
    0.1
    """
    cls = find(name)
    return cls(**parse(cls, settings))


def from_the_theory(name: str, fed: Federation, settings: dict[str, Any]) -> Algorithm:
    """Make an algorithm whose steps and probabilities come from its theory and the losses of these clients.

    Parameters
    ----------
    name
        Its name on the command line.
    fed
        The federation.
    settings
        Hyperparameters that are given; text is converted.

    Returns
    -------
    Algorithm
        The algorithm.

    Raises
    ------
    SettingError
        If the method has no `from_theory`.

    Examples
    --------
    >>> import torch, coterie
    >>> from coterie.algorithms import from_the_theory
    >>> xs, ys = [torch.eye(2)] * 2, [torch.ones(2)] * 2
    >>> fed = coterie.Federation.from_arrays(xs, ys, coterie.models.linear(), clusters=[0, 1])
    >>> from_the_theory("async-l2gd", fed, {"gamma": "[1,2]"}).gamma
    (1.0, 2.0)
    """
    cls = find(name)
    if not hasattr(cls, "from_theory"):
        able = [other for other, one in all_algorithms().items() if hasattr(one, "from_theory")]
        raise SettingError(f"{name} has no steps from theory; {', '.join(able)} have")
    made: Algorithm = cls.from_theory(fed, **parse(cls, settings))
    return made


def _collect(module: Any, found: dict[str, type[Algorithm]]) -> None:
    for _, cls in inspect.getmembers(module, inspect.isclass):
        if issubclass(cls, Algorithm) and cls.name and cls.__module__ == module.__name__:
            found[cls.name] = cls


def __getattr__(name: str) -> type[Algorithm]:
    for cls in all_algorithms().values():
        if cls.__name__ == name:
            return cls
    raise AttributeError(f"coterie.algorithms has no {name!r}")

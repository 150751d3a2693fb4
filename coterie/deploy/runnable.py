"""What a server can ask nodes to run: the methods, and the survey behind the advisor."""

from __future__ import annotations

from typing import Any

from coterie.algorithms import Algorithm, all_algorithms, make
from coterie.select.survey import Survey

SURVEY = Survey.name


def runnable() -> dict[str, type[Algorithm]]:
    """Return all that nodes can run, by name; a node's policy names those that it does run.

    Examples
    --------
    >>> from coterie.deploy.runnable import runnable
    >>> "survey" in runnable() and "ditto" in runnable()
    True
    """
    return {**all_algorithms(), SURVEY: Survey}


def made(name: str, **settings: Any) -> Algorithm:
    """Return a method, or the survey, with these settings."""
    return Survey(**settings) if name == SURVEY else make(name, **settings)

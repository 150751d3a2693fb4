"""Errors that say what was wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CoterieError(Exception):
    """Something the user can put right; the command line prints it and exits with code 2."""


class DataError(CoterieError):
    """A file, column, row or client that cannot be used as it is."""


class SettingError(CoterieError):
    """An unknown name or a value outside its range."""


class RunError(CoterieError):
    """A run folder or checkpoint that cannot be used."""


class NobodyAnswered(CoterieError):
    """Every client asked in this call dropped out; the round is lost, the run goes on."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as " Did you mean 'ditto'?", or the list of what exists."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(known)}." if known else ""

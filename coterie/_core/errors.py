"""Exceptions whose messages name the file, column, client or setting at fault and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CoterieError(Exception):
    """Base class of every error that a user can put right.

    The command line prints the message without a traceback and exits with code 2.

    Examples
    --------
    >>> import coterie
    >>> try:
    ...     coterie.algorithms.find("dito")
    ... except coterie.CoterieError as problem:
    ...     print(problem)
    no algorithm 'dito'. Did you mean 'ditto'?
    """


class DataError(CoterieError):
    """Raised when a file, column, row or client cannot be used as it is.

    Examples
    --------
    >>> from coterie.data import bundled
    >>> bundled.path("heart_diseases")
    Traceback (most recent call last):
        ...
    coterie._core.errors.DataError: No bundled table is called 'heart_diseases'. Did you mean 'heart_disease'?
    """


class SettingError(CoterieError):
    """Raised for an unknown name, or a value outside its range.

    Examples
    --------
    >>> from coterie.data import generate
    >>> generate.clustered_regression(rows=0)
    Traceback (most recent call last):
        ...
    coterie._core.errors.SettingError: rows=0; it must be at least 1
    """


class RunError(CoterieError):
    """Raised when a run folder or checkpoint cannot be read, written or resumed.

    Examples
    --------
    >>> import coterie
    >>> coterie.resume("nowhere")
    Traceback (most recent call last):
        ...
    coterie._core.errors.RunError: nowhere does not exist. Name the folder that `coterie fit --out` made.
    """


class Diverged(RunError):
    """Raised when training ends with models far worse than those it began with; the message names a step size.

    Examples
    --------
    >>> import torch, coterie
    >>> xs, ys = [torch.ones(3, 1), torch.ones(2, 1)], [torch.ones(3), torch.ones(2)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, coterie.models.linear())
    >>> try:
    ...     coterie.fit(fed, coterie.algorithms.make("local", lr=30.0), rounds=3)
    ... except coterie.CoterieError as problem:
    ...     print(str(problem).partition("of the losses ")[2])
    is up to 1: lr = 30 is too large, at most 2 is allowed. Try --set lr=2
    """


class NotReopened(RunError):
    """Raised when no node lets more of its rows train."""


class NobodyAnswered(CoterieError):
    """Raised when every client asked in a call dropped out; the run loses that round and goes on."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest known name, or the list of all of them.

    Parameters
    ----------
    name
        What the user wrote.
    known
        The names that exist.

    Returns
    -------
    str
        A sentence that begins with a space, to be appended to an error message; empty if nothing is known.

    Examples
    --------
    >>> nearest("dito", ["ditto", "fedavg"])
    " Did you mean 'ditto'?"
    >>> nearest("svm", ["ditto", "fedavg"])
    ' Known: ditto, fedavg.'
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(known)}." if known else ""

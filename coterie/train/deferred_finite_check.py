"""Rounds on a GPU without waiting for it: whether answers are finite is checked once in many rounds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.engine.federation import Federation
from coterie.train.checkpoint import Progress

ROUNDS = 64  # at most so many between two looks
DEVICES = ["cuda"]


def rounds_ahead(fed: Federation) -> int:
    """Return how many rounds may run between two checks; 1 where a check costs nothing."""
    if not fed.runtime.capabilities.deferred_checks or fed.late is not None:
        return 1
    return ROUNDS if torch.device(fed.device).type in DEVICES else 1


def deferred_finite_check(fed: Federation, progress: Progress, go: Callable[[], None]) -> None:
    """Run `go` as if all answers were finite; if one was not, undo it and run it again with a check in every call.

    A client that answers NaN is therefore left out of the call it belongs to, as ever.

    Parameters
    ----------
    fed, progress
        The federation and its progress, which `go` changes.
    go
        Runs some rounds.
    """
    undo = _undo(fed, progress)
    problem: Exception | None = None
    with fed.runtime.unchecked() as sums:
        try:
            go()
        except Exception as raised:  # may come from a number that should have been left out
            problem = raised
    if not _all_finite(sums):
        undo()
        go()
    elif problem is not None:
        raise problem


def _undo(fed: Federation, progress: Progress) -> Callable[[], None]:
    """Return a function that puts federation and progress back to where they are now."""
    t, state, lost = progress.round, progress.state, progress.lost_rounds
    begun, put_back = fed.begun.clone(), fed.runtime.hold()
    left_out, shortened = len(fed.left_out), len(fed.shortened)

    def undo() -> None:
        progress.round, progress.state, progress.lost_rounds = t, state, lost
        fed.restore_begun(begun)
        del fed.left_out[left_out:], fed.shortened[shortened:]
        put_back()
        fed.ledger.forget_after(t)

    return undo


def _all_finite(sums: list[Tensor]) -> bool:
    return not sums or bool(torch.isfinite(torch.stack([part.double() for part in sums])).all())

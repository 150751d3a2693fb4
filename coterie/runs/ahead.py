"""Rounds on a GPU without waiting for it: whether numbers are finite is asked once in many rounds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.federation.federation import Federation
from coterie.runs.checkpoint import Progress

ROUNDS = 64  # at most so many between two looks
DEVICES = ["cuda"]


def rounds_ahead(fed: Federation) -> int:
    """How many rounds may be taken between two looks; 1 where a look costs nothing."""
    device = getattr(fed.runtime, "device", None)
    return ROUNDS if device is not None and device.type in DEVICES else 1


def unwatched(fed: Federation, progress: Progress, go: Callable[[], None]) -> None:
    """`go` takes all answers as finite; if one was not, what it did is undone and it goes again, looking each time.

    So a client that answers NaN is left out of the call it belongs to, as ever.
    """
    undo = _undo(fed, progress)
    sums = fed.runtime.unread = []
    problem: Exception | None = None
    try:
        go()
    except Exception as raised:  # may come from a number that should have been left out
        problem = raised
    finally:
        fed.runtime.unread = None
    if not _all_finite(sums):
        undo()
        go()
    elif problem is not None:
        raise problem


def _undo(fed: Federation, progress: Progress) -> Callable[[], None]:
    """Puts federation and progress back to where they are now."""
    t, state, lost = progress.round, progress.state, progress.lost_rounds
    begun, left_out, kept = fed.begun.clone(), len(fed.left_out), fed.runtime.store.held()

    def undo() -> None:
        progress.round, progress.state, progress.lost_rounds = t, state, lost
        fed.restore_begun(begun)
        del fed.left_out[left_out:]
        fed.runtime.store.columns = kept
        fed.ledger.forget_after(t)

    return undo


def _all_finite(sums: list[Tensor]) -> bool:
    return not sums or bool(torch.isfinite(torch.stack([part.double() for part in sums])).all())

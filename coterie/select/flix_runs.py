"""Run FLIX round by round from given local models or a given start, for plans, experiments and tests."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from coterie.algorithms.flix import FLIX
from coterie.engine.federation import Federation
from coterie.engine.state import State


def states(
    fed: Federation, algorithm: FLIX, rounds: int, own: Tensor | None = None, x0: Tensor | None = None
) -> Iterator[tuple[Federation, State]]:
    """Yield a copy of the federation and the state after 0, 1, ..., `rounds` rounds."""
    trial = fed.fresh()
    if own is not None:
        trial.runtime.keep("own", own)
    trial.enter_round(0, None)
    s = algorithm.start(trial)
    s = s if x0 is None else s.replace(x=x0)
    yield trial, s
    for t in range(1, rounds + 1):
        trial.enter_round(t, s)
        s = algorithm.round(trial, s, t)
        yield trial, s


def local_models(fed: Federation, algorithm: FLIX) -> Tensor:
    """Return the local model x_i of every client as the algorithm finds it, [n, d]."""
    trial, _ = next(states(fed, algorithm, 0))
    return trial.runtime.kept("own")

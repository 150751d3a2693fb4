"""What there is to see of a run while it goes on: the job writes it to `live.json`, the server's page shows it."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie._core import files
from coterie.train import private

if TYPE_CHECKING:
    from coterie.algorithms import Algorithm
    from coterie.deploy.transport import NodeCaller
    from coterie.engine.federation import Federation
    from coterie.train.history import History
    from coterie.train.run import Run

FILE = "live.json"
EVERY = 0.5  # seconds between two writes at least
MOST_POINTS = 240  # of the curve of losses


class Live:
    """Follows a run as a tracker, and writes now and then what it has seen.

    Parameters
    ----------
    job
        The job folder.
    caller
        Knows what every node was asked and answered.
    """

    def __init__(self, job: Path, caller: NodeCaller) -> None:
        self.path, self.caller = job / FILE, caller
        self.losses: dict[str, list[tuple[int, float, float, float]]] = {"validation": [], "train": []}
        self.privacy: dict[str, Any] | None = None
        self.began = self._written = -math.inf
        self._read = -1  # last round of the history

    def begin(self, fed: Federation, algorithm: Algorithm, plan: dict[str, Any]) -> None:
        """Hear that a run begins, or goes on."""
        self.began = time.monotonic()

    def scored(self, fed: Federation, t: int, history: History) -> None:
        """Hear that models were scored; remember mean, lowest and highest loss over clients."""
        for when, split, metric, value in history.blocks:
            if when <= self._read:
                continue
            known = value[value.isfinite()] if value.dim() == 1 else value.new_empty(0)
            if metric == "loss" and split in self.losses and len(known):
                curve = self.losses[split]
                curve.append((when, float(known.mean()), float(known.min()), float(known.max())))
                if len(curve) > 2 * MOST_POINTS:
                    curve[:] = thinned(curve)
        self._read = max(self._read, history.blocks[-1][0]) if history.blocks else self._read
        self.privacy = _spent(fed)

    def end(self, run: Run) -> None:
        """Hear that the run has ended."""
        self.scored(run.fed, run.deployed_round, run.history)
        self.write(run.rounds, run.rounds)

    def watch(self, t: int, rounds: int) -> None:
        """Write the file, unless that was done a moment ago."""
        if time.monotonic() - self._written >= EVERY:
            self.write(t, rounds)

    def write(self, t: int, rounds: int) -> None:
        """Write the file."""
        self._written = time.monotonic()
        files.write_json(self.path, self.seen(t, rounds))

    def seen(self, t: int, rounds: int) -> dict[str, Any]:
        """Return what is written: round, losses, privacy, and every node with its traffic."""
        split = "validation" if self.losses["validation"] else "train"
        nodes = {
            name: {**dataclasses.asdict(activity), "away": name in self.caller.away}
            for name, activity in sorted(self.caller.activity.items())
        }
        return {
            "round": t,
            "rounds": rounds,
            "seconds": round(time.monotonic() - self.began, 3),
            "losses": [
                [when, *(round(value, 6) for value in values)]
                for when, *values in thinned(self.losses[split])
            ],
            "split": split,
            "privacy": self.privacy,
            "nodes": nodes,
        }


def _spent(fed: Federation) -> dict[str, Any] | None:
    """Return the privacy that was promised, and what the run has spent of it at the client that paid most."""
    promise, costs = fed.promised, private.spent(fed)
    if promise is None:
        return None
    most = None if costs is None or not len(costs) else round(float(costs.max()), 6)
    return {"spent": most, "epsilon": promise.epsilon, "delta": promise.delta, "unit": promise.unit}


def thinned(points: list[Any], most: int = MOST_POINTS) -> list[Any]:
    """Return at most `most` of the points, evenly spread, the first and the last among them.

    Examples
    --------
    >>> thinned(list(range(7)), 4)
    [0, 2, 4, 6]
    """
    if len(points) <= most:
        return points
    return [points[round(k * (len(points) - 1) / (most - 1))] for k in range(most)]

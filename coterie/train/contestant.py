"""A run among others: it is advanced piece by piece, and stops when its rivals are better."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from coterie.algorithms import Algorithm
from coterie.engine.federation import Federation
from coterie.models.metrics import Metric
from coterie.train import rounds as loop
from coterie.train.checkpoint import Best, load
from coterie.train.rounds import Watch
from coterie.train.run import Run, metric_plan


class Contestant:
    """A run that is advanced piece by piece and deploys the best round at which it was scored.

    Parameters
    ----------
    fed, algorithm
        What to train on, and how.
    rounds
        Number of rounds in all.
    evaluate_every
        Score validation rows every so many rounds.
    metric
        What the best round goes by instead of the loss.
    together
        The best round is not its own: `mark_best` says which it is, as for the parts of a cross-fitted run.
    checkpoint
        Folder with a checkpoint to go on from.
    """

    def __init__(
        self,
        fed: Federation,
        algorithm: Algorithm,
        rounds: int,
        evaluate_every: int,
        metric: Metric | None = None,
        together: bool = False,
        checkpoint: Path | None = None,
    ) -> None:
        algorithm = algorithm.for_model(fed.model)
        self.algorithm, self.seconds = algorithm, 0.0
        self.plan = {
            "rounds": rounds,
            "evaluate_every": evaluate_every,
            "select": "best",
            "score_test": False,
            "checkpoint_every": 0,
            **metric_plan(None if metric is None else metric.name, ()),
        }
        if together:
            self.plan["select"] = "last"
        self.fed = fed.fresh()
        with self._working():
            found = None if checkpoint is None else load(checkpoint, self.fed)
            self.progress = loop.begin(self.fed, algorithm, self.plan) if found is None else found

    def advance(self, until: int, watch: Watch | None = None) -> None:
        """Train until a round; the last round of all is scored like those before it."""
        with self._working():
            loop.advance(self.fed, self.algorithm, self.progress, self.plan, until, watch=watch)
            if self.progress.round == self.plan["rounds"]:
                loop.score_end(self.fed, self.algorithm, self.progress, self.plan)

    @property
    def cost(self) -> float:
        """Return the lowest mean validation loss so far, or cost of the metric; infinite for a run that diverged."""
        return self.progress.best.loss

    def validation(self, metric: str) -> Tensor:
        """Return a validation metric [n] at the best round so far."""
        value = self.progress.history.at(self.progress.best.round, "validation", metric)
        assert value is not None
        return value

    @property
    def done(self) -> bool:
        """True if further rounds would change nothing, as for methods that solve instead of stepping."""
        return bool(getattr(self.progress.state, "done", False))

    def scores(self, at: int | None = None) -> dict[str, Tensor]:
        """Return all validation metrics [n] of a round that was scored, by default the best one so far."""
        blocks, at = self.progress.history.blocks, self.progress.best.round if at is None else at
        return {metric: value for t, split, metric, value in blocks if (t, split) == (at, "validation")}

    def mark_best(self, loss: float) -> None:
        """Take the models as they are now for the best ones."""
        with self._working():
            models = loop.deployed(self.fed, self.algorithm, self.progress)
        self.progress.best = Best(self.progress.round, loss, models, self.progress.state)

    def best_models(self) -> Tensor:
        """Return the deployed models [n, d] of the best round so far."""
        models = self.progress.best.personal
        assert models is not None
        return models

    def megabytes(self) -> float:
        """Return what was sent up and down so far, evaluation not counted."""
        return sum(self.fed.ledger.megabytes_until(self.progress.round))

    def finish(self) -> Run:
        """Deploy the best round and return the run."""
        with self._working():
            plan = {**self.plan, "select": "best"}
            run = loop.finish(self.fed, self.algorithm, self.progress, plan, time.perf_counter())
        run.seconds = self.seconds
        return run

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Choose threads, and count the time of the block: a contestant waits while others train."""
        started = time.perf_counter()
        with loop.threads_for(self.fed, self.algorithm):
            yield
        self.seconds += time.perf_counter() - started

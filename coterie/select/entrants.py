"""Who takes part in a comparison: a method at the best of its settings by validation, or the winner of a race."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from coterie._core.errors import SettingError
from coterie.algorithms import Algorithm, find
from coterie.engine.federation import Federation
from coterie.models.metrics import LOSS, Metric
from coterie.select.auto import EFFORT, choose
from coterie.select.auto_race import THIN, every, stops
from coterie.select.cross_validation import FOLDS, in_turn
from coterie.select.entrant import Entrant
from coterie.select.grid import candidates, suited, trained_by
from coterie.select.held_out import HeldOutRows
from coterie.train.contestant import Contestant
from coterie.train.history import mean_over_clients
from coterie.train.run import Run

BASELINES = ("local", "fedavg", "fine-tuned")
AUTO = "auto"  # the method and settings that a race of its own chooses

Watch = Callable[[str, int, int], None]  # what is being done, rounds done, rounds in all


class BestRun(NamedTuple):
    """The run of an entrant, and the values of rows held out in turn where methods are chosen by those."""

    run: Run
    held_out: HeldOutRows | None = None


class Tuned:
    """A method at the best of the settings it declares, by validation.

    All settings begin; after a ninth and a third of the rounds the best third goes on (successive halving, Jamieson
    and Talwalkar, 2016).
    """

    def __init__(self, method: Algorithm, budget: int, fixed: Collection[str] = ()) -> None:
        self.name, self.method = method.name, method
        self.settings = candidates(method, budget, fixed=fixed)

    def cost(self, rounds: int) -> int:
        """Return the rounds that are trained in all."""
        ends = [0, *stops(rounds)]
        counts = self._counts(len(ends) - 1)
        return sum(
            count * (stop - before)
            for count, (before, stop) in zip(counts, itertools.pairwise(ends), strict=True)
        )

    def _counts(self, heats: int) -> list[int]:
        """Return how many settings train in each heat."""
        counts = [len(self.settings)]
        while len(counts) < heats:
            counts.append(math.ceil(counts[-1] / THIN))
        return counts

    def check(self, fed: Federation) -> None:
        """Start once, so that a method that cannot run here says so before the others have trained."""
        self.method = suited(self.method, fed)
        self.settings = [*dict.fromkeys(suited(one, fed).plain(fed) for one in self.settings)]
        trial = trained_by(self.settings, fed, 1).fresh()
        trial.enter_round(0, None)
        self.method.start(trial)

    def best(
        self,
        fed: Federation,
        rounds: int,
        watch: Watch,
        metric: Metric | None = None,
        judge: Metric | None = None,
    ) -> BestRun:
        """Return the run that did best on validation rows, at the round at which it did.

        With a `judge`, its settings are trained again for as many rounds where further rows are held out in turn.
        """
        fed = trained_by(self.settings, fed, rounds)
        ends, done, total = stops(rounds), 0, self.cost(rounds)
        counts = [*self._counts(len(ends)), 1]
        field: list[tuple[Algorithm, Contestant | None]] = [(algorithm, None) for algorithm in self.settings]
        left: list[Contestant] = []
        for heat, stop in enumerate(ends):
            left = []
            for algorithm, running in field:
                one = running or Contestant(fed, algorithm, rounds, every(rounds), metric)
                before = one.progress.round

                def step(t: int, _: int, sofar: int = done - before) -> None:
                    watch("", sofar + t, total)

                one.advance(stop, step)
                done += stop - before
                left = sorted([*left, one], key=lambda one: _finite(one.cost))[: counts[heat + 1]]
            field = [(one.algorithm, one) for one in left]
        best = left[0]
        held_out = None if judge is None else _in_turn(best, fed, rounds, judge)
        return BestRun(best.finish(), held_out)


def _in_turn(best: Contestant, fed: Federation, rounds: int, judge: Metric) -> HeldOutRows | None:
    """Return the judge's values of all rows but the test rows, each held out once."""
    parts, method = [best], best.algorithm.without_stopping()
    for other in in_turn(fed)[1:]:
        part = Contestant(other, method, rounds, 0, together=True)
        part.advance(best.progress.best.round)
        part.mark_best(best.cost)
        parts.append(part)
    return Entrant(best.algorithm, parts).held_out_rows([judge])


def _finite(cost: float) -> float:
    return math.inf if math.isnan(cost) else cost


@dataclass(frozen=True)
class Raced:
    """`auto`: the method and settings that a race of its own chooses.

    In folds of a comparison it does not hold rows out in turn: folds choose apart, and the majority is deployed.
    """

    cross_fit: bool = True

    name: ClassVar[str] = AUTO

    def cost(self, rounds: int) -> int:
        """Return the rounds that the race takes at most."""
        return math.ceil(EFFORT * (1 + FOLDS * self.cross_fit) * rounds)

    def check(self, fed: Federation) -> None:
        """Do nothing: a race leaves out what cannot run here."""

    def best(
        self,
        fed: Federation,
        rounds: int,
        watch: Watch,
        metric: Metric | None = None,
        judge: Metric | None = None,
    ) -> BestRun:
        """Return the run that won the race, and what the race says of rows held out in turn."""
        choice = choose(fed, rounds, watch=watch, metric=metric, cross_fit=self.cross_fit)
        return BestRun(choice.run, choice.held_out)


def entrants(
    algorithms: Sequence[str | Algorithm],
    budget: int,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    folds: int = 1,
) -> list[Tuned | Raced]:
    """Return the baselines and what was asked for, each once; check all names before anything runs.

    `settings` are hyperparameters by method that are given, and so not tuned; `folds` those of the comparison.
    """
    given = dict(settings or {})

    def entrant(item: str | Algorithm) -> Tuned | Raced:
        if item == AUTO:
            if given.pop(AUTO, None):
                raise SettingError("auto chooses settings by itself; give none for it")
            return Raced(cross_fit=folds == 1)
        method = item if isinstance(item, Algorithm) else find(item)()
        fixed = given.pop(method.name, {})
        return Tuned(method.replace(**fixed), budget, fixed)

    asked = [entrant(item) for item in dict.fromkeys(algorithms)]
    known = {method.name for method in asked}
    if len(known) < len(asked):
        raise SettingError(f"one method twice among {[method.name for method in asked]}; give each once")
    found = [*(entrant(name) for name in BASELINES if name not in known), *asked]
    if given:
        raise SettingError(f"settings for {', '.join(given)}, which is not compared")
    return found


def validation_cost(run: Run, metric: Metric | None) -> float:
    """Return the mean validation loss over clients, or a metric's, so that lower is better."""
    judge = metric or LOSS
    return judge.cost(mean_over_clients(run.score("validation", judge.name)))

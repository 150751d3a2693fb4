"""The race behind `auto`: heats of successive halving on rows held out.

Heats of a ninth and a third of the rounds thin the field by three each (Jamieson and Talwalkar, 2016); the finalists
train to the end. The field may come in two parts, the second one chosen by what the first one's first heat showed.
Where validation rows are few, everybody trains on several divisions of the rows that are not test rows, so that each
of these rows is held out once; then choice and verdict come from cross-fitting.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from coterie._core.errors import CoterieError, SettingError
from coterie.algorithms import Algorithm
from coterie.engine.federation import Federation
from coterie.models.metrics import LOSS, Metric, main_metric, resolve
from coterie.select.auto_networks import NETWORK
from coterie.select.auto_ridge import GIVEN
from coterie.select.cross_validation import in_turn
from coterie.select.entrant import SOLVED, Entrant
from coterie.select.race_journal import Journal, Stage
from coterie.select.verdict import Verdict, row_metric
from coterie.train.history import interval

THIN = 3  # each heat keeps one in so many
HEATS = 3
SETTINGS = 2  # finalists of one method at most
DRAW = 0.002  # a method must beat a simpler one by this share of its loss
OWN_MODEL = 0.01  # one that trains a model of its own must beat those that train the given one by this share
SIMPLEST = ("local", "fedavg", "fine-tuned", "rtfa", "ftfa", "ditto")

Watch = Callable[[str, int, int], None]
More = Callable[[list[Entrant]], list[Algorithm]]


def every(rounds: int) -> int:
    """Return the number of rounds between two scores."""
    parts: int = 2 * THIN ** (HEATS - 1)
    return max(1, rounds // parts)


def stops(rounds: int) -> list[int]:
    """Return the round at which each heat ends, one that is scored."""
    step = every(rounds)
    ends = [max(step, round(rounds / THIN ** (HEATS - 1 - heat) / step) * step) for heat in range(HEATS - 1)]
    return [*(min(end, rounds) for end in ends), rounds]


def cost(places: int, methods: int, rounds: int) -> int:
    """Return how many rounds the heats of a race with so many places take at most."""
    total, left = 0, places
    for heat, (before, stop) in enumerate(itertools.pairwise([0, *stops(rounds)])):
        total += left * (stop - before)
        if heat < HEATS - 1:
            kept = math.ceil(left / THIN) + 1  # training alone may stay beside the best
            left = min(left, max(kept, methods) if heat == 0 else kept)
    return total


def _once(fed: Federation) -> list[Federation]:
    return [fed]


class Race:
    """Heats; entrants that diverge or cannot run here drop out.

    `others` are federations with the same clients and splits for methods that train a model of their own, by name.
    """

    def __init__(
        self,
        fed: Federation,
        rounds: int,
        effort: float = math.inf,
        budget_mb: float | None = None,
        budget_seconds: float | None = None,
        watch: Watch | None = None,
        metric: str | Metric | None = None,
        others: Mapping[str, Federation] | None = None,
        cross_fit: bool = True,
        journal: Journal | None = None,
    ) -> None:
        divided = in_turn if cross_fit else _once
        self.fed, self.rounds, self.feds = fed, rounds, divided(fed)
        self.limit = effort * rounds * len(self.feds)
        self.others = {name: divided(other) for name, other in (others or {}).items()}
        self.budget_mb, self.watch = budget_mb, watch
        self.ends = math.inf if budget_seconds is None else time.monotonic() + budget_seconds
        self.asked = None if metric is None else resolve(metric, fed.model.task)
        self.judge = self.asked or LOSS
        self.metric = self.asked or main_metric(fed.model.task)
        self.everybody: list[Entrant] = []
        self.finalists: list[Entrant] = []
        self.refused: list[str] = []
        self.journal, self.made = journal, 0

    def run(
        self,
        field_: Sequence[Algorithm],
        more: More | None = None,
        beside: Mapping[str, Sequence[Algorithm]] | None = None,
    ) -> Entrant:
        """Return the winner of the field, of those that `more` adds after its first heat, and of those `beside` it.

        The latter train one of the `others` by its name; a method that has the name of one trains that one.
        """
        first, *later = stops(self.rounds)
        ends = [(0, first), *([] if more is None else [(0, first)]), *enumerate(later, 1)]
        stage = None if self.journal is None else self.journal.restore(self)
        if stage is None:
            starters = [self._entrant(algorithm) for algorithm in field_]
            starters += [self._entrant(one, name) for name, some in (beside or {}).items() for one in some]
            stage = self._stage(0, *ends[0], starters)
        left = self._heat(stage)
        for number in range(stage.number + 1, len(ends)):
            if number == 1 and more is not None:
                left = [*left, *map(self._entrant, more(left))]
            left = self._heat(self._stage(number, *ends[number], left))
        self.finalists = left
        if self.judge.undefined and not any(entrant.scores for entrant in left):
            raise self.judge.undefined_error("validation")
        return self._winner()

    def _entrant(self, algorithm: Algorithm, on: str = "") -> Entrant:
        on = on or (algorithm.name if algorithm.name in self.others else "")
        self.made += 1
        return Entrant(algorithm, judge=self.judge, on=on, number=self.made)

    def _stage(self, number: int, heat: int, stop: int, starters: list[Entrant]) -> Stage:
        count = math.ceil(sum(not entrant.done for entrant in starters) / THIN)
        return Stage(number, heat, stop, starters, count)

    def _heat(self, stage: Stage) -> list[Entrant]:
        """Advance everybody up to a round and return who stays; drop at once who cannot be among the best."""
        last = stage.heat == HEATS - 1
        for entrant in stage.starters[stage.at :]:
            self._report(f"heat {stage.heat + 1}: {entrant.title}")
            go_on = not entrant.done and (not self._exhausted() or not stage.kept)
            if self._advance(entrant, stage.stop if go_on else 0):
                field_ = [*stage.kept, entrant]
                stage.kept = field_ if last else self._best_of(field_, stage.count, stage.heat)
                for loser in field_:
                    if loser not in stage.kept:
                        loser.retire()
            stage.at += 1
            if self.journal is not None:
                self.journal.note(self, stage, entrant)
        if not stage.kept:
            raise SettingError(f"none of the methods can run here. {self.refused[0]}")
        return stage.kept

    def _advance(self, entrant: Entrant, until: int) -> bool:
        """Advance an entrant; return False if the method cannot run here."""
        try:
            if not entrant.parts:
                feds = self.others.get(entrant.on, self.feds)
                entrant.start(feds, self.rounds, every(self.rounds), self.asked)
                self.everybody.append(entrant)
            entrant.advance(until)
        except CoterieError as problem:
            self.refused.append(f"{entrant.title}: {problem}")
            entrant.retire()
        return entrant.running is not None

    def _best_of(self, field_: list[Entrant], count: int, heat: int) -> list[Entrant]:
        """Return the best, and always the best settings of training alone, against which gains are told.

        After the first heat the best settings of every method stay, since some start slowly, and all settings that
        are among the best and train a model of their own, which are few and make good ensembles. Of these models the
        best settings also stay after the second heat, unless it is a network that is behind the given model. In the
        last one different methods are to meet, not many settings of one. Whoever is done stays, since that costs
        nothing.
        """
        ranked = sorted(field_, key=lambda entrant: entrant.cost)
        given = min((e.cost for e in ranked if not e.on), default=math.inf)
        place: dict[str, int] = {}
        standing = [(e, _next(place, e.title)) for e in ranked if not e.done]
        own = [e for e in ranked if e.on and (e.on != NETWORK or e.cost < given)]
        first = [e for e, k in standing if k == 0]
        sure = [e for e in first if heat == 0 or e in own or e.algorithm.name in ("local", *SOLVED)]
        most = len(ranked) if heat < HEATS - 2 else SETTINGS
        if heat == 0:
            sure += [e for e, k in standing[:count] if e.on and k > 0]
        others = [e for e, k in standing if k < most and e not in sure]
        others = others[: max(0, count - (len(sure) if heat == 0 else 0))]
        return [e for e in ranked if (e.done and e.scores) or e in sure or e in others]

    def verdict(self, winner: Entrant, alone: Entrant) -> Verdict:
        """Return the verdict on the winner against training alone, on the same rows held out.

        These are all rows but the test rows, each held out once, where there are several divisions.
        """
        task, metric = self.fed.model.task, row_metric(self.judge, self.fed.model.task)
        mine, other = (one.held_out_rows([self.judge, self.metric]) for one in (winner, alone))
        if mine is not None and other is not None:
            first, second = (one.values[metric.name].numpy() for one in (mine, other))
            client, what = mine.client.numpy(), self.held_out_name
            return Verdict.of_rows(first, second, client, self.fed.names, metric, held_out=what, task=task)
        first, second = (one.validation(self.judge.name).double().numpy() for one in (winner, alone))
        return Verdict.of_clients(first, second, self.fed.names, self.judge, task)

    @property
    def held_out_name(self) -> str:
        """What the rows are that methods are judged on."""
        return "rows held out in turn" if len(self.feds) > 1 else "validation rows"

    def _winner(self) -> Entrant:
        """Return the entrant with the lowest loss on rows held out, or the best by the metric that was asked for.

        A simpler method wins a draw: where the better one is ahead by less than `DRAW` of its loss, and by less than
        a standard error between clients. A method with a model of its own, which is not just the given one with a
        stronger penalty, must be ahead by `OWN_MODEL`.
        """
        judged = self.finalists
        lowest = min(judged, key=Entrant.held_out_cost)
        if lowest.on not in GIVEN:
            limit = lowest.held_out_cost() + OWN_MODEL * abs(lowest.held_out_cost())
            given = [e for e in judged if e.on in GIVEN and e.held_out_cost() <= limit]
            lowest = min(given, key=Entrant.held_out_cost, default=lowest)
        limit = lowest.held_out_cost() + DRAW * abs(lowest.held_out_cost())
        equal = [e for e in judged if e.scores and e.held_out_cost() <= limit and _near(lowest, e)]
        for name in SIMPLEST:
            rival = min((e for e in equal if e.title == name), key=Entrant.held_out_cost, default=None)
            if rival is not None:
                return rival
        return lowest

    def alone(self) -> Entrant | None:
        """Return the best settings of training alone in the last heat."""
        found = (e for e in self.finalists if e.title == "local" and e.scores)
        return min(found, key=lambda entrant: entrant.cost, default=None)

    def rows(self, winner: Entrant) -> list[dict[str, Any]]:
        """Return a row for each entrant, best first."""
        ranked = sorted(self.everybody, key=lambda e: (e is not winner, -e.rounds, e.cost))
        return [entrant.row() for entrant in ranked]

    def spent(self) -> int:
        """Return the number of rounds so far."""
        return sum(entrant.rounds for entrant in self.everybody)

    def megabytes(self) -> float:
        """Return the megabytes sent so far, both ways."""
        return sum(entrant.megabytes for entrant in self.everybody)

    def _exhausted(self) -> bool:
        sent = self.budget_mb is not None and self.megabytes() >= self.budget_mb
        return sent or time.monotonic() >= self.ends

    def _report(self, what: str) -> None:
        if self.watch is not None:
            done = self.spent()
            self.watch(what, done, max(done + 1, int(min(self.limit, 1 << 40))))


def clearly(better: Entrant, worse: Entrant) -> bool:
    """Return True if the judge on rows held out is better by more than chance between clients (95 %)."""
    low, _ = interval(_gain(better, worse, better.judge))
    return low is not None and low > 0


def _near(lowest: Entrant, entrant: Entrant) -> bool:
    """Return True if the judge on rows held out is worse by no more than a standard error between clients."""
    gap = _gain(lowest, entrant, entrant.judge)
    return entrant is lowest or (len(gap) > 2 and float(gap.mean()) <= float(gap.std()) / math.sqrt(len(gap)))


def _gain(one: Entrant, other: Entrant, metric: Metric) -> Tensor:
    """Return by how much each client is better off with one than with the other, on the same rows."""
    gain = metric.sign * (one.validation(metric.name) - other.validation(metric.name))
    return gain[~gain.isnan()]


def _next(count: dict[str, int], name: str) -> int:
    """Return how often the name came before."""
    count[name] = count.get(name, -1) + 1
    return count[name]

"""The race behind `auto`: heats of successive halving, then a check of the finalists on further splits.

Heats of a ninth and a third of the rounds thin the field by three each (Jamieson and Talwalkar, 2016); the finalists
train to the end. The field may come in two parts, the second one chosen by what the first one's first heat showed.
Those that validation rows cannot tell from the leader are trained again on further splits of the rows that are not
test rows, each to the round it was best at. These splits decide by loss, and a draw by simplicity: settings and rounds
were chosen on the first one, which flatters methods with many of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import CoterieError, SettingError
from coterie.algorithms import Algorithm
from coterie.engine.federation import Federation
from coterie.models.metrics import LOSS, Metric, main_metric, resolve
from coterie.select.cross_validation import can_fold, folds
from coterie.select.verdict import Verdict, row_metric
from coterie.train.contestant import Contestant
from coterie.train.history import interval, mean_over_clients

THIN = 3  # each heat keeps one in so many
HEATS = 3
FOLDS = 3  # further splits on which finalists are checked
SETTINGS = 2  # finalists of one method at most
DRAW = 0.002  # a method must beat a simpler one by this share of its loss
OWN_MODEL = 0.01  # one that trains a model of its own must beat those that train the given one by this share
SIMPLEST = ("local", "fedavg", "fine-tuned", "rtfa", "ftfa", "ditto")

Watch = Callable[[str, int, int], None]
More = Callable[["list[Entrant]"], list[Algorithm]]


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


@dataclass(frozen=True)
class HeldOutRows:
    """The value of every row held out [rows], and the client of each."""

    client: Tensor
    values: dict[str, Tensor]


@dataclass
class Entrant:
    """A method at some settings in the race; once out, only its numbers are left."""

    algorithm: Algorithm
    running: Contestant | None = None
    rounds: int = 0
    checked_rounds: int = 0
    cost: float = math.inf  # the lowest mean validation loss, or cost of another judge
    best_round: int = 0
    megabytes: float = 0.0
    scores: dict[str, Tensor] = field(default_factory=dict, repr=False)  # validation metrics [n], best round
    checks: list[dict[str, Tensor]] = field(default_factory=list, repr=False)  # the same on further splits
    rows: list[HeldOutRows] = field(default_factory=list, repr=False)  # of the checks, or of the first split
    judge: Metric = LOSS

    def advance(self, until: int) -> None:
        """Train up to a round, and note how good the best round was."""
        assert self.running is not None
        self.running.advance(until)
        self.rounds, self.cost = self.running.progress.round, self.running.cost
        self.best_round, self.megabytes = self.running.progress.best.round, self.running.megabytes()
        self.scores = self.running.scores() if math.isfinite(self.cost) else {}

    @property
    def done(self) -> bool:
        """Return True if further rounds would change nothing."""
        return self.running is not None and self.running.done

    def retire(self) -> None:
        """Forget models and scores."""
        self.running, self.scores, self.checks, self.rows = None, {}, [], []

    def validation(self, metric: str, checks: int | None = None) -> Tensor:
        """Return a metric [n] on rows held out: the mean over further splits if there were any, else the first."""
        found = self.checks[: len(self.checks) if checks is None else checks]
        return torch.stack([split[metric] for split in found or [self.scores]]).nanmean(0)

    def held_out_cost(self) -> float:
        """Return the judge's mean over clients so that lower is better; infinite for a method that diverged."""
        return self.judge.cost(self.held_out()) if self.scores else math.inf

    def held_out(self) -> float:
        """Return the judge's mean over clients."""
        return mean_over_clients(self.validation(self.judge.name))

    def row(self) -> dict[str, Any]:
        """Return the entrant's line in choice.json."""
        return {
            "method": self.algorithm.name,
            "settings": self.algorithm.settings(),
            "rounds": self.rounds,
            "checked_rounds": self.checked_rounds,
            f"validation_{self.judge.name}": self.judge.cost(self.cost) if math.isfinite(self.cost) else None,
            f"checked_{self.judge.name}": self.held_out() if self.checks else None,
            "megabytes": self.megabytes,
        }


class Race:
    """Heats and a final check; entrants that diverge or cannot run here drop out.

    `others` are federations with the same clients and splits for methods that train a model of their own, by name.
    """

    def __init__(
        self,
        fed: Federation,
        rounds: int,
        limit: float = math.inf,
        budget_mb: float | None = None,
        watch: Watch | None = None,
        metric: str | Metric | None = None,
        others: Mapping[str, Federation] | None = None,
    ) -> None:
        self.fed, self.rounds, self.limit = fed, rounds, limit
        self.others = dict(others or {})
        self.budget_mb, self.watch = budget_mb, watch
        self.asked = None if metric is None else resolve(metric, fed.model.task)
        self.judge = self.asked or LOSS
        self.metric = self.asked or main_metric(fed.model.task)
        self.everybody: list[Entrant] = []
        self.finalists: list[Entrant] = []
        self.refused: list[str] = []

    def run(self, field_: Sequence[Algorithm], more: More | None = None) -> Entrant:
        """Return the winner of the field and of those that `more` adds after the field's first heat."""
        first, *others = stops(self.rounds)
        left = self._heat(0, first, [self._entrant(algorithm) for algorithm in field_])
        if more is not None:
            left = self._heat(0, first, [*left, *map(self._entrant, more(left))])
        for heat, stop in enumerate(others, 1):
            left = self._heat(heat, stop, left)
        self.finalists = left
        if self.judge.undefined and not any(entrant.scores for entrant in left):
            raise self.judge.undefined_error("validation")
        self._check()
        return self._winner()

    def _entrant(self, algorithm: Algorithm) -> Entrant:
        return Entrant(algorithm, judge=self.judge)

    def _heat(self, heat: int, stop: int, starters: list[Entrant]) -> list[Entrant]:
        """Advance everybody up to `stop` and return who stays; drop at once who cannot be among the best."""
        last = heat == HEATS - 1
        count = math.ceil(sum(not entrant.done for entrant in starters) / THIN)
        kept: list[Entrant] = []
        for entrant in starters:
            self._report(f"heat {heat + 1}: {entrant.algorithm.name}")
            go_on = not entrant.done and (not self._exhausted() or not kept)
            if not self._advance(entrant, stop if go_on else 0):
                continue
            field_ = [*kept, entrant]
            kept = field_ if last else self._best_of(field_, count, heat)
            for loser in field_:
                if loser not in kept:
                    loser.retire()
        if not kept:
            raise SettingError(f"none of the methods can run here. {self.refused[0]}")
        return kept

    def _advance(self, entrant: Entrant, until: int) -> bool:
        """Advance an entrant; return False if the method cannot run here."""
        try:
            if entrant.running is None:
                algorithm = entrant.algorithm
                fed = self.others.get(algorithm.name, self.fed)
                entrant.running = Contestant(fed, algorithm, self.rounds, every(self.rounds), self.asked)
                self.everybody.append(entrant)
            entrant.advance(until)
        except CoterieError as problem:
            self.refused.append(f"{entrant.algorithm.name}: {problem}")
            entrant.retire()
        return entrant.running is not None

    def _best_of(self, field_: list[Entrant], count: int, heat: int) -> list[Entrant]:
        """Return the best, and always the best settings of training alone, against which gains are told.

        After the first heat the best settings of every method stay, since some start slowly, and of those that train
        a model of their own also after the second; in the last one different methods are to meet, not many settings of
        one. Whoever is done stays, since that costs nothing.
        """
        ranked = sorted(field_, key=lambda entrant: entrant.cost)
        place: dict[str, int] = {}
        standing = [(e, _next(place, e.algorithm.name)) for e in ranked if not e.done]
        always = {"local", *self.others}
        sure = [e for e, k in standing if k == 0 and (heat == 0 or e.algorithm.name in always)]
        most = len(ranked) if heat < HEATS - 2 else SETTINGS
        others = [e for e, k in standing if k < most and e not in sure]
        free = count - (len(sure) if heat == 0 else 0)
        kept = [*(e for e in ranked if e.done and e.scores), *sure, *others[: max(0, free)]]
        return sorted(kept, key=lambda entrant: entrant.cost)

    def _check(self) -> None:
        """Train those that may be the best on further splits; a split counts only if all of them had it."""
        asked = self._close()
        if len(asked) < 2 or not can_fold(self.fed):
            return
        others = (folds(fed, FOLDS) for fed in self.others.values())
        for k, (fold, *apart) in enumerate(zip(folds(self.fed, FOLDS), *others, strict=True)):
            own = dict(zip(self.others, apart, strict=True))
            found: list[tuple[Entrant, dict[str, Tensor], HeldOutRows | None]] = []
            for entrant in asked:
                if self._exhausted():
                    return
                self._report(f"check {k + 1}: {entrant.algorithm.name}")
                try:
                    found.append((entrant, *self._again(own.get(entrant.algorithm.name, fold), entrant)))
                except CoterieError as problem:
                    self.refused.append(f"{entrant.algorithm.name}, in the check: {problem}")
            for entrant, scores, rows in found:
                entrant.checks.append(scores)
                entrant.rows += [] if rows is None else [rows]
            asked = [entrant for entrant, *_ in found]

    def _again(self, fold: Federation, entrant: Entrant) -> tuple[dict[str, Tensor], HeldOutRows | None]:
        """Return validation metrics of an entrant trained on other rows, up to the round it was best at."""
        again = Contestant(fold, entrant.algorithm.without_stopping(), entrant.best_round, 0, self.asked)
        again.advance(entrant.best_round)
        entrant.checked_rounds += entrant.best_round
        entrant.megabytes += again.megabytes()
        return again.scores(), self._held_out(again)

    def _held_out(self, one: Contestant) -> HeldOutRows | None:
        """Return the validation rows of a contestant at its best round, or None where rows are elsewhere."""
        models = one.progress.best.personal
        if models is None or not can_fold(self.fed):
            return None
        values = one.fed.row_values(models, "validation", [self.judge, self.metric])
        client = torch.repeat_interleave(one.fed.rows["validation"].cpu())
        return HeldOutRows(client, {name: value.cpu() for name, value in values.items()}) if values else None

    def verdict(self, winner: Entrant, alone: Entrant) -> Verdict:
        """Return the verdict on the winner against training alone, on the same rows held out.

        These are the rows of the checks if both had them, which no setting was chosen on, else validation rows.
        """
        task, metric = self.fed.model.task, row_metric(self.judge, self.fed.model.task)
        checks = min(len(winner.rows), len(alone.rows))
        pairs = list(zip(winner.rows[:checks], alone.rows[:checks], strict=True))
        if not pairs and winner.running is not None and alone.running is not None:
            both = self._held_out(winner.running), self._held_out(alone.running)
            pairs = [(both[0], both[1])] if both[0] is not None and both[1] is not None else []
        what = "rows held out in turn" if checks else "validation rows"
        if pairs:
            mine, other = (torch.cat([pair[k].values[metric.name] for pair in pairs]).numpy() for k in (0, 1))
            client = torch.cat([pair[0].client for pair in pairs]).numpy()
            return Verdict.of_rows(mine, other, client, self.fed.names, metric, held_out=what, task=task)
        least = min(len(winner.checks), len(alone.checks))
        mine, other = (one.validation(self.judge.name, least).double().numpy() for one in (winner, alone))
        return Verdict.of_clients(mine, other, self.fed.names, self.judge, task)

    def _close(self) -> list[Entrant]:
        """Return the leader, training alone and who is not clearly worse, best first, while the rounds last."""
        ranked = sorted((e for e in self.finalists if e.scores), key=lambda entrant: entrant.cost)
        if not ranked or all(clearly(ranked[0], rival) for rival in ranked[1:]):
            return []
        leader, alone = ranked[0], self.alone()
        rivals = [e for e in ranked[1:] if e is not alone and not clearly(leader, e)]
        asked, left = [], self.limit - self.spent()
        for entrant in [leader, *([] if alone in (None, leader) else [alone]), *rivals]:
            if FOLDS * entrant.best_round <= left:
                left -= FOLDS * entrant.best_round
                asked.append(entrant)
        return asked

    def _winner(self) -> Entrant:
        """Return the entrant with the lowest loss on rows held out, or the best by the metric that was asked for.

        A simpler method wins a draw: where the better one is ahead by less than `DRAW` of its loss, and by less than
        a standard error between clients. A method with a model of its own must be ahead by `OWN_MODEL`.
        """
        judged = [entrant for entrant in self.finalists if len(entrant.checks) == self.checks]
        lowest = min(judged, key=Entrant.held_out_cost)
        if lowest.algorithm.name in self.others:
            limit = lowest.held_out_cost() + OWN_MODEL * abs(lowest.held_out_cost())
            given = [e for e in judged if e.algorithm.name not in self.others and e.held_out_cost() <= limit]
            lowest = min(given, key=Entrant.held_out_cost, default=lowest)
        limit = lowest.held_out_cost() + DRAW * abs(lowest.held_out_cost())
        equal = [e for e in judged if e.scores and e.held_out_cost() <= limit and _near(lowest, e)]
        for name in SIMPLEST:
            rival = min(
                (e for e in equal if e.algorithm.name == name), key=Entrant.held_out_cost, default=None
            )
            if rival is not None:
                return rival
        return lowest

    def alone(self) -> Entrant | None:
        """Return the best settings of training alone in the last heat."""
        found = (e for e in self.finalists if e.algorithm.name == "local" and e.scores)
        return min(found, key=lambda entrant: entrant.cost, default=None)

    @property
    def checks(self) -> int:
        """Return the number of further splits that the finalists were compared on."""
        return max(len(entrant.checks) for entrant in self.finalists)

    def rows(self, winner: Entrant) -> list[dict[str, Any]]:
        """Return a row for each entrant, best first."""
        ranked = sorted(self.everybody, key=lambda e: (e is not winner, -e.rounds, e.cost))
        return [entrant.row() for entrant in ranked]

    def spent(self) -> int:
        """Return the number of rounds so far."""
        return sum(entrant.rounds + entrant.checked_rounds for entrant in self.everybody)

    def megabytes(self) -> float:
        """Return the megabytes sent so far, both ways."""
        return sum(entrant.megabytes for entrant in self.everybody)

    def _exhausted(self) -> bool:
        return self.budget_mb is not None and self.megabytes() >= self.budget_mb

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
    checks = min(len(one.checks), len(other.checks))
    gain = metric.sign * (one.validation(metric.name, checks) - other.validation(metric.name, checks))
    return gain[~gain.isnan()]


def _next(count: dict[str, int], name: str) -> int:
    """Return how often the name came before."""
    count[name] = count.get(name, -1) + 1
    return count[name]

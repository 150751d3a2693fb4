"""`auto`: ask the advisor, race the sensible methods by successive halving on validation rows, say why.

Heats of a third, a ninth, ... of the rounds thin the field by three each (Jamieson and Talwalkar, 2016); what is left
trains to the end. Test rows are not read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import Algorithm, find
from coterie.errors import CoterieError, DataError, SettingError
from coterie.federation.federation import Federation
from coterie.models.glm import Glm
from coterie.models.metrics import HIGHER_IS_BETTER, main_metric
from coterie.runs import files
from coterie.runs.fit import Contestant
from coterie.runs.folder import RunFolder
from coterie.runs.history import interval
from coterie.runs.run import Run
from coterie.runs.tune import candidates
from coterie.theory.advisor import Advice, advise

EFFORT = 12.0  # rounds of the whole race, in units of the rounds of one run
THIN = 3  # each heat keeps one in so many
HEATS = 3
CROWD = 6  # clients from which groups among them are worth looking for
PAIRS_ELEMENTS = 1 << 24  # largest clients x parameters for which pairs are compared
ROBUST = 0.5  # a method must beat a simpler one by so many standard errors of the difference
SIMPLEST = ("local", "fedavg", "fine-tuned", "rtfa", "ftfa", "ditto")

Watch = Callable[[str, int, int], None]


@dataclass
class Choice:
    """What `choose` found: the run that won, why, how sure, and everybody who took part."""

    run: Run
    sure: bool
    why: list[str]
    rows: list[dict[str, Any]] = field(repr=False)
    advice: Advice | None = field(default=None, repr=False)

    def text(self) -> str:
        """In plain words."""
        return "\n".join(self.why)

    def json(self) -> dict[str, Any]:
        return {
            "method": self.run.algorithm.name,
            "settings": self.run.algorithm.settings(),
            "sure": self.sure,
            "why": self.why,
            "race": self.rows,
            "advice": None if self.advice is None else self.advice.json(),
        }


def choose(
    fed: Federation,
    rounds: int = 100,
    *,
    methods: Sequence[str] | None = None,
    effort: float = EFFORT,
    budget_mb: float | None = None,
    watch: Watch | None = None,
) -> Choice:
    """The method and settings with the lowest validation loss, from a race under a stated budget.

    The race spends at most `effort` times `rounds` rounds, and at most `budget_mb` megabytes where given (the heats
    are then cut short). `methods` are raced instead of those that suit the federation.
    """
    if rounds < 1 or effort < 1:
        raise SettingError(f"rounds and effort must be at least 1 (got {rounds}, {effort})")
    if not fed.has_rows("validation"):
        raise DataError("auto chooses on validation rows; build the federation with split=(0.6, 0.2, 0.2)")
    advice = _advice(fed)
    race = Race(fed, rounds, budget_mb, watch)
    race.enter(entrants(fed, methods, advice, effort, rounds))
    winner = race.run()
    why, sure = reasons(race, winner, advice)
    return Choice(winner.finish(), sure, why, race.rows(winner), advice)


def fit_chosen(
    fed: Federation,
    rounds: int,
    out: str | Path | None = None,
    *,
    score_test: bool = True,
    watch: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Run:
    """The run that won the race, saved like any other where `out` is given, with choice.json beside it."""
    if out is not None:
        RunFolder.require_free(Path(out))
    report = None if watch is None else (lambda what, done, total: watch(done, total))
    choice = choose(fed, rounds, watch=report, **options)
    run = choice.run
    if score_test and fed.has_rows("test"):
        run.score_test()
    if out is not None:
        save(choice, Path(out))
    run.choice = choice
    return run


def save(choice: Choice, out: Path) -> None:
    """The winner's run folder, and why it won."""
    run = choice.run
    plan = {"rounds": run.rounds, "evaluate_every": _every(run.rounds), "select": "best"}
    folder = RunFolder.create(
        out, run.fed, run.algorithm, {**plan, "score_test": True, "checkpoint_every": 0}
    )
    folder.finish(run)
    run.folder = folder.path
    files.write_json(out / "choice.json", choice.json())


def _advice(fed: Federation) -> Advice | None:
    """What theory says first; None where it has nothing to say about this model."""
    try:
        return advise(fed)
    except CoterieError:
        return None


def entrants(
    fed: Federation, methods: Sequence[str] | None, advice: Advice | None, effort: float, rounds: int
) -> list[Algorithm]:
    """Who takes part: the settings advised, then settings of every method in turn while the budget lasts."""
    names = list(methods) if methods is not None else _sensible(fed)
    places = 2
    while _cost(places + 1, rounds) <= effort * rounds:
        places += 1
    chosen: list[Algorithm] = [find("local")()]
    chosen += _advised(fed, advice) if advice is not None and methods is None else []
    for turn in itertools.zip_longest(*(candidates(find(name)(), places) for name in names)):
        chosen += [algorithm for algorithm in turn if algorithm is not None and algorithm not in chosen]
    return chosen[:places]


def _stops(rounds: int) -> list[int]:
    """The round at which each heat ends."""
    return [max(1, round(rounds / THIN ** (HEATS - 1 - heat))) for heat in range(HEATS)]


def _cost(places: int, rounds: int) -> int:
    """Rounds that a race of so many takes at most."""
    total, left = 0, places
    for before, stop in itertools.pairwise([0, *_stops(rounds)]):
        total += left * (stop - before)
        left = math.ceil(left / THIN) + 1  # training alone may stay beside the best
    return total


def _sensible(fed: Federation) -> list[str]:
    names = ["local", "fedavg", "fine-tuned", "ditto"]
    if fed.n >= CROWD:
        names += ["ifca"]
        if fed.n * fed.d <= PAIRS_ELEMENTS:
            names += ["cobo"]
    if fed.clusters is not None:
        names += ["oracle"]
    return names


def _advised(fed: Federation, advice: Advice) -> list[Algorithm]:
    """The methods of the survey, at the penalties it found, where they have an exact form."""
    from coterie.theory.advisor import algorithm

    if not isinstance(fed.model, Glm):
        return [advice.algorithm(fed)]
    found = [algorithm("fedavg", None, fed), algorithm("ftfa", None, fed)]
    for factor in (1.0, 0.3, 3.0):
        for method, lams in (("rtfa", advice.lam_shared), ("ridge-local", advice.lam_alone)):
            usable = lams[torch.isfinite(lams) & (lams > 0)]
            if len(usable):
                found.append(algorithm(method, factor * float(usable.median()), fed))
    return found


def _every(rounds: int) -> int:
    return max(1, rounds // (2 * THIN ** (HEATS - 1)))


class Race:
    """Heats of successive halving; contestants that diverge or cannot run here drop out."""

    def __init__(self, fed: Federation, rounds: int, budget_mb: float | None, watch: Watch | None) -> None:
        self.fed, self.rounds, self.budget_mb, self.watch = fed, rounds, budget_mb, watch
        self.everybody: list[Contestant] = []
        self.finalists: list[Contestant] = []
        self.refused: list[str] = []

    def enter(self, field_: list[Algorithm]) -> None:
        for algorithm in field_:
            try:
                self.everybody.append(Contestant(self.fed, algorithm, self.rounds, _every(self.rounds)))
            except CoterieError as problem:
                self.refused.append(f"{algorithm.name}: {problem}")
        if not self.everybody:
            raise SettingError(f"none of the methods can run here. {self.refused[0]}")

    def run(self) -> Contestant:
        left = list(self.everybody)
        stops = _stops(self.rounds)
        total = _cost(len(left), self.rounds)
        done = 0
        for heat, stop in enumerate(stops):
            for contestant in left:
                if self._exhausted():
                    break
                if self.watch is not None:
                    self.watch(f"heat {heat + 1}: {contestant.algorithm.name}", done, max(done + 1, total))
                done += stop - contestant.progress.round
                contestant.advance(stop)
            if heat < HEATS - 1:
                left = self._best_of(left, math.ceil(len(left) / THIN))
        self.finalists = left
        return self._winner(left)

    def _exhausted(self) -> bool:
        if self.budget_mb is None:
            return False
        return sum(contestant.megabytes() for contestant in self.everybody) >= self.budget_mb

    def _best_of(self, left: list[Contestant], count: int) -> list[Contestant]:
        """The best, and always the best settings of training alone, against which gains are told."""
        ranked = sorted(left, key=lambda contestant: contestant.loss)
        alone = next((c for c in ranked if c.algorithm.name == "local"), None)
        kept = ranked[:count]
        return kept if alone is None or alone in kept else [*kept, alone]

    def _winner(self, left: list[Contestant]) -> Contestant:
        """The lowest validation loss, unless a simpler method is as good as one can tell."""
        best = min(left, key=lambda contestant: contestant.loss)
        for name in SIMPLEST:
            if name == best.algorithm.name:
                break
            rival = min((c for c in left if c.algorithm.name == name), key=lambda c: c.loss, default=None)
            if rival is None:
                continue
            worse = rival.validation("loss") - best.validation("loss")
            worse = worse[~worse.isnan()]
            if len(worse) > 2 and float(worse.mean()) < ROBUST * float(worse.std()) / math.sqrt(len(worse)):
                return rival
        return best

    def alone(self) -> Contestant | None:
        """The best settings of training alone in the last heat."""
        return min(
            (c for c in self.finalists if c.algorithm.name == "local"), key=lambda c: c.loss, default=None
        )

    def rows(self, winner: Contestant) -> list[dict[str, Any]]:
        """Everybody, best first."""
        ranked = sorted(self.everybody, key=lambda c: (c is not winner, -c.progress.round, c.loss))
        return [
            {
                "method": c.algorithm.name,
                "settings": c.algorithm.settings(),
                "rounds": c.progress.round,
                "validation_loss": c.loss if math.isfinite(c.loss) else None,
                "megabytes": c.megabytes(),
            }
            for c in ranked
        ]


def reasons(race: Race, winner: Contestant, advice: Advice | None) -> tuple[list[str], bool]:
    """Why the winner, in plain words, and whether its gain over training alone is more than chance."""
    lines = [] if advice is None else [f"Theory first: {advice.verdict()}"]
    methods = dict.fromkeys(c.algorithm.name for c in race.everybody)
    spent = sum(c.progress.round for c in race.everybody)
    megabytes = sum(c.megabytes() for c in race.everybody)
    lines.append(
        f"Then a race on validation rows: {len(race.everybody)} settings of {len(methods)} methods "
        f"({', '.join(methods)}), {spent} rounds and {megabytes:.3g} MB in all."
    )
    lines += [f"Could not take part: {problem}" for problem in race.refused]
    metric = main_metric(race.fed.model.task)
    said = (
        f"Chosen: {_described(winner.algorithm)}, validation {metric} {_mean(winner.validation(metric)):.3g}"
    )
    alone = race.alone()
    best = min(race.finalists, key=lambda c: c.loss)
    if best is not winner:
        lines.append(
            f"The lowest validation loss is that of {best.algorithm.name}, {best.loss:.4g}, but "
            f"{winner.algorithm.name} with {winner.loss:.4g} is simpler and as good as one can tell."
        )
    if winner.algorithm.name == "local" or alone is None:
        others = [c for c in race.finalists if c.algorithm.name != "local"]
        return [*lines, f"{said}: every client trains alone."], all(_clear(c, winner) for c in others)
    lines.append(f"{said} against {_mean(alone.validation(metric)):.3g} for training alone.")
    lines.append(_gains(race.fed.names, winner, alone, metric))
    sure = _clear(alone, winner)
    lines.append(
        "The lower loss is more than chance between clients (95 %)."
        if sure
        else "The difference could be chance: with other validation rows another method might have won."
    )
    return lines, sure


def _described(algorithm: Algorithm) -> str:
    usual = type(algorithm)().settings()
    changed = {name: value for name, value in algorithm.settings().items() if value != usual[name]}
    told = ", ".join(
        f"{name} = {value:.3g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in changed.items()
    )
    return f"{algorithm.name} ({told})" if told else algorithm.name


def _mean(values: Tensor) -> float:
    return float(values.nanmean())


def _clear(worse: Contestant, better: Contestant) -> bool:
    """Whether one's validation loss is lower by more than chance between clients."""
    gain = worse.validation("loss") - better.validation("loss")
    low, _ = interval(gain[~gain.isnan()])
    return low is not None and low > 0


def _gains(names: list[str], winner: Contestant, alone: Contestant, metric: str) -> str:
    """Who gains and who does not, on validation rows."""
    sign = 1.0 if HIGHER_IS_BETTER[metric] else -1.0
    scale, unit = (100.0, " points") if metric == "accuracy" else (1.0, f" in {metric}")
    gain = scale * sign * (winner.validation(metric) - alone.validation(metric))
    known = ~gain.isnan()
    ahead, behind = known & (gain >= 0), known & (gain < 0)

    def amount(who: Tensor) -> str:
        values = gain[who]
        half = 1.96 * float(values.std()) / math.sqrt(len(values)) if len(values) > 2 else 0.0
        return f"{float(values.mean()):.2g}" + (f" ± {half:.1g}" if half else "") + unit

    if not behind.any():
        return f"Every client is as well off or better: {amount(ahead)} on average."
    alone_better = int(behind.sum())
    if not ahead.any():
        return f"No client's {metric} rises, although the losses fall: {amount(behind)} on average."
    who = ", ".join(name for name, is_behind in zip(names, behind.tolist(), strict=True) if is_behind)
    told = who if alone_better <= 3 else f"{alone_better} of {int(known.sum())} clients"
    verb = "is" if alone_better == 1 else "are"
    return f"{told} {verb} better off alone ({amount(behind)}); the other {int(ahead.sum())} gain {amount(ahead)}."

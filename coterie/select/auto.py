"""`auto`: ask the advisor, let the sensible methods race on validation rows, say why. Test rows are not read."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie._core import files
from coterie._core.errors import CoterieError, DataError, SettingError
from coterie.engine.federation import Federation
from coterie.models.metrics import Metric, resolve
from coterie.models.trees import Trees
from coterie.select.advice import Advice
from coterie.select.advise import advise
from coterie.select.auto_ensemble import Finalists, find_mixture
from coterie.select.auto_explain import reasons
from coterie.select.auto_field import Field, on_other_models, tree_settings
from coterie.select.auto_guard import who_keeps_its_own
from coterie.select.auto_race import Race, Watch, every
from coterie.select.guard import kept_sentence, tell_effect
from coterie.select.held_out import HeldOutRows, choosing_metric
from coterie.select.race_journal import Journal
from coterie.train.fit import refit as train_again
from coterie.train.fit import refit_plan
from coterie.train.folder import RunFolder
from coterie.train.own_models import keep_own
from coterie.train.run import Run, metric_plan
from coterie.train.save import save_run

EFFORT = 12.0  # rounds of the race on a division of the rows, in units of the rounds of one run


@dataclass
class Choice:
    """Result of `choose`.

    Attributes
    ----------
    run
        The run that won.
    sure
        Whether its gain over training alone is more than chance between clients.
    why
        The reasons, as sentences.
    rows
        Every entrant of the race with its settings, rounds and validation score.
    advice
        What the advisor said first; None where it has nothing to say about the model.
    together
        Whether the deployed round is the best one of all divisions of the rows together.
    mixture
        The weighted mean of finalists that is deployed, or None if one method is.
    held_out
        Values of the rows held out in turn; None if there was one division of the rows.
    """

    run: Run
    sure: bool
    why: list[str]
    rows: list[dict[str, Any]] = field(repr=False)
    advice: Advice | None = field(default=None, repr=False)
    together: bool = False
    mixture: Finalists | None = field(default=None, repr=False)
    held_out: HeldOutRows | None = field(default=None, repr=False)

    @property
    def guarded(self) -> list[int]:
        """Clients that keep the model they trained alone."""
        if self.mixture is not None:
            return self.mixture.own
        return [] if self.run.own is None else self.run.own.clients

    def text(self) -> str:
        """Return the reasons as text."""
        return "\n".join(self.why)

    def json(self) -> dict[str, Any]:
        """Return what choice.json holds."""
        return {
            "method": self.run.algorithm.name,
            "settings": self.run.algorithm.settings(),
            "sure": self.sure,
            "why": self.why,
            "own_models": [self.run.fed.names[k] for k in self.guarded],
            "ensemble": None if self.mixture is None else self.mixture.json(),
            "race": self.rows,
            "advice": None if self.advice is None else self.advice.json(),
        }


@dataclass
class ChosenRun(Run):
    """A run whose method `auto` chose; `choice` says why."""

    choice: Choice | None = field(default=None, repr=False)


def choose(
    fed: Federation,
    rounds: int = 100,
    *,
    methods: Sequence[str] | None = None,
    effort: float = EFFORT,
    budget_mb: float | None = None,
    budget_seconds: float | None = None,
    watch: Watch | None = None,
    metric: str | Metric | None = None,
    guard: bool = True,
    ensemble: bool = True,
    cross_fit: bool = True,
    journal: Path | None = None,
) -> Choice:
    """Choose the method and settings with the lowest loss on rows held out, by a race under a stated budget.

    Parameters
    ----------
    fed
        Federation with validation rows. Test rows are not read.
    rounds
        Rounds of a run.
    methods
        Names of the methods that race; those that suit the federation if not given.
    effort
        Rounds that the race spends at most on a division of the rows, in units of `rounds`.
    budget_mb
        Megabytes after which the race is cut short; no limit if not given.
    budget_seconds
        Seconds after which it is cut short; what is under way then is finished, and the winner may be trained again.
    watch
        Called with what is being done, rounds done and rounds in all.
    metric
        Metric that decides instead of the loss, such as 'auc'.
    guard
        Let clients keep the model of training alone if rows held out speak against the winner with a probability of
        at least 0.8.
    ensemble
        Deploy a weighted mean of finalists where it lowers the loss on rows held out by half a percent or more.
    cross_fit
        Hold all rows but the test rows out in turn where validation rows are few; each entrant then trains four times.
    journal
        Folder in which the race notes where it is: an interrupted one goes on from there.

    Returns
    -------
    Choice
        The run that won, and why.

    Examples
    --------
    >>> import torch
    >>> from coterie import Federation, models
    >>> xs = [torch.randn(30, 2) for _ in range(3)]
    >>> fed = Federation.from_arrays(xs, [x.sum(1) for x in xs], models.linear(), split=(0.6, 0.2, 0.2))
    >>> choice = choose(fed, rounds=9, methods=["fedavg"], metric="mae")
    >>> choice.run.algorithm.name in ("local", "fedavg")
    True
    """
    if rounds < 1 or effort < 1:
        raise SettingError(f"rounds and effort must be at least 1 (got {rounds}, {effort})")
    if any(budget is not None and not budget > 0 for budget in (budget_mb, budget_seconds)):
        raise SettingError("a budget of megabytes or seconds must be positive")
    if not fed.has_rows("validation"):
        raise DataError("auto chooses on validation rows; build the federation with split=(0.6, 0.2, 0.2)")
    if isinstance(fed.model, Trees):
        raise SettingError("auto lets trees race beside linear models by itself; give it a linear model")
    advice = _advice(fed)
    trees = tree_settings(fed, methods, rounds)
    others, beside = on_other_models(fed, methods, trees, rounds)
    asked = (rounds, effort, budget_mb, budget_seconds, metric, methods, cross_fit)
    noted = None if journal is None else Journal.of(journal, fed, *asked)
    race = Race(fed, rounds, effort, budget_mb, budget_seconds, watch, metric, others, cross_fit, noted)
    field_ = Field.of(fed, methods, advice, effort, rounds, trees)
    winner = race.run(field_.first, field_.more, beside)
    assert winner.running is not None
    mixture = find_mixture(race, winner, guard) if ensemble else None
    why, sure = reasons(race, winner, advice, mixture)
    together = len(race.feds) > 1
    if mixture is not None:
        run, held_out = mixture.run(fed, winner), mixture.held_out if together else None
        return Choice(run, sure, why, race.rows(winner), advice, mixture=mixture, held_out=held_out)
    held_out = winner.held_out_rows([choosing_metric(race.judge, fed.model)]) if together else None
    run = winner.running.finish()
    choice = Choice(run, sure, why, race.rows(winner), advice, together, held_out=held_out)
    clients = who_keeps_its_own(race, winner) if guard else []
    if clients:
        alone = race.alone()
        assert alone is not None and alone.running is not None
        keep_own(choice.run, alone.running.finish(), clients)
        why.append(kept_sentence([fed.names[k] for k in clients], fed.n, winner.algorithm.name))
    return choice


def fit_chosen(
    fed: Federation,
    rounds: int,
    out: str | Path | None = None,
    *,
    score_test: bool = True,
    watch: Callable[[int, int], None] | None = None,
    metrics: Sequence[str | Metric] = (),
    refit: str = "none",
    **options: Any,
) -> ChosenRun:
    """Return the run that won the race, saved like any other where `out` is given, with choice.json beside it.

    `metrics` are recorded for the winner's test rows; it is trained again on more rows as `refit` says; `options` are
    those of `choose`.
    """
    refit_plan(fed, refit)
    further = [resolve(metric, fed.model.task) for metric in metrics]
    if out is not None:
        RunFolder.require_free(Path(out))
        options["journal"] = journal = journal_of(Path(out))
    report = None if watch is None else (lambda what, done, total: watch(done, total))
    choice = choose(fed, rounds, watch=report, **options)
    run = choice.run
    run.further = tuple(dict.fromkeys([*run.further, *further]))
    if score_test and fed.has_rows("test"):
        run.score_test()
        tell_effect(run)
    train_again(run, refit)
    if out is not None:
        save(choice, Path(out))
        shutil.rmtree(journal, ignore_errors=True)
    return ChosenRun(**vars(run), choice=choice)


def journal_of(out: Path) -> Path:
    """Return where the race for a run folder notes how far it is, until the folder is written."""
    return out.with_name(f"{out.name}.race")


def save(choice: Choice, out: Path) -> None:
    """Write the winner's run folder, and why it won."""
    run = choice.run
    rounds, select = (run.deployed_round, "last") if choice.together else (run.rounds, "best")
    plan: dict[str, Any] = {"rounds": rounds, "evaluate_every": every(run.rounds), "select": select}
    plan |= {"score_test": True, "checkpoint_every": 0, **metric_plan(run.metric, run.further)}
    plan |= refit_plan(run.fed, run.refit)
    if run.own is not None:
        plan["guarded"] = True
    folder = RunFolder.create(out, run.fed, run.algorithm, plan)
    files.write_json(out / "choice.json", choice.json())
    save_run(folder, run)
    run.folder = folder.path


def _advice(fed: Federation) -> Advice | None:
    """Return the advisor's answer, or None where it has nothing to say about this model."""
    try:
        return advise(fed)
    except CoterieError:
        return None

"""An honest comparison: every method tuned alike on validation rows, test rows read once at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from coterie._core.errors import DataError, SettingError
from coterie.algorithms import Algorithm
from coterie.models.metrics import LOSS, Metric, main_metric, resolve
from coterie.models.metrics import find as find_metric
from coterie.select.comparison import ALONE, Comparison, Trial, summary_row
from coterie.select.comparison_folder import save_comparison
from coterie.select.cross_validation import can_fold, few_rows
from coterie.select.divisions import Division, divisions, federation, folds_for
from coterie.select.entrants import AUTO, BASELINES, BestRun, Raced, Tuned, Watch, entrants, validation_cost
from coterie.select.guard import can_guard, guarded_cost, let_keep_own, tell_effect, with_guard
from coterie.select.held_out import choosing_metric
from coterie.select.verdict import row_metric
from coterie.train.folder import RunFolder

if TYPE_CHECKING:
    from coterie.engine.federation import Federation

DEFAULT = (*BASELINES, "ditto")
BUDGET = 8  # settings tried per method and split


def compare(
    source: Any,
    client: str | None = None,
    target: str | None = None,
    *,
    algorithms: Sequence[str | Algorithm] = DEFAULT,
    seeds: int = 1,
    rounds: int = 100,
    budget: int = BUDGET,
    out: str | Path | None = None,
    watch: Watch | None = None,
    metric: str | Metric | None = None,
    folds: int | None = None,
    seed: int = 0,
    refit: str = "validation",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    guard: bool = False,
    **table: Any,
) -> Comparison:
    """Train alone, one model for all, fine-tuned, and the methods asked for; report per-client test metrics.

    Each method tries several settings and is scored on test rows at the settings and the round that did best on
    validation rows. Where clients have few rows this is repeated over folds, so that every row is a test row once.

    Parameters
    ----------
    source
        Table (a path or a data frame), or a federation with validation and test rows.
    client, target
        Columns of the table.
    algorithms
        Methods beside the three baselines: names, algorithms, or 'auto'.
    seeds
        Repetitions. For tables each is another split; a row that is tested again counts as one row.
    rounds
        Rounds of a run.
    budget
        Settings tried per method and split.
    out
        Folder for the results; nothing is written if not given.
    watch
        Called with what is being done, rounds done and rounds in all.
    metric
        Metric that chooses on validation rows and is reported on test rows, such as 'auc'. If not given the loss
        chooses, and the main metric of the task is reported.
    folds
        Folds in which every row is tested once; 1 for a split into training, validation and test rows. By default
        five if the median client has fewer than 20 test rows, else 1.
    seed
        Seed of splits and random draws.
    refit
        What the model that validation prefers is trained on again before it is written to `out`: 'validation' for
        training and validation rows, 'all' for all rows, 'none'.
    settings
        Hyperparameters by method that are given rather than tuned, such as {'ditto': {'lam': 0.3}}.
    guard
        Let a client keep the model that it trained alone where validation rows speak against a method with a
        probability of at least 0.8. Methods are then chosen by what clients deploy: half of the validation rows
        decides who keeps its own, and the other half scores that, in turn. `auto` always has its guard.
    **table
        Options of `Federation.from_table`.

    Returns
    -------
    Comparison
        A row per method, and the test metric of every client.

    Examples
    --------
    >>> from coterie.data import bundled
    >>> heart = bundled.path("heart_disease")
    >>> found = compare(heart, "hospital", "sick", algorithms=[], seeds=1, rounds=2, budget=1, metric="auc")
    >>> found.json()["metric"], [row["algorithm"] for row in found.rows]
    ('auc (higher is better)', ['local', 'fedavg', 'fine-tuned'])
    """
    if seeds < 1 or rounds < 1 or budget < 1:
        raise SettingError(f"seeds, rounds and budget must be at least 1 (got {seeds}, {rounds}, {budget})")
    if isinstance(metric, str):
        find_metric(metric)
    entrants(algorithms, budget, settings)  # names are checked before the table is read
    if out is not None:
        RunFolder.require_free(Path(out))
    whole = federation(source, client, target, seed, table)
    folds = folds_for(whole, folds)
    field_ = entrants(algorithms, budget, settings, folds)
    asked = None if metric is None else resolve(metric, whole.model.task)
    reported = asked or main_metric(whole.model.task)
    for entrant in field_:
        entrant.check(whole)
    meter = _Meter(watch, seeds * folds * sum(entrant.cost(rounds) for entrant in field_))
    in_turn = _chooses_in_turn(whole, field_, folds, asked)
    judge = choosing_metric(asked or LOSS, whole.model) if in_turn else None
    divided: list[tuple[Division, dict[str, BestRun]]] = []
    for division in divisions(whole, seeds, folds):
        place = f"fold {division.number + 1}" if folds > 1 else f"split {division.number + 1}"
        what = "{}, " + place if seeds * folds > 1 else "{}"
        _require_rows(division.fed)
        found: dict[str, BestRun] = {}
        for entrant in field_:
            step = meter.watch(what.format(entrant.name))
            found[entrant.name] = entrant.best(division.fed, rounds, step, asked, judge)
            meter.done += entrant.cost(rounds)
        divided.append((division, found))
    in_turn = in_turn and all(one.held_out is not None for _, found in divided for one in found.values())
    trials = [
        _scored(name, one, found[ALONE], division, reported, asked, guard, in_turn)
        for division, found in divided
        for name, one in found.items()
    ]
    comparison = Comparison(
        metric=reported.name,
        clients=whole.n,
        rows=[],
        trials=trials,
        names=whole.names,
        warnings=whole.table.warnings if whole.table is not None else [],
        folds=folds,
        seeds=seeds,
        guard=guard,
        in_turn=in_turn,
    )
    comparison.rows += [summary_row(entrant.name, comparison) for entrant in field_]
    if out is not None:
        plan = {"seeds": seeds, "folds": folds, "rounds": rounds, "budget": budget, "refit": refit}
        plan |= {"guard": True} if guard else {}
        save_comparison(Path(out), comparison, whole, plan)
    return comparison


def _chooses_in_turn(
    fed: Federation, field_: Sequence[Tuned | Raced], folds: int, asked: Metric | None
) -> bool:
    """Return True if methods are chosen by rows held out in turn.

    `auto` goes by them where validation rows are few. The others are the best of many settings and rounds on the few
    rows of one split, which flatters them beside it.
    """
    raced = any(isinstance(entrant, Raced) for entrant in field_)
    return raced and folds == 1 and few_rows(fed) and can_fold(fed) and (asked is None or asked.is_mean)


def _scored(
    name: str,
    found: BestRun,
    alone: BestRun,
    division: Division,
    reported: Metric,
    asked: Metric | None,
    guard: bool,
    in_turn: bool,
) -> Trial:
    """Return the trial of a method: its guard decided on validation rows, its scores on test rows."""
    run, judge = found.run, asked or LOSS
    _require_defined(run.score("validation", reported.name), reported, "validation")
    cost = validation_cost(run, asked)
    guarded = name == AUTO or (guard and can_guard(run, alone.run))
    if guarded and name != AUTO:
        crossed = guarded_cost(run, alone.run, judge, reported)
        cost = cost if crossed is None else crossed
        let_keep_own(run, alone.run, [(run, alone.run)], reported)
    if in_turn:
        rows, values = found.held_out, choosing_metric(judge, division.fed.model)
        assert rows is not None and alone.held_out is not None
        if guarded and name != AUTO:
            decide = row_metric(reported, division.fed.model.task)
            rows = with_guard(rows, alone.held_out, values, decide, run)
        cost = rows.cost(values, judge, division.fed.n)
    test = _require_defined(run.score_test()[reported.name], reported, "test")
    tell_effect(run)
    return Trial(name, division.number, run, cost, test, division.tested, guarded)


def _require_defined(values: Tensor, metric: Metric, split: str) -> Tensor:
    if bool(values.isnan().all()) and metric.undefined:
        raise metric.undefined_error(split)
    return values


class _Meter:
    """Counter of the rounds done over all entrants and divisions, for a progress bar."""

    def __init__(self, watch: Watch | None, total: int) -> None:
        self._report, self._total, self.done = watch, total, 0

    def watch(self, what: str) -> Watch:
        """Return a function that an entrant calls with the number of its own rounds done."""

        def step(part: str, done: int, _: int) -> None:
            if self._report is not None:
                self._report(f"{what}, {part}" if part else what, self.done + done, self._total)

        return step


def _require_rows(fed: Federation) -> None:
    """Raise `DataError` if nobody has rows to choose by, or to compare on."""
    for split in ("validation", "test"):
        if not fed.has_rows(split):
            raise DataError(
                f"no client has {split} rows left when its rows are split, so methods cannot be "
                "compared. Add rows, or give a larger share for them: --split TRAIN,VALIDATION,TEST"
            )

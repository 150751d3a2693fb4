"""Write a comparison: compare.json, tables of clients and rows, and a run of every method."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie._core import files, systems
from coterie.engine.federation import Federation
from coterie.models.metrics import find as find_metric
from coterie.select.auto_ensemble import blended
from coterie.select.auto_race import every
from coterie.select.comparison import ALONE, Comparison
from coterie.select.grid import trained_by
from coterie.select.guard import can_guard, let_keep_own, tell_effect
from coterie.train.fit import fit, refit
from coterie.train.folder import RunFolder, environment
from coterie.train.run import Run, metric_plan
from coterie.train.save import save_run

TEST_ROWS = "rows.parquet"


def save_comparison(out: Path, comparison: Comparison, whole: Federation, settings: dict[str, Any]) -> None:
    """Write compare.json, clients.parquet, rows.parquet, and a run of every method as a folder of its own.

    The model that validation prefers is refitted. All of it goes into a folder beside `out`, which takes the name when
    it is complete.
    """
    partial = out.with_name(out.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)  # what a comparison that was killed has left
    try:
        rounds, chosen = settings["rounds"], comparison.chosen()
        alone = _deployed(comparison, ALONE, whole, rounds)
        for name in dict.fromkeys(trial.algorithm for trial in comparison.trials):
            run = alone if name == ALONE else _deployed(comparison, name, whole, rounds, alone)
            if name == chosen:
                refit(run, settings["refit"])
            folder = RunFolder.create(partial / name, run.fed, run.algorithm, _plan(run))
            save_run(folder, run)
        files.write_with(partial / "clients.parquet", comparison.per_client().write_parquet)
        rows = comparison.per_row()
        if rows is not None:
            files.write_with(partial / TEST_ROWS, rows.write_parquet)
        files.write_json(partial / "environment.json", environment(whole))
        files.write_toml(partial / "config.toml", {"compare": settings})
        files.seal(partial, "compare.json", files.as_json(comparison.json()))
        systems.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _deployed(
    comparison: Comparison, name: str, whole: Federation, rounds: int, alone: Run | None = None
) -> Run:
    """Return the run of a method on the split of the federation: the first one, or a new one in place of folds.

    It has the settings that most folds chose. Its guard goes by the validation rows of all folds.
    """
    trials = comparison.of(name)
    if comparison.folds == 1:
        return trials[0].run
    votes = Counter(trial.run.algorithm for trial in trials)
    cost = {trial.run.algorithm: trial.validation_cost for trial in reversed(trials)}
    settings = min(votes, key=lambda algorithm: (-votes[algorithm], cost[algorithm]))
    first = next(trial.run for trial in trials if trial.run.algorithm == settings)
    methods = [settings] if first.blend is None else [part.algorithm for part in first.blend.parts]
    runs = [
        fit(
            trained_by([method], whole, rounds),
            method,
            rounds,
            evaluate_every=every(rounds),
            select="best",
            score_test=False,
            metric=first.metric,
            metrics=first.further,
        )
        for method in methods
    ]
    run = runs[0] if first.blend is None else blended(whole, replace(first.blend, parts=runs))
    if alone is not None and any(trial.guarded for trial in trials) and can_guard(run, alone):
        mine = zip(trials, comparison.of(ALONE), strict=True)
        pairs = [(one.run, other.run) for one, other in mine if can_guard(one.run, other.run)]
        let_keep_own(run, alone, pairs, find_metric(comparison.metric))
    run.score_test()
    tell_effect(run)
    return run


def _plan(run: Run) -> dict[str, Any]:
    """Return what `resume` needs to repeat a run of a comparison."""
    plan: dict[str, Any] = {"rounds": run.rounds, "evaluate_every": every(run.rounds), "select": "best"}
    plan |= {"score_test": True, "checkpoint_every": 0, **metric_plan(run.metric, run.further)}
    plan |= {"guarded": True} if run.own is not None else {}
    return plan | ({"refit": run.refit} if run.refit != "none" else {})

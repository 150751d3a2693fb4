"""An honest comparison: every method tuned alike on validation rows, test rows read once at the end."""

from __future__ import annotations

import functools
import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from coterie._core import files, html, systems
from coterie._core.errors import DataError, SettingError
from coterie.algorithms import Algorithm
from coterie.models.metrics import Metric, main_metric, resolve
from coterie.models.metrics import find as find_metric
from coterie.select.auto_race import every
from coterie.select.divisions import divisions, federation, folds_for
from coterie.select.entrants import BASELINES, Watch, entrants, validation_cost
from coterie.select.grid import trained_by
from coterie.select.verdict import Verdict, row_metric
from coterie.train.fit import fit, refit
from coterie.train.folder import RunFolder, environment
from coterie.train.run import Run, metric_plan
from coterie.train.save import save_run

if TYPE_CHECKING:
    import polars

    from coterie.engine.federation import Federation

DEFAULT = (*BASELINES, "ditto")
BUDGET = 8  # settings tried per method and split
ALONE, ALONE_TITLE = "local", "training alone"
BESIDE = {
    "binary": ("loss", "auc"),
    "multiclass": ("loss", "auc"),
}  # shown beside the main metric, over all rows
TEST_ROWS = "rows.parquet"


@dataclass
class Trial:
    """One method on one division of the rows, at the settings that validation chose."""

    algorithm: str
    seed: int  # number of the split or fold
    run: Run
    validation_cost: float  # mean validation loss, or cost of the metric that was asked for
    test: Tensor  # metric per client [n], NaN where a client has no test rows
    tested: Tensor  # which rows the test rows are among all


@dataclass
class Comparison:
    """Result of `compare`.

    Attributes
    ----------
    metric
        Name of the metric that is reported.
    clients
        Number of clients.
    rows
        A summary per method, as `compare --json` writes it.
    trials
        Every method on every split or fold, with its run and the test metric of each client.
    names
        Names of the clients.
    warnings
        What was noticed while the table was read.
    folds
        Number of folds in which every row was tested once; 1 for a split.
    seeds
        Number of splits, or of repetitions of the folds.
    """

    metric: str
    clients: int
    rows: list[dict[str, Any]]
    trials: list[Trial] = field(repr=False)
    names: list[str] = field(repr=False)
    warnings: list[str] = field(default_factory=list)
    folds: int = 1
    seeds: int = 1

    @property
    def task(self) -> str:
        """Kind of target."""
        return self.trials[0].run.fed.model.task

    @property
    def row_metric(self) -> Metric:
        """Metric that single rows are compared by."""
        return row_metric(find_metric(self.metric), self.task)

    def json(self) -> dict[str, Any]:
        """Return what `compare --json` writes."""
        return {
            "metric": f"{self.metric} ({find_metric(self.metric).direction})",
            "gains": self.row_metric.name,
            "clients": self.clients,
            "folds": self.folds,
            "seeds": self.seeds,
            "chosen": self.chosen(),
            "verdict": self.verdict(),
            "rows": self.rows,
        }

    def of(self, algorithm: str) -> list[Trial]:
        """Return the trials of a method."""
        return [trial for trial in self.trials if trial.algorithm == algorithm]

    def against_alone(self, algorithm: str) -> Verdict:
        """Return the verdict on a method against training alone, from the same test rows.

        Parameters
        ----------
        algorithm
            Name of a method of the comparison.

        Returns
        -------
        Verdict
        """
        if algorithm not in self._verdicts:
            self._verdicts[algorithm] = self._judged(algorithm)
        return self._verdicts[algorithm]

    @functools.cached_property
    def _verdicts(self) -> dict[str, Verdict]:
        return {}

    def _judged(self, algorithm: str) -> Verdict:
        metric = self.row_metric
        both = list(zip(self.of(algorithm), self.of(ALONE), strict=True))
        if all(metric.name in trial.run.test_rows for pair in both for trial in pair):
            first, second = (
                np.concatenate([pair[k].run.test_rows[metric.name].numpy() for pair in both]) for k in (0, 1)
            )
            clients = [torch.repeat_interleave(mine.run.fed.rows["test"].cpu()) for mine, _ in both]
            row = np.concatenate([mine.tested.cpu().numpy() for mine, _ in both])
            return Verdict.of_rows(
                first, second, torch.cat(clients).numpy(), self.names, metric, row, task=self.task
            )
        mine, alone = (
            torch.stack([pair[k].test for pair in both]).nanmean(0).double().numpy() for k in (0, 1)
        )
        return Verdict.of_clients(mine, alone, self.names, find_metric(self.metric), self.task)

    def per_client(self) -> polars.DataFrame:
        """Return a table with the columns algorithm, seed (the split or fold), client and the test metric."""
        import polars

        return polars.DataFrame(
            [
                (trial.algorithm, trial.seed, name, value)
                for trial in self.trials
                for name, value in zip(self.names, trial.test.tolist(), strict=True)
                if not math.isnan(value)
            ],
            schema={"algorithm": str, "seed": int, "client": str, self.metric: float},
            orient="row",
        )

    def per_row(self) -> polars.DataFrame | None:
        """Return the value of every test row by every `method/metric`; None where rows are not in this process."""
        import polars

        alone = self.of(ALONE)
        known = [set(trial.run.test_rows) for trial in self.trials]
        metrics = [
            name
            for name in dict.fromkeys((self.row_metric.name, self.metric))
            if all(name in one for one in known)
        ]
        if not metrics:
            return None
        clients = [torch.repeat_interleave(trial.run.fed.rows["test"].cpu()) for trial in alone]
        names = dict.fromkeys(trial.algorithm for trial in self.trials)
        return polars.DataFrame(
            {
                "client": torch.cat(clients).numpy(),
                "row": torch.cat([trial.tested.cpu() for trial in alone]).numpy(),
                **{
                    f"{name}/{metric}": torch.cat(
                        [trial.run.test_rows[metric] for trial in self.of(name)]
                    ).numpy()
                    for name in names
                    for metric in metrics
                },
            }
        )

    def chosen(self) -> str:
        """Return the method that validation prefers, on average over splits."""
        return min(self._costs(), key=self._costs().__getitem__)

    def _costs(self) -> dict[str, float]:
        return {row["algorithm"]: row["validation_cost"] for row in self.rows}

    def verdict(self) -> str:
        """Say whether collaborating helps, and for whom, as far as the test rows allow."""
        costs, chosen = self._costs(), self.chosen()
        if chosen != ALONE:
            said = self.against_alone(chosen).sentence(chosen, ALONE_TITLE)
            return f"Validation rows prefer {chosen}. {said}"
        others = {name: cost for name, cost in costs.items() if name != ALONE}
        best = min(others, key=others.__getitem__)
        said = self.against_alone(best).sentence(best, ALONE_TITLE)
        return f"Validation rows prefer training alone; next is {best}. {said}"

    def _repr_html_(self) -> str:
        """Return a row per method and the verdict as HTML, for notebooks."""
        shown = [
            [
                row["algorithm"],
                f"{row['mean']:.4g}",
                f"{row['worst']:.4g}",
                *(["", ""] if row["algorithm"] == ALONE else _percents(row)),
            ]
            for row in self.rows
        ]
        headers = ["method", f"mean test {self.metric}", "worst client", "better off", "worse off"]
        return html.paragraph(self.verdict()) + html.table(headers, shown)


def _percents(row: dict[str, Any]) -> list[str]:
    return [f"{row[name]:.0f} %" for name in ("improved", "harmed")]


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
    field_ = entrants(algorithms, budget, settings)
    if out is not None:
        RunFolder.require_free(Path(out))
    whole = federation(source, client, target, seed, table)
    folds = folds_for(whole, folds)
    asked = None if metric is None else resolve(metric, whole.model.task)
    reported = asked or main_metric(whole.model.task)
    for entrant in field_:
        entrant.check(whole)
    trials: list[Trial] = []
    meter = _Meter(watch, seeds * folds * sum(entrant.cost(rounds) for entrant in field_))
    for division in divisions(whole, seeds, folds):
        place = f"fold {division.number + 1}" if folds > 1 else f"split {division.number + 1}"
        what = "{}, " + place if seeds * folds > 1 else "{}"
        _require_rows(division.fed)
        for entrant in field_:
            run = entrant.best(division.fed, rounds, meter.watch(what.format(entrant.name)), asked)
            meter.done += entrant.cost(rounds)
            _require_defined(run.score("validation", reported.name), reported, "validation")
            test = _require_defined(run.score_test()[reported.name], reported, "test")
            cost = validation_cost(run, asked)
            trials.append(Trial(entrant.name, division.number, run, cost, test, division.tested))
    comparison = Comparison(
        metric=reported.name,
        clients=whole.n,
        rows=[],
        trials=trials,
        names=whole.names,
        warnings=whole.table.warnings if whole.table is not None else [],
        folds=folds,
        seeds=seeds,
    )
    comparison.rows += [_row(entrant.name, comparison) for entrant in field_]
    if out is not None:
        plan = {"seeds": seeds, "folds": folds, "rounds": rounds, "budget": budget, "refit": refit}
        _save(Path(out), comparison, whole, plan)
    return comparison


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


def _row(name: str, comparison: Comparison) -> dict[str, Any]:
    """Return the summary of one method; gains are those of the verdict against training alone."""
    mine, metric = comparison.of(name), find_metric(comparison.metric)
    by_split = torch.stack([trial.test for trial in mine])
    value = by_split.nanmean(0)
    value = value[~value.isnan()]
    split_means = by_split.nanmean(1)
    traffic = [trial.run.traffic() for trial in mine]
    quartiles = torch.quantile(value, torch.tensor([0.25, 0.5, 0.75], dtype=value.dtype)).tolist()
    verdict = comparison.against_alone(name)
    rows, clients = verdict.by_rows, verdict.by_clients
    beside = dict.fromkeys((metric.name, *BESIDE.get(comparison.task, ())))
    return {
        "algorithm": name,
        "validation_cost": sum(trial.validation_cost for trial in mine) / len(mine),
        "mean": float(value.mean()),
        "sd": float(split_means.std()) if len(mine) > 1 else 0.0,
        "worst": float(value.min() if metric.higher_is_better else value.max()),
        "q25": quartiles[0],
        "median": quartiles[1],
        "q75": quartiles[2],
        "over_rows": {one: _pooled(mine, one) for one in beside},
        "improved": 100.0 * verdict.improved / verdict.known,
        "harmed": 100.0 * verdict.harmed / verdict.known,
        "gain": rows.value,
        "gain_low": rows.low,
        "gain_high": rows.high,
        "client_gain": clients.value,
        "client_gain_low": clients.low,
        "client_gain_high": clients.high,
        "rounds": sum(trial.run.deployed_round for trial in mine) / len(mine),
        "mb_up": sum(up for up, _ in traffic) / len(mine),
        "mb_down": sum(down for _, down in traffic) / len(mine),
        "seconds": sum(trial.run.seconds for trial in mine) / len(mine),
    }


def _pooled(trials: list[Trial], metric: str) -> float | None:
    """Return a metric over the test rows of all clients, the mean over splits; None where it is not defined."""
    values = [trial.run.pooled("test", metric) for trial in trials]
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else None


def _save(out: Path, comparison: Comparison, whole: Federation, settings: dict[str, Any]) -> None:
    """Write compare.json, clients.parquet, rows.parquet, and a run of every method as a folder of its own.

    The model that validation prefers is refitted. All of it goes into a folder beside `out`, which takes the name when
    it is complete.
    """
    partial = out.with_name(out.name + ".tmp")
    try:
        for name in dict.fromkeys(trial.algorithm for trial in comparison.trials):
            run = _deployed(comparison, name, whole, settings["rounds"])
            if name == comparison.chosen():
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


def _deployed(comparison: Comparison, name: str, whole: Federation, rounds: int) -> Run:
    """Return the run of a method on the split of the federation: the first one, or a new one in place of folds.

    It has the settings that most folds chose.
    """
    trials = comparison.of(name)
    if comparison.folds == 1:
        return trials[0].run
    votes = Counter(trial.run.algorithm for trial in trials)
    cost = {trial.run.algorithm: trial.validation_cost for trial in reversed(trials)}
    settings = min(votes, key=lambda algorithm: (-votes[algorithm], cost[algorithm]))
    run = trials[0].run
    return fit(
        trained_by([settings], whole, rounds),
        settings,
        rounds,
        evaluate_every=every(rounds),
        select="best",
        metric=run.metric,
        metrics=run.further,
    )


def _require_rows(fed: Federation) -> None:
    """Raise `DataError` if nobody has rows to choose by, or to compare on."""
    for split in ("validation", "test"):
        if not fed.has_rows(split):
            raise DataError(
                f"no client has {split} rows left when its rows are split, so methods cannot be "
                "compared. Add rows, or give a larger share for them: --split TRAIN,VALIDATION,TEST"
            )


def _plan(run: Run) -> dict[str, Any]:
    """Return what `resume` needs to repeat a run of a comparison."""
    plan: dict[str, Any] = {"rounds": run.rounds, "evaluate_every": every(run.rounds), "select": "best"}
    plan |= {"score_test": True, "checkpoint_every": 0, **metric_plan(run.metric, run.further)}
    return plan | ({"refit": run.refit} if run.refit != "none" else {})

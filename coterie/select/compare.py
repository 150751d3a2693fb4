"""An honest comparison: every method tuned alike on validation rows, test rows read once at the end."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie._core import files, html
from coterie._core.errors import DataError, SettingError
from coterie.algorithms import Algorithm, find
from coterie.engine.federation import Federation
from coterie.models.metrics import LOSS, Metric, main_metric, resolve
from coterie.models.metrics import find as find_metric
from coterie.select.auto import EFFORT, choose
from coterie.select.grid import candidates
from coterie.train.fit import fit
from coterie.train.folder import RunFolder, environment
from coterie.train.history import interval, mean_over_clients
from coterie.train.run import Run, metric_plan
from coterie.train.save import save_run

if TYPE_CHECKING:
    import polars

BASELINES = ("local", "fedavg", "fine-tuned")
DEFAULT = (*BASELINES, "ditto")
BUDGET = 8  # settings tried per method and seed

AUTO = "auto"  # the method and settings that a race of its own chooses

Watch = Callable[[str, int, int], None]  # what is being done, rounds done, rounds in all


@dataclass
class Trial:
    """One method on one seed, at the settings that validation chose."""

    algorithm: str
    seed: int
    run: Run
    validation_cost: float  # mean validation loss, or cost of the metric that was asked for
    test: Tensor  # metric per client [n], NaN where a client has no test rows


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
        Every method on every seed, with its run and the test metric of each client.
    names
        Names of the clients.
    warnings
        What was noticed while the table was read.
    """

    metric: str
    clients: int
    rows: list[dict[str, Any]]
    trials: list[Trial] = field(repr=False)
    names: list[str] = field(repr=False)
    warnings: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        """Return what `compare --json` writes."""
        return {
            "metric": f"{self.metric} ({find_metric(self.metric).direction})",
            "clients": self.clients,
            "rows": self.rows,
        }

    def per_client(self) -> polars.DataFrame:
        """Return a table with the columns algorithm, seed, client and the test metric."""
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

    def chosen(self) -> str:
        """Return the method that validation prefers, on average over seeds."""
        costs: dict[str, list[float]] = {}
        for trial in self.trials:
            costs.setdefault(trial.algorithm, []).append(trial.validation_cost)
        return min(costs, key=lambda name: sum(costs[name]) / len(costs[name]))

    def verdict(self) -> str:
        """Say in one sentence whether collaborating helps."""
        row = next(row for row in self.rows if row["algorithm"] == self.chosen())
        if row["algorithm"] == "local":
            return (
                "Validation prefers training alone: no method that collaborates did better for these clients."
            )
        gain = (
            f"{row['improved']:.0f} % of the clients are better off on test rows, {row['harmed']:.0f} % worse"
        )
        if row["gain_low"] is None:
            return f"Validation prefers {row['algorithm']}; against training alone {gain}."
        low, high = self._signed(row["gain_low"]), self._signed(row["gain_high"])
        interval = f"mean gain in {self.metric} {low} to {high} (95 % interval)"
        sure = "" if row["gain_low"] > 0 else ", so the gain is not certain"
        return f"Validation prefers {row['algorithm']}; against training alone {gain}; {interval}{sure}."

    def _repr_html_(self) -> str:
        """Return a row per method and the verdict as HTML, for notebooks."""
        shown = [
            [
                row["algorithm"],
                f"{row['mean']:.4g} ± {row['sd']:.2g}",
                f"{row['worst']:.4g}",
                *(["", ""] if row["algorithm"] == "local" else _percents(row)),
            ]
            for row in self.rows
        ]
        headers = ["method", f"mean test {self.metric}", "worst client", "improved", "harmed"]
        return html.paragraph(self.verdict()) + html.table(headers, shown)

    def _signed(self, gain: float) -> str:
        if find_metric(self.metric).percent or 0.1 <= abs(gain) < 1000:
            return f"{gain:+.3f}"
        return f"{gain:+.0f}" if abs(gain) >= 1 else f"{gain:+.3g}"


def _percents(row: dict[str, Any]) -> list[str]:
    return [f"{row[name]:.0f} %" for name in ("improved", "harmed")]


def compare(
    source: Any,
    client: str | None = None,
    target: str | None = None,
    *,
    algorithms: Sequence[str | Algorithm] = DEFAULT,
    seeds: int = 3,
    rounds: int = 100,
    budget: int = BUDGET,
    out: str | Path | None = None,
    watch: Watch | None = None,
    metric: str | Metric | None = None,
    **table: Any,
) -> Comparison:
    """Train alone, one model for all, fine-tuned, and the methods asked for; report per-client test metrics.

    Each method tries several settings per seed and is scored on test rows at the settings and the round that did best
    on validation rows.

    Parameters
    ----------
    source
        Table (a path or a data frame), or a federation with validation and test rows.
    client, target
        Columns of the table.
    algorithms
        Methods beside the three baselines: names, algorithms, or 'auto'.
    seeds
        Repetitions. For tables each is another split.
    rounds
        Rounds of a run.
    budget
        Settings tried per method and seed.
    out
        Folder for the results; nothing is written if not given.
    watch
        Called with what is being done, rounds done and rounds in all.
    metric
        Metric that chooses on validation rows and is reported on test rows, such as 'auc'. If not given the loss
        chooses, and the main metric of the task is reported.
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
    entrants = _entrants(algorithms, budget)
    if out is not None:
        RunFolder.require_free(Path(out))
    trials: list[Trial] = []
    meter = _Meter(watch, seeds * sum(entrant.cost(rounds) for entrant in entrants))
    for seed, fed in enumerate(_federations(source, client, target, seeds, table)):
        asked = None if metric is None else resolve(metric, fed.model.task)
        reported = asked or main_metric(fed.model.task)
        if seed == 0:
            for entrant in entrants:
                entrant.check(fed)
        for entrant in entrants:
            run = entrant.best(fed, rounds, meter.watch(f"{entrant.name}, seed {seed}"), asked)
            meter.done += entrant.cost(rounds)
            _require_defined(run.score("validation", reported.name), reported, "validation")
            test = _require_defined(run.score_test()[reported.name], reported, "test")
            trials.append(Trial(entrant.name, seed, run, validation_cost(run, asked), test))
    fed = trials[0].run.fed
    comparison = Comparison(
        metric=reported.name,
        clients=fed.n,
        rows=[_row(name, trials, reported) for name in dict.fromkeys(trial.algorithm for trial in trials)],
        trials=trials,
        names=fed.names,
        warnings=fed.table.warnings if fed.table is not None else [],
    )
    if out is not None:
        _save(Path(out), comparison, {"seeds": seeds, "rounds": rounds, "budget": budget})
    return comparison


def validation_cost(run: Run, metric: Metric | None) -> float:
    """Return the mean validation loss over clients, or a metric's, so that lower is better."""
    judge = metric or LOSS
    return judge.cost(mean_over_clients(run.score("validation", judge.name)))


def _require_defined(values: Tensor, metric: Metric, split: str) -> Tensor:
    if bool(values.isnan().all()) and metric.undefined:
        raise metric.undefined_error(split)
    return values


class Tuned:
    """A method at the best of the settings it declares, by validation."""

    def __init__(self, method: Algorithm, budget: int) -> None:
        self.name, self.method, self.settings = method.name, method, candidates(method, budget)

    def cost(self, rounds: int) -> int:
        """Return the rounds that are trained in all."""
        return len(self.settings) * rounds

    def check(self, fed: Federation) -> None:
        """Start once, so that a method that cannot run here says so before the others have trained."""
        trial = fed.fresh()
        trial.enter_round(0, None)
        self.method.start(trial)

    def best(self, fed: Federation, rounds: int, watch: Watch, metric: Metric | None = None) -> Run:
        """Return the run that did best on validation rows."""
        best: Run | None = None
        lowest = math.inf
        for k, candidate in enumerate(self.settings):

            def step(t: int, _: int, before: int = k * rounds) -> None:
                watch("", before + t, self.cost(rounds))

            run = fit(fed, candidate, rounds, select="best", score_test=False, watch=step, metric=metric)
            cost = validation_cost(run, metric)
            if best is None or cost < lowest or math.isnan(lowest):
                best, lowest = run, cost
        assert best is not None
        return best


class Raced:
    """`auto`: the method and settings that a race of its own chooses."""

    name = AUTO

    def cost(self, rounds: int) -> int:
        """Return the rounds that the race takes at most."""
        return math.ceil(EFFORT * rounds)

    def check(self, fed: Federation) -> None:
        """Do nothing: a race leaves out what cannot run here."""

    def best(self, fed: Federation, rounds: int, watch: Watch, metric: Metric | None = None) -> Run:
        """Return the run that won the race."""
        return choose(fed, rounds, watch=watch, metric=metric).run


def _entrants(algorithms: Sequence[str | Algorithm], budget: int) -> list[Tuned | Raced]:
    """Return the baselines and what was asked for, each once; check all names before anything runs."""

    def entrant(item: str | Algorithm) -> Tuned | Raced:
        if item == AUTO:
            return Raced()
        return Tuned(item if isinstance(item, Algorithm) else find(item)(), budget)

    asked = [entrant(item) for item in dict.fromkeys(algorithms)]
    known = {method.name for method in asked}
    if len(known) < len(asked):
        raise SettingError(f"one method twice among {[method.name for method in asked]}; give each once")
    return [*(entrant(name) for name in BASELINES if name not in known), *asked]


def _federations(
    source: Any, client: str | None, target: str | None, seeds: int, table: dict[str, Any]
) -> Iterator[Federation]:
    if isinstance(source, Federation):
        for split in ("validation", "test"):
            if not source.has_rows(split):
                raise DataError(
                    f"a comparison needs {split} rows; build the federation with split=(0.6, 0.2, 0.2)"
                )
        yield from (source.fresh(seed) for seed in range(seeds))
        return
    if client is None or target is None:
        raise SettingError("compare needs the names of the client and target columns")
    for seed in range(seeds):
        fed = Federation.from_table(source, client=client, target=target, seed=seed, **table)
        for split in ("validation", "test"):
            if not fed.has_rows(split):
                raise DataError(
                    f"{source}: no client has enough rows for {split} rows; five or more each are needed"
                )
        yield fed


class _Meter:
    """Counter of the rounds done over all entrants and seeds, for a progress bar."""

    def __init__(self, watch: Watch | None, total: int) -> None:
        self._report, self._total, self.done = watch, total, 0

    def watch(self, what: str) -> Watch:
        """Return a function that an entrant calls with the number of its own rounds done."""

        def step(part: str, done: int, _: int) -> None:
            if self._report is not None:
                self._report(f"{what}, {part}" if part else what, self.done + done, self._total)

        return step


def _row(name: str, trials: list[Trial], metric: Metric) -> dict[str, Any]:
    """Return the summary of one method; gains are paired by client and averaged over seeds."""
    mine = [trial for trial in trials if trial.algorithm == name]
    by_seed = torch.stack([trial.test for trial in mine])
    alone = torch.stack([trial.test for trial in trials if trial.algorithm == "local"])
    scored = ~(by_seed.isnan() | alone.isnan()).all(0)
    value = by_seed.nanmean(0)[scored]
    gain = metric.sign * (by_seed - alone).nanmean(0)[scored]
    low, high = interval(gain) if name != "local" else (0.0, 0.0)
    seed_means = by_seed.nanmean(1)
    traffic = [trial.run.traffic() for trial in mine]
    quartiles = torch.quantile(value, torch.tensor([0.25, 0.5, 0.75], dtype=value.dtype)).tolist()
    return {
        "algorithm": name,
        "mean": float(value.mean()),
        "sd": float(seed_means.std()) if len(mine) > 1 else 0.0,
        "worst": float(value.min() if metric.higher_is_better else value.max()),
        "q25": quartiles[0],
        "median": quartiles[1],
        "q75": quartiles[2],
        "improved": 100.0 * float((gain > 0).double().mean()),
        "harmed": 100.0 * float((gain < 0).double().mean()),
        "gain_low": low,
        "gain_high": high,
        "rounds": sum(trial.run.deployed_round for trial in mine) / len(mine),
        "mb_up": sum(up for up, _ in traffic) / len(mine),
        "mb_down": sum(down for _, down in traffic) / len(mine),
        "seconds": sum(trial.run.seconds for trial in mine) / len(mine),
    }


def _save(out: Path, comparison: Comparison, settings: dict[str, Any]) -> None:
    """Write compare.json, clients.parquet, and the first seed's run of every method as a folder of its own.

    All of it goes into a folder beside `out`, which takes the name when it is complete.
    """
    partial = out.with_name(out.name + ".tmp")
    try:
        for trial in comparison.trials:
            if trial.seed == 0:
                run = trial.run
                folder = RunFolder.create(partial / trial.algorithm, run.fed, run.algorithm, _plan(run))
                save_run(folder, run)
        files.write_with(partial / "clients.parquet", comparison.per_client().write_parquet)
        files.write_json(partial / "environment.json", environment(comparison.trials[0].run.fed))
        files.write_toml(partial / "config.toml", {"compare": settings})
        files.seal(partial, "compare.json", files.as_json(comparison.json()))
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _plan(run: Run) -> dict[str, Any]:
    """Return what `resume` needs to repeat a run of a comparison."""
    every = max(1, run.rounds // 20)
    plan = {"rounds": run.rounds, "evaluate_every": every, "select": "best"}
    return {**plan, "score_test": True, "checkpoint_every": 0, **metric_plan(run.metric, run.further)}

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

from coterie.algorithms import Algorithm, find
from coterie.errors import DataError, SettingError
from coterie.federation.federation import Federation
from coterie.models.metrics import HIGHER_IS_BETTER, main_metric
from coterie.runs import files
from coterie.runs.auto import EFFORT, choose
from coterie.runs.fit import fit
from coterie.runs.folder import RunFolder, environment
from coterie.runs.history import interval, mean_over_clients
from coterie.runs.run import Run
from coterie.runs.tune import candidates

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
    validation_loss: float
    test: Tensor  # main metric per client, NaN where a client has no test rows


@dataclass
class Comparison:
    """Rows as in `compare --json`, and the test metric of every client behind them."""

    metric: str
    clients: int
    rows: list[dict[str, Any]]
    trials: list[Trial] = field(repr=False)
    names: list[str] = field(repr=False)
    warnings: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        direction = "higher" if HIGHER_IS_BETTER[self.metric] else "lower"
        return {
            "metric": f"{self.metric} ({direction} is better)",
            "clients": self.clients,
            "rows": self.rows,
        }

    def per_client(self) -> polars.DataFrame:
        """algorithm, seed, client, test metric."""
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
        """The method with the lowest validation loss, averaged over seeds."""
        losses: dict[str, list[float]] = {}
        for trial in self.trials:
            losses.setdefault(trial.algorithm, []).append(trial.validation_loss)
        return min(losses, key=lambda name: sum(losses[name]) / len(losses[name]))

    def verdict(self) -> str:
        """One sentence: does collaborating help?"""
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

    def _signed(self, gain: float) -> str:
        if self.metric == "accuracy" or 0.1 <= abs(gain) < 1000:
            return f"{gain:+.3f}"
        return f"{gain:+.0f}" if abs(gain) >= 1 else f"{gain:+.3g}"


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
    **table: Any,
) -> Comparison:
    """Train alone, one model for all, fine-tuned, and the methods asked for; report per-client test metrics.

    `source` is a table (with `client` and `target` columns and the options of `Federation.from_table`) or a
    federation with validation and test rows. Each method tries `budget` settings per seed and is scored at
    the settings and the round with the lowest mean validation loss. For tables each seed is another split.
    """
    if seeds < 1 or rounds < 1 or budget < 1:
        raise SettingError(f"seeds, rounds and budget must be at least 1 (got {seeds}, {rounds}, {budget})")
    entrants = _entrants(algorithms, budget)
    if out is not None:
        RunFolder.require_free(Path(out))
    trials: list[Trial] = []
    meter = _Meter(watch, seeds * sum(entrant.cost(rounds) for entrant in entrants))
    for seed, fed in enumerate(_federations(source, client, target, seeds, table)):
        if seed == 0:
            for entrant in entrants:
                entrant.check(fed)
        for entrant in entrants:
            run = entrant.best(fed, rounds, meter.watch(f"{entrant.name}, seed {seed}"))
            meter.done += entrant.cost(rounds)
            loss = mean_over_clients(run.score("validation", "loss"))
            test = run.score_test()[main_metric(fed.model.task)]
            trials.append(Trial(entrant.name, seed, run, loss, test))
    fed = trials[0].run.fed
    comparison = Comparison(
        metric=main_metric(fed.model.task),
        clients=fed.n,
        rows=[_row(name, trials) for name in dict.fromkeys(trial.algorithm for trial in trials)],
        trials=trials,
        names=fed.names,
        warnings=fed.table.warnings if fed.table is not None else [],
    )
    if out is not None:
        _save(Path(out), comparison, {"seeds": seeds, "rounds": rounds, "budget": budget})
    return comparison


class Tuned:
    """A method at the best, by validation loss, of the settings it declares."""

    def __init__(self, method: Algorithm, budget: int) -> None:
        self.name, self.method, self.settings = method.name, method, candidates(method, budget)

    def cost(self, rounds: int) -> int:
        """Rounds that are trained in all."""
        return len(self.settings) * rounds

    def check(self, fed: Federation) -> None:
        """Start once: a method that cannot run here says so before the others have trained."""
        trial = fed.fresh()
        trial.enter_round(0, None)
        self.method.start(trial)

    def best(self, fed: Federation, rounds: int, watch: Watch) -> Run:
        best: Run | None = None
        lowest = math.inf
        for k, candidate in enumerate(self.settings):

            def step(t: int, _: int, before: int = k * rounds) -> None:
                watch("", before + t, self.cost(rounds))

            run = fit(fed, candidate, rounds, select="best", score_test=False, watch=step)
            loss = mean_over_clients(run.score("validation", "loss"))
            if best is None or loss < lowest or math.isnan(lowest):
                best, lowest = run, loss
        assert best is not None
        return best


class Raced:
    """`auto`: the method and settings that a race of its own chooses."""

    name = AUTO

    def cost(self, rounds: int) -> int:
        return math.ceil(EFFORT * rounds)

    def check(self, fed: Federation) -> None:
        """A race leaves out what cannot run here."""

    def best(self, fed: Federation, rounds: int, watch: Watch) -> Run:
        return choose(fed, rounds, watch=watch).run


def _entrants(algorithms: Sequence[str | Algorithm], budget: int) -> list[Tuned | Raced]:
    """The baselines and what was asked for, each once, all names checked before anything runs."""

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
    """Rounds done over all entrants and seeds, for a progress bar."""

    def __init__(self, watch: Watch | None, total: int) -> None:
        self._report, self._total, self.done = watch, total, 0

    def watch(self, what: str) -> Watch:
        """For an entrant, which tells how many of its own rounds are done."""

        def step(part: str, done: int, _: int) -> None:
            if self._report is not None:
                self._report(f"{what}, {part}" if part else what, self.done + done, self._total)

        return step


def _row(name: str, trials: list[Trial]) -> dict[str, Any]:
    """Summary of one method; gains are paired by client, averaged over seeds."""
    mine = [trial for trial in trials if trial.algorithm == name]
    metric = main_metric(mine[0].run.fed.model.task)
    by_seed = torch.stack([trial.test for trial in mine])
    alone = torch.stack([trial.test for trial in trials if trial.algorithm == "local"])
    sign = 1.0 if HIGHER_IS_BETTER[metric] else -1.0
    scored = ~(by_seed.isnan() | alone.isnan()).all(0)
    value = by_seed.nanmean(0)[scored]
    gain = sign * (by_seed - alone).nanmean(0)[scored]
    low, high = interval(gain) if name != "local" else (0.0, 0.0)
    seed_means = by_seed.nanmean(1)
    traffic = [trial.run.traffic() for trial in mine]
    quartiles = torch.quantile(value, torch.tensor([0.25, 0.5, 0.75], dtype=value.dtype)).tolist()
    return {
        "algorithm": name,
        "mean": float(value.mean()),
        "sd": float(seed_means.std()) if len(mine) > 1 else 0.0,
        "worst": float(value.min() if sign > 0 else value.max()),
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
    """compare.json, clients.parquet, and the first seed's run of every method as a folder of its own.

    All of it goes into a folder beside `out`, which takes the name when it is complete.
    """
    partial = out.with_name(out.name + ".tmp")
    try:
        for trial in comparison.trials:
            if trial.seed == 0:
                run = trial.run
                RunFolder.create(partial / trial.algorithm, run.fed, run.algorithm, _plan(run)).finish(run)
        files.write_with(partial / "clients.parquet", comparison.per_client().write_parquet)
        files.write_json(partial / "environment.json", environment(comparison.trials[0].run.fed))
        files.write_toml(partial / "config.toml", {"compare": settings})
        files.write_json(partial / "compare.json", comparison.json())
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _plan(run: Run) -> dict[str, Any]:
    """What `resume` needs to repeat a run of a comparison."""
    every = max(1, run.rounds // 20)
    plan = {"rounds": run.rounds, "evaluate_every": every, "select": "best"}
    return {**plan, "score_test": True, "checkpoint_every": 0}

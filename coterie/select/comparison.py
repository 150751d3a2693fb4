"""The result of a comparison: a row per method, verdicts against training alone, and what a guard did."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from coterie._core import html
from coterie.data.column_types import some
from coterie.models.metrics import Metric
from coterie.models.metrics import find as find_metric
from coterie.select.guard import GuardEffect
from coterie.select.verdict import Verdict, row_metric
from coterie.train.run import Run

if TYPE_CHECKING:
    import polars

ALONE, ALONE_TITLE = "local", "training alone"
BESIDE = {
    "binary": ("loss", "auc"),
    "multiclass": ("loss", "auc"),
    "survival": ("loss",),
}  # shown beside the main metric, over all rows


@dataclass
class Trial:
    """One method on one division of the rows, at the settings that validation chose."""

    algorithm: str
    seed: int  # number of the split or fold
    run: Run
    validation_cost: float  # mean loss on rows held out, or cost of the metric that was asked for
    test: Tensor  # metric per client [n], NaN where a client has no test rows
    tested: Tensor  # which rows the test rows are among all
    guarded: bool = False  # whether clients could keep the model of training alone


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
    guard
        Whether clients keep the model of training alone where validation rows speak against a method.
    in_turn
        Whether methods are chosen by all rows but the test rows, each held out once, instead of validation rows.
    """

    metric: str
    clients: int
    rows: list[dict[str, Any]]
    trials: list[Trial] = field(repr=False)
    names: list[str] = field(repr=False)
    warnings: list[str] = field(default_factory=list)
    folds: int = 1
    seeds: int = 1
    guard: bool = False
    in_turn: bool = False

    @property
    def task(self) -> str:
        """Kind of target."""
        return self.trials[0].run.fed.model.task

    @property
    def scored(self) -> int:
        """Number of clients whose test metric is known; a client of one row has no test row."""
        return int((~torch.stack([trial.test for trial in self.trials]).isnan()).any(0).sum())

    @property
    def in_time(self) -> bool:
        """Whether rows are ordered in time, so that test rows are later than all others."""
        table = self.trials[0].run.fed.table
        return table is not None and table.times is not None

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
        } | ({"guard": self.guard_sentences()} if self.guard else {})

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

    def guard_effect(self, algorithm: str) -> GuardEffect | None:
        """Return what the guard saved and cost by test rows; None for a method that has none."""
        trials = self.of(algorithm)
        if not any(trial.guarded for trial in trials):
            return None
        runs, tested = [trial.run for trial in trials], [trial.tested for trial in trials]
        return GuardEffect.of(algorithm, runs, self.row_metric, tested)

    def guard_sentences(self) -> list[str]:
        """Say for every method who keeps a model of its own, and what that saved and cost."""
        effects = [self.guard_effect(row["algorithm"]) for row in self.rows if row["algorithm"] != ALONE]
        kept = [effect.sentence() for effect in effects if effect is not None and effect.names]
        free = [effect.method for effect in effects if effect is not None and not effect.names]
        known = [effect.method for effect in effects if effect is not None]
        without = [row["algorithm"] for row in self.rows if row["algorithm"] not in (ALONE, *known)]
        if free:
            kept.append(f"Everybody deploys {some(free)}: rows held out speak against it for nobody.")
        if without:
            kept.append(f"{some(without)} has no guard, since it trains another kind of model.")
        return kept

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
        """Return the method that rows held out prefer, on average over splits."""
        return min(self._costs(), key=self._costs().__getitem__)

    def _costs(self) -> dict[str, float]:
        return {row["algorithm"]: row["validation_cost"] for row in self.rows}

    def verdict(self) -> str:
        """Say whether collaborating helps, and for whom, as far as the test rows allow."""
        costs, chosen = self._costs(), self.chosen()
        held_out = "Rows held out in turn" if self.in_turn else "Validation rows"
        if chosen != ALONE:
            said = self.against_alone(chosen).sentence(chosen, ALONE_TITLE)
            return f"{held_out} prefer {chosen}. {said}"
        others = {name: cost for name, cost in costs.items() if name != ALONE}
        best = min(others, key=others.__getitem__)
        said = self.against_alone(best).sentence(best, ALONE_TITLE)
        return f"{held_out} prefer training alone; next is {best}. {said}"

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


def summary_row(name: str, comparison: Comparison) -> dict[str, Any]:
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
    effect = comparison.guard_effect(name) if comparison.guard else None
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
    } | ({} if effect is None else {"guard": effect.json()})


def _pooled(trials: list[Trial], metric: str) -> float | None:
    """Return a metric over the test rows of all clients, the mean over splits; None where it is not defined."""
    values = [trial.run.pooled("test", metric) for trial in trials]
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else None

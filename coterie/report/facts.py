"""Read finished runs from their folders, for the report."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coterie._core import broadcast, files, manifest
from coterie._core.errors import RunError
from coterie.engine.ledger import Ledger
from coterie.models.metrics import LOSS, TASKS, lookup, main_metric
from coterie.train.folder import RESULT, RunFolder
from coterie.train.roster import RunRoster
from coterie.train.save import TEST_ROWS

if TYPE_CHECKING:
    import polars

SPLITS = ("test", "validation", "train")
LARGEST_MODELS = 1 << 28  # bytes; larger files of personal models are not read


class Price(NamedTuple):
    """What training cost: rounds, megabytes in both directions together, and seconds."""

    rounds: float
    megabytes: float
    seconds: float


@dataclass(frozen=True)
class TestRows:
    """Values of test rows by metric [rows], with the client of each row and what tells repeated rows apart."""

    __test__ = False  # not a test

    client: np.ndarray
    row: np.ndarray
    values: dict[str, np.ndarray]


@dataclass(frozen=True)
class RunFacts:
    """One finished run as the report sees it.

    Attributes
    ----------
    folder, label
        Where the run is, and its name on the page.
    config, environment, result
        What `config.toml`, `environment.json` and `result.json` hold.
    names, roster
        Clients; their rows, targets and known clusters where the run recorded them.
    metrics, ledger
        Every recorded metric, and every byte that crossed the network.
    metric, split, scores
        The main metric, the split it was computed on (test if there is one), and its value per client [n].
    seeds
        Splits or folds over which `scores` is averaged; more than one in a comparison.
    folds
        Folds in which every row was tested once; 1 for splits.
    test_rows
        Values of single test rows, where they were recorded.
    averages
        Rounds, megabytes and seconds of a method in a comparison, means over its splits; None for a run by itself.
    """

    folder: Path
    label: str
    config: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]
    names: list[str]
    roster: RunRoster | None
    metrics: polars.DataFrame
    ledger: polars.DataFrame
    metric: str
    split: str
    scores: np.ndarray
    seeds: int = 1
    folds: int = 1
    test_rows: TestRows | None = None
    averages: Mapping[str, Any] | None = None

    @property
    def of_the_first(self) -> str:
        """Which rows were kept one by one, if the scores are averages over several divisions of the rows."""
        if self.seeds == 1:
            return ""
        return " of the first fold" if self.folds > 1 else " of the first split"

    @property
    def algorithm(self) -> str:
        """Name of the method."""
        return str(self.config["algorithm"]["name"])

    @property
    def settings(self) -> dict[str, Any]:
        """Hyperparameters of the method."""
        return {name: value for name, value in self.config["algorithm"].items() if name != "name"}

    @property
    def alone(self) -> bool:
        """Whether every client trained alone as the baseline, rather than because `auto` chose it."""
        return self.algorithm == "local" and not self.label.startswith("auto")

    @property
    def task(self) -> str:
        """Kind of target, by the main metric that was recorded."""
        recorded = set(self.metrics["metric"])
        return next((task for task in TASKS if main_metric(task).name in recorded), "binary")

    @property
    def deployed_round(self) -> int:
        """Round whose models are deployed."""
        return int(self.result["deployed_round"])

    @property
    def price(self) -> Price:
        """Rounds, megabytes and seconds until the deployed models, as every table and sentence tells them."""
        if self.averages is None:
            t = self.deployed_round
            return Price(t, self.megabytes_at(t), float(self.result["seconds"]))
        mean = self.averages
        return Price(mean["rounds"], mean["mb_up"] + mean["mb_down"], mean["seconds"])

    @property
    def trained_on(self) -> list[str]:
        """Splits whose rows the deployed models have seen."""
        return list(self.result.get("trained_on", ["train"]))

    @property
    def race(self) -> Price | None:
        """Rounds and megabytes of everybody in the race that chose this run; None if a person chose it."""
        path = self.folder / "choice.json"
        if not path.exists():
            return None
        rows = files.read_json(path)["race"]
        rounds = sum(row["rounds"] + row.get("checked_rounds", 0) for row in rows)  # older ones had a check
        return Price(rounds, sum(row["megabytes"] for row in rows), float("nan"))

    @property
    def data(self) -> dict[str, Any]:
        """Source and roles of the columns; empty for a run that was not made from a table."""
        return dict(self.config.get("data", {}))

    @property
    def rows_hash(self) -> str:
        """Hash of the rows and their split: equal for two runs on the same data."""
        return str(self.config["federation"]["rows_sha256"])

    def rows(self, split: str) -> np.ndarray | None:
        """Return the number of rows of every client in a split, if recorded."""
        return None if self.roster is None else np.array(self.roster.rows[split])

    def per_client(self, split: str, metric: str) -> dict[int, np.ndarray]:
        """Return a metric by round, one value per client [n], NaN where there is none."""
        import polars as pl

        known = self._per_client.get((split, metric))
        if known is not None:
            return known
        place = {name: k for k, name in enumerate(self.names)}
        found: dict[int, np.ndarray] = {}
        rows = self.metrics.filter((pl.col("split") == split) & (pl.col("metric") == metric))
        for (t,), part in rows.group_by("round", maintain_order=True):
            values = found.setdefault(int(str(t)), np.full(len(self.names), np.nan))
            own = part.filter(pl.col("client").is_not_null())
            values[[place[name] for name in own["client"]]] = own["value"].to_numpy()
        self._per_client[split, metric] = dict(sorted(found.items()))
        return self._per_client[split, metric]

    @functools.cached_property
    def _per_client(self) -> dict[tuple[str, str], dict[int, np.ndarray]]:
        """Cache of `per_client`."""
        return {}

    @functools.cached_property
    def megabytes(self) -> dict[int, tuple[float, float]]:
        """Megabytes sent up and down until the end of every round, without evaluation and refitting."""
        return Ledger.from_frame(self.ledger).megabytes()

    def megabytes_at(self, t: int) -> float:
        """Return the megabytes sent until the end of round t, both directions together."""
        before = [sum(both) for when, both in self.megabytes.items() if when <= t]
        return before[-1] if before else 0.0

    @functools.cached_property
    def why(self) -> list[str]:
        """Sentences on why `auto` chose this method; empty if a person chose it."""
        path = self.folder / "choice.json"
        return list(files.read_json(path)["why"]) if path.exists() else []

    @functools.cached_property
    def sure(self) -> bool | None:
        """Whether `auto` found a gain over training alone on the rows it held out; None if a person chose this run."""
        path = self.folder / "choice.json"
        return (
            bool(files.read_json(path).get("sure")) if path.exists() and self.algorithm != "local" else None
        )

    @functools.cached_property
    def alone_in_race(self) -> tuple[int, dict[str, Any]] | None:
        """The most rounds of anybody in the race of `auto`, and the best settings of training alone there, or None."""
        path = self.folder / "choice.json"
        race = files.read_json(path).get("race", []) if path.exists() else []
        alone = next((one["settings"] for one in race if one["method"] == "local"), None)
        return None if alone is None else (max(one["rounds"] for one in race), alone)

    @property
    def guard(self) -> dict[str, Any] | None:
        """Who keeps a model of its own, and what that saved and cost on test rows; None without a guard."""
        known = self.averages if self.averages is not None and "guard" in self.averages else self.result
        found: dict[str, Any] | None = known.get("guard")
        return found

    def validation_cost(self) -> float:
        """Return the mean validation loss, or cost of the metric that the run was asked for."""
        if self.averages is not None and "validation_cost" in self.averages:
            return float(self.averages["validation_cost"])
        judge = lookup(self.config["plan"].get("metric", "")) or LOSS
        values = self.per_client("validation", judge.name).get(self.deployed_round)
        return float("inf") if values is None else judge.cost(float(np.nanmean(values)))

    def observed(self, metric: str) -> dict[int, np.ndarray]:
        """Return what the algorithm recorded of every client [n], by round."""
        return self.per_client("server", metric)

    @functools.cached_property
    def weights(self) -> np.ndarray | None:
        """Last recorded matrix of weights between clients [n, n], if the method has one."""
        n = len(self.names)
        return self._last_trace("weight", lambda name, shape: shape == [n, n])

    @functools.cached_property
    def links(self) -> Any:
        """Last recorded weights of a method that keeps those of few pairs, a sparse array [n, n]; None without."""
        found = self._last_trace("links", lambda name, _: name.startswith("links."))
        if found is None or self.weights is not None:
            return None
        from scipy.sparse import csr_array

        ends, n = found[:, :2].astype(int).T, len(self.names)
        one = csr_array((found[:, 2], tuple(ends)), shape=(n, n))
        return one.maximum(one.T).tocsr()  # a pair may be there once or in both directions

    def _last_trace(self, name: str, fits: Callable[[str, list[int]], bool]) -> np.ndarray | None:
        """Return the last of the traces whose name and shape fit, those whose names contain this first."""
        from safetensors import SafetensorError, safe_open

        path = self.folder / "traces.safetensors"
        if not path.exists():
            return None
        manifest.check(path)
        try:
            with safe_open(path, framework="np") as stream:
                found = [k for k in stream.keys() if fits(k, stream.get_slice(k).get_shape())]
                if not found:
                    return None
                last = max(found, key=lambda key: (name in key, int(key.rpartition(".")[2])))
                return np.asarray(stream.get_tensor(last), dtype=float)
        except (SafetensorError, ValueError, OSError) as problem:
            raise RunError(
                f"{path} is damaged ({problem}). Restore it from a copy, or train again."
            ) from None

    @functools.cached_property
    def personal(self) -> np.ndarray | None:
        """Deployed models [n, d]; None if the file is too large to read, or the models stayed with the clients."""
        path = self.folder / "models" / "models.safetensors"
        if not path.exists() or path.stat().st_size > LARGEST_MODELS:
            return None
        models = files.read_tensors(path)[0]["personal"]
        if len(models) != len(self.names):
            return None
        if broadcast.is_broadcast(models):
            return np.broadcast_to(models[0].double().numpy(), models.shape)
        return models.double().numpy()


def read_runs(paths: Sequence[Path]) -> list[RunFacts]:
    """Read runs, and all runs of comparisons, each labelled by its method (and folder, if two have the same).

    Raises
    ------
    RunError
        If there is no run, a run is not finished, or two runs have other clients or another metric.
    """
    found: list[RunFacts] = []
    for path in paths:
        for run in _comparison(path) if (path / "compare.json").exists() else [_run(path)]:
            if all(run.folder.resolve() != known.folder.resolve() for known in found):
                found.append(run)
    if not found:
        raise RunError("there is no run to report; name a folder that `coterie fit --out` made")
    found = _by_one_metric(found)
    _require_comparable(found)
    count = Counter(run.label for run in found)
    return [
        replace(run, label=f"{run.label} ({run.folder.name})") if count[run.label] > 1 else run
        for run in found
    ]


def read_run(path: Path, metric: str) -> RunFacts | None:
    """Read one finished run, scored by this metric; None if it was not recorded."""
    return _by_metric(_run(path), metric)


def _comparison(path: Path) -> list[RunFacts]:
    """Read the runs of a comparison: those of its first seed, with scores averaged over all its seeds."""
    import polars as pl

    scores = files.read_parquet(path / "clients.parquet")
    metric = scores.columns[-1]
    if lookup(metric) is None:
        raise RunError(
            f"{path} is scored by {metric!r}, which is not known here. Register it with coterie.metrics.register and "
            "write the report from Python, or name one of the runs in the folder."
        )
    seeds = scores["seed"].n_unique()
    means = scores.group_by("algorithm", "client").agg(pl.col(metric).mean())
    rows = files.read_parquet(path / "rows.parquet") if (path / "rows.parquet").exists() else None
    runs, written = [], files.read_json(path / "compare.json")
    for row in written["rows"]:
        run = _run(path / row["algorithm"])
        mine = means.filter(pl.col("algorithm") == row["algorithm"])
        known = dict(zip(mine["client"], mine[metric], strict=True))
        values = np.array([known.get(name, np.nan) for name in run.names])
        tested = None if rows is None else _test_rows(rows, f"{row['algorithm']}/")
        runs.append(
            replace(
                run,
                label=row["algorithm"],
                metric=metric,
                scores=values,
                split="test",
                seeds=seeds,
                folds=written.get("folds", 1),
                test_rows=tested,
                averages=row,
            )
        )
    return runs


def _test_rows(frame: polars.DataFrame, prefix: str = "") -> TestRows:
    """Return the rows of a table with the columns client, row (if rows repeat) and a column per metric."""
    known = {"client", "row"}
    names = [name for name in frame.columns if name not in known and name.startswith(prefix)]
    row = frame["row"].to_numpy() if "row" in frame.columns else np.arange(frame.height)
    values = {name.removeprefix(prefix): frame[name].to_numpy() for name in names}
    return TestRows(frame["client"].to_numpy(), row, values)


def _run(path: Path) -> RunFacts:
    """Read one finished run."""
    folder = RunFolder.open(path)
    with folder.reading():
        return _read(folder)


def _read(folder: RunFolder) -> RunFacts:
    path = folder.path
    if "adapt" in folder.config:
        raise RunError(f"{path} holds adapted models only. Report {folder.config['adapt']['run']}")
    if not folder.finished():
        raise RunError(f"{path} is not finished. Finish it with `coterie resume {path}`, then report it.")
    config = folder.config
    metrics = files.read_parquet(path / "metrics.parquet")
    recorded, asked = set(metrics["metric"]), config["plan"].get("metric", "")
    mains = (main_metric(task).name for task in TASKS)
    main = next((name for name in mains if name in recorded), "accuracy")
    metric = main if lookup(asked) is None else asked
    roster = RunRoster.load(path)
    names = files.read_json(path / "models" / "model.json")["clients"] if roster is None else roster.names
    found = RunFacts(
        folder=path,
        label=str(config["algorithm"]["name"]),
        config=config,
        environment=files.read_json(path / "environment.json"),
        result=files.read_json(path / RESULT),
        names=names,
        roster=roster,
        metrics=metrics,
        ledger=files.read_parquet(path / "ledger.parquet"),
        metric=metric,
        split="",
        scores=np.empty(0),
        test_rows=_test_rows(files.read_parquet(path / TEST_ROWS)) if (path / TEST_ROWS).exists() else None,
    )
    run = _by_metric(found, metric)
    if run is None:
        raise RunError(f"{path} has no scores of its models; train it again")
    return run


def _by_metric(run: RunFacts, metric: str) -> RunFacts | None:
    """Return the run scored by this metric, or None if it was not recorded; means over seeds stay as they are."""
    if run.seeds > 1:
        return run if run.metric == metric else None
    for split in SPLITS:
        scores = run.per_client(split, metric).get(run.deployed_round)
        if scores is not None:
            return replace(run, metric=metric, split=split, scores=scores)
    return None


def _by_one_metric(runs: list[RunFacts]) -> list[RunFacts]:
    """Return the runs scored by one metric that all of them recorded, the first run's if possible."""
    if len({run.metric for run in runs}) == 1:
        return runs
    for metric in dict.fromkeys(run.metric for run in runs):
        found = [_by_metric(run, metric) for run in runs]
        scored = [run for run in found if run is not None]
        if len(scored) == len(runs):
            return scored
    return runs


def _require_comparable(runs: list[RunFacts]) -> None:
    """Refuse runs of different clients or metrics."""
    first = runs[0]
    for run in runs[1:]:
        if run.metric != first.metric or set(run.names) != set(first.names):
            raise RunError(
                f"{run.folder} and {first.folder} have different clients or different kinds of target, so they do "
                "not fit on one page. Report them one by one."
            )
        if run.names != first.names:
            raise RunError(f"{run.folder} lists its clients in a different order from {first.folder}")

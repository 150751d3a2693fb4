"""Read finished runs from their folders, for the report."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie._core import broadcast, files, manifest
from coterie._core.errors import RunError
from coterie.models.metrics import LOSS, TASKS, lookup, main_metric
from coterie.train.folder import RESULT, RunFolder
from coterie.train.roster import Roster

if TYPE_CHECKING:
    import polars

SPLITS = ("test", "validation", "train")
MOST_SIBLINGS = 200  # at most this many neighbouring folders are searched for a run that trained alone
LARGEST_MODELS = 1 << 28  # bytes; larger files of personal models are not read


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
        Seeds over which `scores` is averaged; more than one in a comparison.
    """

    folder: Path
    label: str
    config: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]
    names: list[str]
    roster: Roster | None
    metrics: polars.DataFrame
    ledger: polars.DataFrame
    metric: str
    split: str
    scores: np.ndarray
    seeds: int = 1

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
    def deployed_round(self) -> int:
        """Round whose models are deployed."""
        return int(self.result["deployed_round"])

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
        """Megabytes sent up and down until the end of every round, without evaluation."""
        import polars as pl

        sums = (
            self.ledger.filter(pl.col("kind") != "evaluate")
            .group_by("round")
            .agg(pl.col("bytes_up").sum(), pl.col("bytes_down").sum())
        )
        up = down = 0.0
        found: dict[int, tuple[float, float]] = {}
        for t, sent, got in sums.sort("round").iter_rows():
            up, down = up + sent / 1e6, down + got / 1e6
            found[int(t)] = (up, down)
        return found

    def megabytes_at(self, t: int) -> float:
        """Return the megabytes sent until the end of round t, both directions together."""
        before = [sum(both) for when, both in self.megabytes.items() if when <= t]
        return before[-1] if before else 0.0

    @functools.cached_property
    def why(self) -> list[str]:
        """Sentences on why `auto` chose this method; empty if a person chose it."""
        path = self.folder / "choice.json"
        return list(files.read_json(path)["why"]) if path.exists() else []

    def validation_cost(self) -> float:
        """Return the mean validation loss, or cost of the metric that the run was asked for."""
        judge = lookup(self.config["plan"].get("metric", "")) or LOSS
        values = self.per_client("validation", judge.name).get(self.deployed_round)
        return float("inf") if values is None else judge.cost(float(np.nanmean(values)))

    def observed(self, metric: str) -> dict[int, np.ndarray]:
        """Return what the algorithm recorded of every client [n], by round."""
        return self.per_client("server", metric)

    @functools.cached_property
    def weights(self) -> np.ndarray | None:
        """Last recorded matrix of weights between clients [n, n], if the method has one."""
        from safetensors import SafetensorError, safe_open

        path = self.folder / "traces.safetensors"
        if not path.exists():
            return None
        n = len(self.names)
        manifest.check(path)
        try:
            with safe_open(path, framework="np") as stream:
                square = [k for k in stream.keys() if stream.get_slice(k).get_shape() == [n, n]]
                if not square:
                    return None
                last = max(square, key=lambda name: ("weight" in name, int(name.rpartition(".")[2])))
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


def with_baseline(runs: list[RunFacts]) -> list[RunFacts]:
    """Add a run that trained alone on the same rows, if none is among `runs` and a neighbouring folder has one."""
    if any(run.alone for run in runs):
        return runs
    first = runs[0]
    for place in sorted(first.folder.resolve().parent.glob("*/config.toml"))[:MOST_SIBLINGS]:
        try:
            other = _by_metric(_run(place.parent), first.metric)
        except RunError:
            continue
        if other is not None and other.alone and other.rows_hash == first.rows_hash:
            return [*runs, other]
    return runs


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
    runs = []
    for row in files.read_json(path / "compare.json")["rows"]:
        run = _run(path / row["algorithm"])
        mine = means.filter(pl.col("algorithm") == row["algorithm"])
        known = dict(zip(mine["client"], mine[metric], strict=True))
        values = np.array([known.get(name, np.nan) for name in run.names])
        runs.append(
            replace(run, label=row["algorithm"], metric=metric, scores=values, split="test", seeds=seeds)
        )
    return runs


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
    roster = Roster.load(path)
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

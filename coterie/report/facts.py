"""What a report knows of finished runs, read from their folders and from nothing else."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.errors import RunError
from coterie.models.metrics import MAIN
from coterie.models.shared import is_shared
from coterie.runs import files
from coterie.runs.folder import RESULT, RunFolder
from coterie.runs.roster import Roster

if TYPE_CHECKING:
    import polars

SPLITS = ("test", "validation", "train")
MOST_SIBLINGS = 200  # folders beside a run that are searched for one that trained alone
LARGEST_MODELS = 1 << 28  # bytes of personal models that a report is willing to read


@dataclass(frozen=True)
class RunFacts:
    """One run: its settings, its clients, the metric of every client [n] and what was recorded on the way."""

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
        return str(self.config["algorithm"]["name"])

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in self.config["algorithm"].items() if name != "name"}

    @property
    def alone(self) -> bool:
        """Trained without anybody, as a yardstick (and not because `auto` found that best)."""
        return self.algorithm == "local" and not self.label.startswith("auto")

    @property
    def deployed_round(self) -> int:
        return int(self.result["deployed_round"])

    @property
    def data(self) -> dict[str, Any]:
        """Where the rows came from; empty for a run that was not made from a table."""
        return dict(self.config.get("data", {}))

    @property
    def rows_hash(self) -> str:
        return str(self.config["federation"]["rows_sha256"])

    def rows(self, split: str) -> np.ndarray | None:
        return None if self.roster is None else np.array(self.roster.rows[split])

    def per_client(self, split: str, metric: str) -> dict[int, np.ndarray]:
        """A value per client [n] by round, NaN where there is none."""
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
        return {}

    @functools.cached_property
    def megabytes(self) -> dict[int, tuple[float, float]]:
        """Up and down until the end of every round, evaluation not counted."""
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
        """Both directions together until round t."""
        before = [sum(both) for when, both in self.megabytes.items() if when <= t]
        return before[-1] if before else 0.0

    @functools.cached_property
    def why(self) -> list[str]:
        """Why `auto` chose this method; empty where a person did."""
        path = self.folder / "choice.json"
        return list(files.read_json(path)["why"]) if path.exists() else []

    def validation_loss(self) -> float:
        values = self.per_client("validation", "loss").get(self.deployed_round)
        return float("inf") if values is None else float(np.nanmean(values))

    def observed(self, metric: str) -> dict[int, np.ndarray]:
        """What the algorithm recorded of every client, by round."""
        return self.per_client("server", metric)

    @functools.cached_property
    def weights(self) -> np.ndarray | None:
        """The last recorded matrix of who learns from whom [n, n], where the method has one."""
        from safetensors import safe_open

        path = self.folder / "traces.safetensors"
        if not path.exists():
            return None
        n = len(self.names)
        with safe_open(path, framework="np") as stream:
            square = [k for k in stream.keys() if stream.get_slice(k).get_shape() == [n, n]]
            if not square:
                return None
            last = max(square, key=lambda name: ("weight" in name, int(name.rpartition(".")[2])))
            return np.asarray(stream.get_tensor(last), dtype=float)

    @functools.cached_property
    def personal(self) -> np.ndarray | None:
        """The deployed models [n, d]; None where they are too large to look at here, or stayed with the clients."""
        path = self.folder / "models" / "models.safetensors"
        if not path.exists() or path.stat().st_size > LARGEST_MODELS:
            return None
        models = files.read_tensors(path)[0]["personal"]
        if len(models) != len(self.names):
            return None
        if is_shared(models):
            return np.broadcast_to(models[0].double().numpy(), models.shape)
        return models.double().numpy()


def read_runs(paths: Sequence[Path]) -> list[RunFacts]:
    """All runs named, comparisons opened, each labelled by its method (and folder, where that is not enough)."""
    found: list[RunFacts] = []
    for path in paths:
        for run in _comparison(path) if (path / "compare.json").exists() else [_run(path)]:
            if all(run.folder.resolve() != known.folder.resolve() for known in found):
                found.append(run)
    if not found:
        raise RunError("there is no run to report; name a folder that `coterie fit --out` made")
    _require_comparable(found)
    count = Counter(run.label for run in found)
    return [
        replace(run, label=f"{run.label} ({run.folder.name})") if count[run.label] > 1 else run
        for run in found
    ]


def with_baseline(runs: list[RunFacts]) -> list[RunFacts]:
    """The runs and, if none of them trained alone, a run beside them on the same rows that did."""
    if any(run.alone for run in runs):
        return runs
    first = runs[0]
    for place in sorted(first.folder.resolve().parent.glob("*/config.toml"))[:MOST_SIBLINGS]:
        try:
            other = _run(place.parent)
        except RunError:
            continue
        if other.alone and other.rows_hash == first.rows_hash:
            return [*runs, other]
    return runs


def _comparison(path: Path) -> list[RunFacts]:
    """The first seed's runs of a comparison, scored by the mean over all its seeds."""
    import polars as pl

    scores = pl.read_parquet(path / "clients.parquet")
    metric = scores.columns[-1]
    seeds = scores["seed"].n_unique()
    means = scores.group_by("algorithm", "client").agg(pl.col(metric).mean())
    runs = []
    for row in files.read_json(path / "compare.json")["rows"]:
        run = _run(path / row["algorithm"])
        mine = means.filter(pl.col("algorithm") == row["algorithm"])
        known = dict(zip(mine["client"], mine[metric], strict=True))
        values = np.array([known.get(name, np.nan) for name in run.names])
        runs.append(replace(run, label=row["algorithm"], scores=values, split="test", seeds=seeds))
    return runs


def _run(path: Path) -> RunFacts:
    import polars as pl

    folder = RunFolder.open(path)
    if "adapt" in folder.config:
        raise RunError(f"{path} holds adapted models only. Report {folder.config['adapt']['run']}")
    if not folder.finished():
        raise RunError(f"{path} is not finished. Go on with `coterie resume {path}`, then report it.")
    config = folder.config
    metrics = pl.read_parquet(path / "metrics.parquet")
    metric = next((name for name in MAIN.values() if name in metrics["metric"]), "accuracy")
    roster = Roster.load(path)
    names = files.read_json(path / "models" / "model.json")["clients"] if roster is None else roster.names
    run = RunFacts(
        folder=path,
        label=str(config["algorithm"]["name"]),
        config=config,
        environment=files.read_json(path / "environment.json"),
        result=files.read_json(path / RESULT),
        names=names,
        roster=roster,
        metrics=metrics,
        ledger=pl.read_parquet(path / "ledger.parquet"),
        metric=metric,
        split="",
        scores=np.empty(0),
    )
    for split in SPLITS:
        scores = run.per_client(split, metric).get(run.deployed_round)
        if scores is not None:
            return replace(run, split=split, scores=scores)
    raise RunError(f"{path} has no scores of its models; train it again")


def _require_comparable(runs: list[RunFacts]) -> None:
    first = runs[0]
    for run in runs[1:]:
        if run.metric != first.metric or set(run.names) != set(first.names):
            raise RunError(
                f"{run.folder} and {first.folder} have other clients or another kind of target, so they do not "
                "fit on one page. Report them one by one."
            )
        if run.names != first.names:
            raise RunError(f"{run.folder} lists its clients in another order than {first.folder}")

"""Metrics for other people's dashboards: TensorBoard and MLflow see a run as it goes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from coterie.algorithms import Algorithm
from coterie.errors import SettingError, nearest
from coterie.federation.federation import Federation
from coterie.models.metrics import HIGHER_IS_BETTER
from coterie.runs.history import History

if TYPE_CHECKING:
    from coterie.runs.run import Run

FEW = 20  # clients that get a curve each; beyond that their distribution is shown


class Tracker(Protocol):
    """Is told when a run begins, whenever it is scored, and when it has ended."""

    def begin(self, fed: Federation, algorithm: Algorithm, plan: dict[str, Any]) -> None: ...

    def scored(self, fed: Federation, t: int, history: History) -> None: ...

    def end(self, run: Run) -> None: ...


def tracker(name: str, out: Path | None) -> Tracker:
    """The tracker of that name; TensorBoard's files go into the run folder."""
    if name not in TRACKERS:
        raise SettingError(f"no tracker {name!r}.{nearest(name, TRACKERS)}")
    try:
        return TRACKERS[name](out)
    except ImportError:
        raise SettingError(f"--track {name} needs its package: pip install 'coterie[track]'") from None


def numbers(fed: Federation, t: int, history: History) -> dict[str, float]:
    """What is worth a curve after round t: mean and worst over clients, few clients each, megabytes so far."""
    found: dict[str, float] = {}
    for when, split, metric, value in history.blocks:
        if when != t or value.dim() > 1:
            continue
        if value.dim() == 0 or len(value) != fed.n:
            found[f"{split}/{metric}"] = float(value.reshape(-1)[0])
            continue
        known = value[~value.isnan()]
        if not len(known):
            continue
        found[f"{split}/{metric}/mean"] = float(known.mean())
        if metric in HIGHER_IS_BETTER:
            found[f"{split}/{metric}/worst"] = float(known.min() if HIGHER_IS_BETTER[metric] else known.max())
        if fed.n <= FEW:
            found |= {
                f"{split}/{metric}/{name}": number
                for name, number in zip(fed.names, value.tolist(), strict=True)
            }
    counts = [
        counts
        for entry, counts in fed.ledger.entries.items()
        if entry.kind != "evaluate" and entry.round <= t
    ]
    found["communication/MB down"] = sum(count[2] for count in counts) / 1e6
    found["communication/MB up"] = sum(count[5] for count in counts) / 1e6
    return {name: value for name, value in found.items() if math.isfinite(value)}


class TensorBoard:
    """Scalars by split and metric, the distribution over clients, and hyperparameters with the final scores."""

    def __init__(self, out: Path | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter
        self._folder = (out or Path("runs")) / "tensorboard"

    def begin(self, fed: Federation, algorithm: Algorithm, plan: dict[str, Any]) -> None:
        self._writer = self._writer(str(self._folder))
        settings = {"algorithm": algorithm.name, **algorithm.settings(), **plan, "clients": fed.n, "d": fed.d}
        lines = [f"| {name} | {value} |" for name, value in settings.items()]
        self._writer.add_text("settings", "\n".join(["| | |", "|---|---|", *lines]))

    def scored(self, fed: Federation, t: int, history: History) -> None:
        for name, value in numbers(fed, t, history).items():
            self._writer.add_scalar(name, value, t)
        for when, split, metric, values in history.blocks:
            if when == t and values.dim() == 1 and len(known := values[~values.isnan()]) > 1:
                self._writer.add_histogram(f"{split}/{metric}", known, t)

    def end(self, run: Run) -> None:
        self.scored(run.fed, run.deployed_round, run.history)
        settings = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in run.algorithm.settings().items()
        }
        final = numbers(run.fed, run.deployed_round, run.history)
        scores = {f"final/{name}": value for name, value in final.items() if name.endswith("/mean")}
        self._writer.add_hparams(settings, scores, run_name="hparams")
        self._writer.close()


class MlFlow:
    """A run in the experiment "coterie": parameters, metrics by round, and the run folder as artifacts."""

    def __init__(self, out: Path | None) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        self._out = out

    def begin(self, fed: Federation, algorithm: Algorithm, plan: dict[str, Any]) -> None:
        if self._mlflow.active_run() is None:
            self._mlflow.set_experiment("coterie")
            self._mlflow.start_run(run_name=self._out.name if self._out else algorithm.name)
        settings = {"algorithm": algorithm.name, **algorithm.settings(), **plan}
        self._mlflow.log_params({**settings, "clients": fed.n, "parameters": fed.d, "seed": fed.seed})

    def scored(self, fed: Federation, t: int, history: History) -> None:
        found = numbers(fed, t, history)
        self._mlflow.log_metrics({_allowed(name): value for name, value in found.items()}, step=t)

    def end(self, run: Run) -> None:
        self.scored(run.fed, run.deployed_round, run.history)
        if run.folder is not None:
            self._mlflow.log_artifacts(str(run.folder))
        self._mlflow.end_run()


def _allowed(name: str) -> str:
    """MLflow takes letters, digits and a few marks."""
    return "".join(mark if mark.isalnum() or mark in "_-. /:" else "_" for mark in name)


TRACKERS: dict[str, Callable[[Path | None], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MlFlow}

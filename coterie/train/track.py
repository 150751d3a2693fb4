"""Metrics for other dashboards: TensorBoard, MLflow and Weights & Biases follow a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from coterie._core import extras
from coterie._core.errors import SettingError, nearest
from coterie.algorithms import Algorithm
from coterie.engine.federation import Federation
from coterie.models.metrics import lookup
from coterie.train.history import History

if TYPE_CHECKING:
    from coterie.train.run import Run

FEW = 20  # clients that get a curve each; beyond that their distribution is shown


class Tracker(Protocol):
    """Follows a run. A tracker of your own has these three methods."""

    def begin(self, fed: Federation, algorithm: Algorithm, plan: dict[str, Any]) -> None:
        """Hear that a run begins."""

    def scored(self, fed: Federation, t: int, history: History) -> None:
        """Hear that the models of round t were scored."""

    def end(self, run: Run) -> None:
        """Hear that a run has ended."""


def tracker(name: str, out: Path | None) -> Tracker:
    """Return a tracker.

    Parameters
    ----------
    name
        'tensorboard', 'mlflow' or 'wandb'.
    out
        The run folder, into which the files of TensorBoard and Weights & Biases go.
    """
    if name not in TRACKERS:
        raise SettingError(f"no tracker {name!r}.{nearest(name, TRACKERS)}")
    extras.require("track", f"--track {name}", name)
    return TRACKERS[name](out)


def numbers(fed: Federation, t: int, history: History) -> dict[str, float]:
    """Return what is worth a curve after round t: mean and worst over clients, each of few clients, megabytes."""
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
        known_metric = lookup(metric)
        if known_metric is not None:
            worst = known.min() if known_metric.higher_is_better else known.max()
            found[f"{split}/{metric}/worst"] = float(worst)
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
    """Writes scalars by split and metric, distributions over clients, and hyperparameters with final scores."""

    def __init__(self, out: Path | None) -> None:
        import tensorboard  # noqa: F401  torch asks for it only when it writes
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter
        self._folder = (out or Path("runs")) / "tensorboard"

    def begin(self, fed: Federation, algorithm: Algorithm, plan: dict[str, Any]) -> None:
        """Write the settings of the run."""
        self._writer = self._writer(str(self._folder))
        settings = {"algorithm": algorithm.name, **algorithm.settings(), **plan, "clients": fed.n, "d": fed.d}
        lines = [f"| {name} | {value} |" for name, value in settings.items()]
        self._writer.add_text("settings", "\n".join(["| | |", "|---|---|", *lines]))

    def scored(self, fed: Federation, t: int, history: History) -> None:
        """Write the metrics of round t."""
        for name, value in numbers(fed, t, history).items():
            self._writer.add_scalar(name, value, t)
        for when, split, metric, values in history.blocks:
            if when == t and values.dim() == 1 and len(known := values[~values.isnan()]) > 1:
                self._writer.add_histogram(f"{split}/{metric}", known, t)

    def end(self, run: Run) -> None:
        """Write hyperparameters and final scores."""
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
    """Writes parameters, metrics by round and the run folder into the experiment "coterie"."""

    def __init__(self, out: Path | None) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        self._out = out
        if mlflow.active_run() is None:  # here, so that nothing is written where MLflow refuses
            try:
                mlflow.set_experiment("coterie")
            except mlflow.exceptions.MlflowException as problem:
                where = mlflow.get_tracking_uri()
                raise SettingError(
                    f"MLflow cannot write to {where} (MLFLOW_TRACKING_URI): {problem}"
                ) from None

    def begin(self, fed: Federation, algorithm: Algorithm, plan: dict[str, Any]) -> None:
        """Start a run and log its parameters."""
        if self._mlflow.active_run() is None:
            self._mlflow.start_run(run_name=self._out.name if self._out else algorithm.name)
        settings = {"algorithm": algorithm.name, **algorithm.settings(), **plan}
        self._mlflow.log_params({**settings, "clients": fed.n, "parameters": fed.d, "seed": fed.seed})

    def scored(self, fed: Federation, t: int, history: History) -> None:
        """Log the metrics of round t."""
        found = numbers(fed, t, history)
        self._mlflow.log_metrics({_allowed(name): value for name, value in found.items()}, step=t)

    def end(self, run: Run) -> None:
        """Log the final metrics and the run folder."""
        self.scored(run.fed, run.deployed_round, run.history)
        if run.folder is not None:
            self._mlflow.log_artifacts(str(run.folder))
        self._mlflow.end_run()


class WandB:
    """Writes settings, metrics by round and final scores into the project "coterie" of Weights & Biases.

    `WANDB_MODE=offline` keeps everything in the folder `wandb`, for `wandb sync` later.
    """

    def __init__(self, out: Path | None) -> None:
        import wandb

        self._wandb: Any = wandb
        self._out = out
        self._own = wandb.run is None
        self._run: Any = wandb.run

    def begin(self, fed: Federation, algorithm: Algorithm, plan: dict[str, Any]) -> None:
        """Start a run, unless the user has started one, and record its settings."""
        if self._own:
            if self._out is not None:
                self._out.mkdir(parents=True, exist_ok=True)
            self._run = self._wandb.init(
                project="coterie",
                name=self._out.name if self._out else algorithm.name,
                dir=None if self._out is None else str(self._out),
            )
        settings = {"algorithm": algorithm.name, **algorithm.settings(), **plan}
        self._run.config.update({**settings, "clients": fed.n, "parameters": fed.d, "seed": fed.seed})
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")

    def scored(self, fed: Federation, t: int, history: History) -> None:
        """Log the metrics of round t."""
        self._run.log({**numbers(fed, t, history), "round": t})

    def end(self, run: Run) -> None:
        """Log the final metrics, and close the run if it was started here."""
        self.scored(run.fed, run.deployed_round, run.history)
        self._run.summary.update(numbers(run.fed, run.deployed_round, run.history))
        if self._own:
            self._run.finish()


def _allowed(name: str) -> str:
    """MLflow takes letters, digits and a few marks."""
    return "".join(mark if mark.isalnum() or mark in "_-. /:" else "_" for mark in name)


TRACKERS: dict[str, Callable[[Path | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MlFlow,
    "wandb": WandB,
}

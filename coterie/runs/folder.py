"""A run on disk: config.toml, environment.json, clients.json, metrics.parquet, ledger.parquet, checkpoint/, models/."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import coterie
from coterie.algorithms import Algorithm, make
from coterie.errors import RunError
from coterie.federation.federation import Federation
from coterie.models.description import CUSTOM, description
from coterie.runs import files

if TYPE_CHECKING:
    from coterie.runs.run import Run

RESULT = "result.json"


class RunFolder:
    """Where a run keeps its things, and how it is opened again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoint"

    @staticmethod
    def require_free(path: Path) -> None:
        """Refuse a place where something exists (a run is never overwritten) or nothing can be written."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            resume = f", or go on with `coterie resume {path}`" if _is_run(path) else ""
            raise RunError(f"{path} exists already. Choose another folder, or delete it{resume}.")
        files.require_writable(path / "config.toml")

    @classmethod
    def create(cls, path: Path, fed: Federation, algorithm: Algorithm, plan: dict[str, Any]) -> RunFolder:
        """A new folder with the settings of a run."""
        cls.require_free(path)
        folder = cls(path)
        config = {
            "coterie": coterie.__version__,
            "algorithm": {"name": algorithm.name, **algorithm.settings()},
            "plan": plan,
            "federation": {
                "seed": fed.seed,
                "clients": fed.n,
                "parameters": fed.d,
                "dropout": fed.dropout,
                "rows_sha256": fingerprint(fed),
            },
        }
        if fed.table is not None:
            config["data"] = {**fed.table.options, "model": json.dumps(description(fed.model))}
        if fed.texts is not None:
            config["texts"] = {**fed.texts, "model": json.dumps(description(fed.model))}
        files.write_json(path / "environment.json", environment(fed))
        files.write_toml(path / "config.toml", config)
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not (path / "config.toml").exists():
            what = "is not a run folder: it has no config.toml" if path.exists() else "does not exist"
            raise RunError(f"{path} {what}. Name the folder that `coterie fit --out` made.")
        folder = cls(path)
        config = folder.config
        if "compare" in config:
            runs = sorted(str(run.parent) for run in path.glob("*/config.toml"))
            raise RunError(f"{path} holds a comparison. Name one of its runs: {', '.join(runs)}")
        missing = [table for table in ("algorithm", "plan", "federation") if table not in config]
        if missing:
            raise RunError(
                f"{path}/config.toml is damaged: it has no [{missing[0]}]. Restore it from a copy."
            )
        return folder

    def sweep(self) -> None:
        """Remove what a killed run left half-written."""
        for temporary in self.path.rglob("*.tmp"):
            temporary.unlink(missing_ok=True)

    @property
    def config(self) -> dict[str, Any]:
        return files.read_toml(self.path / "config.toml")

    def algorithm(self) -> Algorithm:
        settings = dict(self.config["algorithm"])
        return make(settings.pop("name"), **settings)

    def plan(self) -> dict[str, Any]:
        return self.config["plan"]

    def finished(self) -> bool:
        return (self.path / RESULT).exists()

    def federation(self) -> Federation:
        """The federation as it was, from the table or the texts the run names."""
        from coterie.data.load import load_table
        from coterie.models import from_description

        settings = self.config["federation"]
        drawn = {"seed": settings["seed"], "dropout": settings["dropout"]}
        if "texts" in self.config:
            texts = dict(self.config["texts"])
            described = json.loads(texts.pop("model"))
            return Federation.from_texts(model=from_description(described), **texts, **drawn)
        data = self.config.get("data")
        if data is None:
            raise RunError(
                f"{self.path} was not made from a table, so its data must be given again: coterie.resume(path, fed)"
            )
        if data.get("federated"):
            raise RunError(
                f"{self.path} is a run across a network. Go on with: coterie federate run DIR --resume {self.path.name}"
            )
        model = json.loads(data["model"])
        if model["model"] == CUSTOM:
            raise RunError(
                f"{self.path} trains a module of your own: go on from Python with coterie.resume(path, fed)"
            )
        options = {name: value for name, value in data.items() if name != "model"}
        return load_table(**options, model=from_description(model), **drawn)

    def check_same(self, fed: Federation, anyway: bool) -> None:
        """Refuse to go on with other data, or (unless `anyway`) in another environment."""
        if self.config["federation"]["rows_sha256"] != fingerprint(fed):
            raise RunError(f"the data of {self.path} have changed since the run began; start a new run")
        recorded, now = files.read_json(self.path / "environment.json"), environment(fed)
        differing = {k: (recorded.get(k), now[k]) for k in EXACT if recorded.get(k) != now[k]}
        if differing and not anyway:
            changes = ", ".join(f"{name}: {old} then, {new} now" for name, (old, new) in differing.items())
            raise RunError(
                f"{self.path} cannot be resumed bit for bit here ({changes}). Use the same setting, or pass --anyway."
            )

    def can_write_tables(self) -> bool:
        """Without polars a run ends with a checkpoint, and `coterie resume` writes the tables elsewhere."""
        return importlib.util.find_spec("polars") is not None

    def finish(self, run: Run) -> None:
        """Models, tables and, last, the result that marks the run as complete."""
        from coterie.runs.adapt import save_state
        from coterie.runs.predict import save_models
        from coterie.runs.roster import Roster

        save_models(self.path / "models", run)
        save_state(self.path, run.state)
        Roster.of(run.fed).save(self.path)
        traces = run.history.traces(run.fed.n)
        if traces:
            files.write_tensors(self.path / "traces.safetensors", traces)
        if importlib.util.find_spec("plotly") is not None:
            from coterie.report.weights import save_weights

            title = f"{run.algorithm.name}: weights between clients"
            save_weights(self.path / "weights.html", run.history, run.fed.names, run.fed.clusters, title)
        if not self.can_write_tables():
            return
        files.write_with(self.path / "metrics.parquet", run.metrics.write_parquet)
        files.write_with(self.path / "ledger.parquet", run.ledger.write_parquet)
        files.write_json(
            self.path / RESULT,
            {
                "rounds": run.rounds,
                "deployed_round": run.deployed_round,
                "lost_rounds": run.lost_rounds,
                "left_out": run.left_out,
                "seconds": round(run.seconds, 3),
            },
        )


def _is_run(path: Path) -> bool:
    try:
        RunFolder.open(path)
    except RunError:
        return False
    return True


EXACT = ("torch", "threads", "device", "dtype", "stack")


def environment(fed: Federation) -> dict[str, Any]:
    """Versions and machine; the entries named in EXACT decide the last bits of floating-point sums."""
    return {
        "coterie": coterie.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": max(torch.get_num_threads(), getattr(fed.runtime, "workers", 1)),
        "device": str(fed.device),
        "dtype": str(fed.dtype),
        "stack": fed.runtime.stack_size(0),
        "machine": f"{platform.system()} {platform.machine()}",
    }


def fingerprint(fed: Federation) -> str:
    """Hash of the training rows, who owns them, and what their columns and classes are called."""
    digest = hashlib.sha256("\n".join(fed.names).encode())
    if fed.table is not None:
        digest.update(fed.table.preprocessor.to_json().encode())
    for tensor in fed.runtime.data_tensors():
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

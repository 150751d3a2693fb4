"""A run on disk: config.toml, environment.json, clients.json, metrics.parquet, ledger.parquet, checkpoint/, models/."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import coterie
from coterie._core import files
from coterie._core.errors import RunError, SettingError
from coterie._core.manifest import MANIFEST
from coterie.algorithms import Algorithm, make
from coterie.engine.federation import Federation
from coterie.models.base import Model
from coterie.models.description import CUSTOM, description, from_description
from coterie.train.blend import Blended

RESULT = "result.json"


class RunFolder:
    """The folder of a run.

    Parameters
    ----------
    path
        The folder. Use `create` for a new run and `open` for an existing one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoint"

    @staticmethod
    def require_free(path: Path) -> None:
        """Raise `RunError` if something exists there (a run is never overwritten) or nothing can be written.

        What a run left that was killed before it had settings is nothing.
        """
        if path.exists() and (not path.is_dir() or not all(map(_is_remnant, path.iterdir()))):
            resume = f", or go on with `coterie resume {path}`" if _is_run(path) else ""
            raise RunError(f"{path} exists already. Choose another folder, or delete it{resume}.")
        files.require_writable(path / "config.toml")

    @classmethod
    def create(cls, path: Path, fed: Federation, algorithm: Algorithm, plan: dict[str, Any]) -> RunFolder:
        """Create a folder and write the settings of a run into it.

        Parameters
        ----------
        path
            The folder to create.
        fed, algorithm
            What is trained on, and how.
        plan
            Rounds and further arguments of `fit`.
        """
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
        files.seal(path, "config.toml", files.as_toml(config))
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open a run folder; raise `RunError` if it is not one, or is of a newer version."""
        if not (path / "config.toml").exists():
            what = "is not a run folder: it has no config.toml" if path.exists() else "does not exist"
            raise RunError(f"{path} {what}. Name the folder that `coterie fit --out` made.")
        folder = cls(path)
        config = folder.config
        if _minor(folder.version) > _minor(coterie.__version__):
            raise RunError(
                f"{path} was written by coterie {folder.version}, which is newer than this one "
                f"({coterie.__version__}). Open it with: pip install coterie=={folder.version}"
            )
        if "compare" in config:
            runs = sorted(str(run.parent) for run in path.glob("*/config.toml"))
            raise RunError(f"{path} holds a comparison. Name one of its runs: {', '.join(runs)}")
        missing = [table for table in ("algorithm", "plan", "federation") if table not in config]
        if missing:
            raise RunError(
                f"{path}/config.toml is damaged: it has no [{missing[0]}]. Restore it from a copy."
            )
        return folder

    @property
    def version(self) -> str:
        """Version of coterie that wrote the folder."""
        return str(self.config.get("coterie", "of an unknown version"))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn errors in reading the folder into one line that names the version and the remedy."""
        try:
            yield
        except (SettingError, KeyError, TypeError, ValueError, AttributeError) as problem:
            if self.version != coterie.__version__:
                raise RunError(
                    f"{self.path} was written by coterie {self.version}, and coterie {coterie.__version__} cannot "
                    f"read it ({_reason(problem)}). Open it with: pip install coterie=={self.version}"
                ) from problem
            if isinstance(problem, SettingError):
                raise
            raise RunError(
                f"{self.path} cannot be read ({_reason(problem)}): it is damaged. Restore it from a copy, or train "
                "again."
            ) from problem

    def sweep(self) -> None:
        """Remove half-written files of a run that was killed."""
        for temporary in self.path.rglob("*.tmp"):
            temporary.unlink(missing_ok=True)

    @property
    def config(self) -> dict[str, Any]:
        """Contents of config.toml."""
        return files.read_toml(self.path / "config.toml")

    def algorithm(self) -> Algorithm:
        """Return the algorithm of the run."""
        settings = dict(self.config["algorithm"])
        name = settings.pop("name")
        return Blended(**settings) if name == Blended.name else make(name, **settings)

    def plan(self) -> dict[str, Any]:
        """Return rounds and further arguments of `fit`."""
        return dict(self.config["plan"])

    def finished(self) -> bool:
        """Return True if the run is complete."""
        return (self.path / RESULT).exists()

    def federation(self, device: str | None = None, model: Model | None = None) -> Federation:
        """Return the federation of the run, read again from its table or texts.

        Parameters
        ----------
        device
            Where to compute; by default where the run did.
        model
            The model, where it was a module of your own.
        """
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
        described = json.loads(data["model"])
        if model is None and described["model"] == CUSTOM:
            raise RunError(
                f"{self.path} trains a module of your own: go on from Python with coterie.resume(path, fed)"
            )
        if not data["source"]:
            raise RunError(
                f"{self.path} was made from a data frame, which is not here; make the federation again from it"
            )
        options = {name: value for name, value in data.items() if name != "model"}
        place = files.read_json(self.path / "environment.json")["device"] if device is None else device
        return Federation.from_table(
            **options,
            model=from_description(described) if model is None else model,
            device=place,
            **drawn,
        )

    def check_rows(self, fed: Federation) -> None:
        """Raise `RunError` if these are not the rows that the run was trained on."""
        if self.config["federation"]["rows_sha256"] != fingerprint(fed):
            raise RunError(f"the data of {self.path} have changed since the run began; start a new run")

    def check_same(self, fed: Federation, anyway: bool) -> None:
        """Raise `RunError` if the data have changed or, unless `anyway`, the environment has."""
        self.check_rows(fed)
        recorded, now = {"processes": 1, **files.read_json(self.path / "environment.json")}, environment(fed)
        differing = {k: (recorded.get(k), now[k]) for k in EXACT if recorded.get(k) != now[k]}
        if differing and not anyway:
            changes = ", ".join(f"{name}: {old} then, {new} now" for name, (old, new) in differing.items())
            raise RunError(
                f"{self.path} cannot be resumed bit for bit here ({changes}). Use the same setting, or pass --anyway."
            )

    def can_write_tables(self) -> bool:
        """Return False without polars: the run then ends with a checkpoint, to be resumed elsewhere."""
        return importlib.util.find_spec("polars") is not None


def _minor(version: str) -> list[int]:
    """Return the first two numbers of a version: within them the layout of a folder stays as it is."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _reason(problem: Exception) -> str:
    return f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)


def _is_remnant(path: Path) -> bool:
    """Return True for a file that `create` writes before config.toml, in a folder that has none."""
    begun = path.name in ("environment.json", MANIFEST) or path.name.endswith(".tmp")
    return begun and path.is_file() and not (path.parent / "config.toml").exists()


def _is_run(path: Path) -> bool:
    try:
        RunFolder.open(path)
    except RunError:
        return False
    return True


EXACT = ("coterie", "torch", "threads", "processes", "device", "dtype", "stack")


def environment(fed: Federation) -> dict[str, Any]:
    """Return versions and machine; the entries named in EXACT decide the last bits of floating-point sums."""
    return {
        "coterie": coterie.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": max(torch.get_num_threads(), fed.runtime.workers),
        "processes": fed.runtime.processes,
        "device": str(fed.device),
        "dtype": str(fed.dtype),
        "stack": fed.runtime.stack_size(0),
        "machine": f"{platform.system()} {platform.machine()}",
    }


def fingerprint(fed: Federation) -> str:
    """Return a hash of the rows, of who owns them, and of the names of columns and classes."""
    digest = hashlib.sha256("\n".join(fed.names).encode())
    if fed.table is not None:
        digest.update(fed.table.preprocessor.to_json().encode())
    for tensor in fed.runtime.data_tensors():
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

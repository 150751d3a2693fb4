"""`coterie.load`: a finished run from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie._core import files
from coterie._core.errors import RunError
from coterie.data.preprocess import Preprocessor
from coterie.data.table_source import TableSource
from coterie.engine.federation import Federation
from coterie.engine.ledger import COUNTS, Entry
from coterie.models.base import Model
from coterie.models.description import CUSTOM, from_description
from coterie.models.metrics import find, lookup
from coterie.models.table_models import as_model
from coterie.train.folder import RESULT, RunFolder
from coterie.train.history import History
from coterie.train.predict import fitted_to
from coterie.train.roster import RunRoster
from coterie.train.run import REFIT, Run
from coterie.train.save import SCORED, load_state


class RecordedFederation(Federation):
    """The federation of a run folder. Its rows are read from their table when something asks for them."""

    def __init__(self, folder: RunFolder, **known: Any) -> None:
        super().__init__(None, **known)  # type: ignore[arg-type]  # __getattr__ opens the runtime
        self._folder, self._stays = folder, bool(folder.config.get("data", {}).get("federated"))
        del self.runtime

    @property
    def models_stay(self) -> bool:
        """Whether the models of the run are on the nodes of its clients."""
        return self._stays

    def __getattr__(self, name: str) -> Any:
        if name != "runtime":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with self._folder.reading():
            opened = self._folder.federation(device="cpu", model=self.model)
        self._folder.check_rows(opened)
        self.runtime = opened.runtime
        return self.runtime


def load(path: str | Path, model: Model | None = None) -> Run:
    """Load a finished run from its folder.

    Predictions, exports, reports and recorded metrics need the folder alone. Other metrics need the rows: the table
    is then read again from where it was, and its hash is compared with the recorded one.

    Parameters
    ----------
    path
        A finished run folder, as `fit(..., out=...)` or `coterie fit --out` made it.
    model
        The model, where it was a module of your own.

    Returns
    -------
    Run
        As `fit` returned it.

    Raises
    ------
    RunError
        The folder holds no finished run, or is damaged.

    Examples
    --------
    >>> import tempfile, coterie
    >>> fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = coterie.fit(fed, "ditto", rounds=2, out=f"{folder}/run")
    ...     same = coterie.load(f"{folder}/run")
    >>> same.score("test", "accuracy").equal(run.score("test", "accuracy"))
    True
    >>> same.predict("heart_disease").equals(run.predict("heart_disease"))
    True
    """
    folder = RunFolder.open(Path(path))
    if "adapt" in folder.config:
        raise RunError(
            f"{path} holds adapted models; use coterie.train.predict.Predictor.load or `coterie predict`"
        )
    if not folder.finished():
        raise RunError(f"{path} is not finished; go on with coterie.resume({str(path)!r})")
    with folder.reading():
        return _read(folder, model)


def _read(folder: RunFolder, model: Model | None) -> Run:
    path, config, plan = folder.path, folder.config, folder.plan()
    result, roster = files.read_json(path / RESULT), RunRoster.load(path)
    if not (path / "models" / "model.json").exists() or roster is None:
        raise RunError(f"{path} has no models: they are on the nodes of the clients, or of an older version")
    note = files.read_json(path / "models" / "model.json")
    tensors, _ = files.read_tensors(path / "models" / "models.safetensors", note["sha256"])
    preprocessor = None if note["preprocessor"] is None else Preprocessor.from_json(note["preprocessor"])
    fed = RecordedFederation(
        folder,
        model=_model(folder, note, preprocessor, model),
        names=roster.names,
        rows={split: torch.tensor(count) for split, count in roster.rows.items()},
        clusters=None if roster.clusters is None else torch.tensor(roster.clusters),
        cluster_names=roster.cluster_names,
        seed=config["federation"]["seed"],
        dropout=config["federation"]["dropout"],
        dtype=tensors["common"].dtype,
        table=None if preprocessor is None else TableSource(config.get("data", {}), preprocessor),
        texts=config.get("texts"),
    )
    for row in files.read_parquet(path / "ledger.parquet").iter_rows(named=True):
        entry = Entry(row["round"], row["kind"], row["phase"], row["link"])
        fed.ledger.entries[entry] = [row[name] for name in COUNTS]
    place = {name: k for k, name in enumerate(roster.names)}
    fed.left_out = [(int(t), place[name], str(why)) for t, name, why in result["left_out"]]
    fed.shortened = [(int(t), place[name], str(phase)) for t, name, phase in result.get("shortened", ())]
    traces, before = path / "traces.safetensors", path / "models" / SCORED
    seen = tuple(result.get("trained_on", ("train",)))
    further = [plan["metric"]] if "metric" in plan else []
    return Run(
        fed=fed,
        algorithm=folder.algorithm(),
        personal=tensors["personal"],
        state=load_state(path),
        history=_history(
            files.read_parquet(path / "metrics.parquet"),
            roster.names,
            files.read_tensors(traces)[0] if traces.exists() else {},
        ),
        rounds=result["rounds"],
        deployed_round=result["deployed_round"],
        lost_rounds=result["lost_rounds"],
        seconds=result["seconds"],
        folder=path,
        metric=plan.get("metric"),
        further=tuple(find(name) for name in [*further, *plan.get("metrics", ())] if lookup(name)),
        refit=next((which for which, splits in REFIT.items() if splits == seen), "none"),
        scored=files.read_tensors(before)[0]["personal"] if before.exists() else None,
    )


def _model(
    folder: RunFolder, note: dict[str, Any], preprocessor: Preprocessor | None, model: Model | None
) -> Model:
    if model is None and note["model"]["model"] == CUSTOM:
        raise RunError(f"{folder.path} holds a module of your own: coterie.load(path, model=...)")
    if model is None:
        return from_description(note["model"])
    return as_model(model) if preprocessor is None else fitted_to(as_model(model), preprocessor)


def _history(frame: Any, names: list[str], traces: dict[str, Tensor]) -> History:
    """Return the history that metrics.parquet and traces.safetensors record."""
    place = {name: k for k, name in enumerate(names)}
    blocks: list[tuple[int, str, str, Tensor]] = []
    for (t, split, metric), part in frame.group_by("round", "split", "metric", maintain_order=True):
        if part["client"][0] is None:
            value = torch.tensor(part["value"][0], dtype=torch.float64)
        else:
            known = np.full(len(names), np.nan)
            known[[place[name] for name in part["client"]]] = part["value"].to_numpy()
            value = torch.from_numpy(known)
        blocks.append((t, split, metric, value))
    for name, value in traces.items():
        metric, _, t = name.rpartition(".")
        blocks.append((int(t), "server", metric, value.double()))
    return History(blocks)

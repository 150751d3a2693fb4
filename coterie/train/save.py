"""Write a finished run into its folder: models, state, tables and, last, the result that marks it complete."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie._core import files
from coterie.engine.state import State
from coterie.models.description import description
from coterie.train import private
from coterie.train.baseline import Baseline
from coterie.train.drift import Drift
from coterie.train.folder import RESULT, RunFolder
from coterie.train.predictions import Predictions
from coterie.train.roster import RunRoster
from coterie.train.uncertainty import save_errors

if TYPE_CHECKING:
    import polars

    from coterie.train.run import Run

TEST_ROWS = "test_rows.parquet"
SCORED = "scored.safetensors"  # models before refitting, which scores are about


def save_run(folder: RunFolder, run: Run) -> None:
    """Write models, state, tables and, last, the result, which marks the run as complete."""
    save_models(folder.path / "models", run)
    save_state(folder.path, run.state)
    RunRoster.of(run.fed).save(folder.path)
    Predictions.save_those_of(run, folder.path)
    drift = Drift.of(run)
    if drift is not None:
        drift.save(folder.path)
    if run.fed.promised is None:  # they are computed from training rows, without noise
        save_errors(run, folder.path)
    traces = run.history.traces(run.fed.n)
    if traces:
        files.write_tensors(folder.path / "traces.safetensors", traces)
    if not folder.can_write_tables():
        return
    files.write_with(folder.path / "metrics.parquet", run.metrics.write_parquet)
    files.write_with(folder.path / "ledger.parquet", run.ledger.write_parquet)
    if run.test_rows:
        files.write_with(folder.path / TEST_ROWS, test_rows(run).write_parquet)
    spent = private.report(run.fed)
    if spent is not None:
        files.write_json(folder.path / "privacy.json", spent)
    result = {
        "rounds": run.rounds,
        "deployed_round": run.deployed_round,
        "lost_rounds": run.lost_rounds,
        "left_out": run.left_out,
        "seconds": round(run.seconds, 3),
        "trained_on": list(run.trained_on),
    }
    if run.shortened:
        result["shortened"] = run.shortened
    if run.own is not None:
        result["guard"] = {"clients": [run.fed.names[k] for k in run.own.clients], **run.own.effect}
    files.seal(folder.path, RESULT, files.as_json(result))


def test_rows(run: Run) -> polars.DataFrame:
    """Return the value of every test row in each metric that is a mean over rows, with the index of its client."""
    import polars

    client = torch.repeat_interleave(run.fed.rows["test"].cpu())
    return polars.DataFrame(
        {"client": client.numpy(), **{name: values.numpy() for name, values in run.test_rows.items()}}
    )


def save_models(folder: Path, run: Run) -> None:
    """Write models.safetensors (personal [n, d], common [d]) and model.json (what the numbers mean).

    Where models stay with the clients, only the common one is written, if the method has one.
    """
    names, personal = run.fed.names, run.personal
    if run.fed.models_stay:
        if run.algorithm.common(run.fed, run.state) is None:
            return
        names, personal = [], torch.empty(0, run.fed.d, dtype=run.fed.dtype)
    files.write_tensors(folder / "models.safetensors", {"personal": personal, "common": run.common()})
    if run.scored is not None and not run.fed.models_stay:
        files.write_tensors(folder / SCORED, {"personal": run.scored})
    table = run.fed.table
    for scored in (False, True):
        baseline = Baseline.of(run, scored=scored)
        if baseline is not None:
            baseline.save(folder, scored)
    files.write_json(
        folder / "model.json",
        {
            "algorithm": run.algorithm.name,
            "trained_on": list(run.trained_on),
            "sha256": files.sha256(folder / "models.safetensors"),
            "clients": names,
            "client_column": table.options["client"] if table is not None else None,
            "model": description(run.fed.model),
            "preprocessor": table.preprocessor.to_json() if table is not None else None,
        },
    )


def save_state(folder: Path, state: State) -> None:
    """Write the server's state when models were deployed, from which newcomers start."""
    numbers = {name: value for name, value in state.fields().items() if not isinstance(value, Tensor)}
    files.write_tensors(folder / "models" / "state.safetensors", state.tensors(), numbers)


def load_state(folder: Path) -> State:
    """Return what `save_state` wrote; empty for a run of a version that wrote none."""
    path = folder / "models" / "state.safetensors"
    if not path.exists():
        return State()
    tensors, numbers = files.read_tensors(path)
    return State(**tensors, **numbers)

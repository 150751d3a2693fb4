"""A model that all clients share is one row in files: run folders, checkpoints, and what reads them."""

from __future__ import annotations

import shutil
from pathlib import Path

import polars
import pytest
import torch

import coterie
from coterie._core import broadcast, files
from coterie.algorithms import make
from coterie.report.collaboration import explain
from coterie.report.facts import read_runs
from coterie.train import checkpoint
from coterie.train.adapt import adapt
from coterie.train.exported_model import ExportedModel
from coterie.train.predict import Predictor

CLIENTS, ROWS = 40, 10


@pytest.fixture(scope="module")
def table() -> polars.DataFrame:
    x = torch.randn(CLIENTS * ROWS, 4, generator=torch.Generator().manual_seed(0))
    columns = {f"x{k}": x[:, k].numpy() for k in range(4)}
    names = [f"c{k}" for k in range(CLIENTS) for _ in range(ROWS)]
    return polars.DataFrame({"who": names, **columns, "y": (x.sum(1) > 0).int().numpy()})


def federation(table: polars.DataFrame) -> coterie.Federation:
    return coterie.Federation.from_table(table, client="who", target="y", model=coterie.models.mlp((8,)))


@pytest.fixture(scope="module", params=["last", "best"])
def run(
    table: polars.DataFrame, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> coterie.Run:
    out = tmp_path_factory.mktemp("runs") / request.param
    algorithm = make("fedavg", batch=4, lr=0.1)
    return coterie.fit(
        federation(table), algorithm, 4, evaluate_every=1, select=request.param, out=out, checkpoint_every=1
    )


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    own, note = torch.randn(50, 3), {"a": [1]}
    written = {"row": torch.randn(1000).expand(50, 1000), "number": torch.tensor(2.0).expand(50), "own": own}
    files.write_tensors(tmp_path / "x.safetensors", written, note)
    assert (tmp_path / "x.safetensors").stat().st_size < 8000
    read, noted = files.read_tensors(tmp_path / "x.safetensors")
    assert noted == note and all(torch.equal(read[name], value) for name, value in written.items())
    assert (
        broadcast.is_broadcast(read["row"])
        and broadcast.is_broadcast(read["number"])
        and not broadcast.is_broadcast(read["own"])
    )


def test_models_and_checkpoint_hold_it_once(run: coterie.Run) -> None:
    assert run.folder is not None
    row = run.personal.element_size() * run.fed.d
    assert (run.folder / "models" / "models.safetensors").stat().st_size < 3 * row + 500 < CLIENTS * row
    progress = checkpoint.load(run.folder / "checkpoint", run.fed.fresh())
    assert progress is not None and (progress.best.personal is None) == (run.folder.name == "last")
    assert progress.best.personal is None or broadcast.is_broadcast(progress.best.personal)


def test_a_stopped_run_ends_with_the_same_file(run: coterie.Run, table: polars.DataFrame) -> None:
    assert run.folder is not None
    models = run.folder / "models" / "models.safetensors"
    before = models.read_bytes()
    for path in (models, run.folder / "result.json"):
        path.unlink()
    again = coterie.resume(run.folder, federation(table))
    assert (
        models.read_bytes() == before
        and torch.equal(again.personal, run.personal)
        and broadcast.is_broadcast(again.personal)
    )


@pytest.mark.slow
def test_everybody_is_served_from_it(run: coterie.Run, table: polars.DataFrame, tmp_path: Path) -> None:
    """Known and unknown clients, one who takes its model away, and newcomers."""
    assert run.folder is not None
    predictor = Predictor.load(run.folder)
    assert broadcast.is_broadcast(predictor.personal) and torch.equal(predictor.personal, run.personal)
    unknown = predictor(table.with_columns(who=polars.lit("nobody")))
    assert predictor(table)["probability_1"].equals(unknown["probability_1"])
    assert torch.equal(ExportedModel.load(run.folder, "c7").weights, run.personal[7])
    newcomers = table.with_columns(who="new " + polars.col("who"))
    saved = adapt(run.folder, newcomers).save(tmp_path / "adapted", run.folder)
    everybody = Predictor.load(saved).personal
    assert everybody.shape == (2 * CLIENTS, run.fed.d) and torch.equal(everybody[:CLIENTS], run.personal)


def test_the_report_sees_one_model(run: coterie.Run, tmp_path: Path) -> None:
    """In single precision too, where a copy in double would be one for each client."""
    assert run.folder is not None
    folder = Path(shutil.copytree(run.folder, tmp_path / "single"))
    row = run.personal[0].float()
    files.write_tensors(folder / "models" / "models.safetensors", {"personal": row.expand_as(run.personal)})
    (folder / "manifest.json").unlink()
    (facts,) = read_runs([folder])
    assert facts.personal is not None and facts.personal.shape == run.personal.shape
    assert facts.personal.strides[0] == 0 and (facts.personal[-1] == row.double().numpy()).all()
    assert "one and the same model" in explain(facts)

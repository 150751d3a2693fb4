"""Damage in a run folder: every changed byte of every file is noticed where the file is read, and named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import coterie
from coterie._core.errors import RunError
from coterie.report.page import write_report
from coterie.train.export import export
from coterie.train.predict import Predictor

if TYPE_CHECKING:
    from tests.conftest import Command, WriteTable


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, write_table: WriteTable) -> Path:
    """A table and a run."""
    folder = tmp_path_factory.mktemp("made")
    table = write_table(folder / "table.csv", "binary")
    fed = coterie.Federation.from_table(table, "site", "y", drop=["region"])
    coterie.fit(fed, "ditto", rounds=2, out=folder / "run")
    return folder


def make(folder: Path, name: str) -> Path:
    """A folder of this kind beside the table: the run, a run of `auto`, or a comparison."""
    table = folder / "table.csv"
    if name == "auto":
        fed = coterie.Federation.from_table(table, "site", "y", drop=["region"])
        coterie.fit(fed, "auto", rounds=3, out=folder / "auto")
    elif name == "all":
        few = {"seeds": 1, "rounds": 2, "budget": 1, "algorithms": []}
        coterie.compare(table, "site", "y", out=folder / "all", **few)
    return folder / name


def read(folder: Path, file: str) -> None:
    """Read a folder with everything that reads it, into files that are not in it."""
    if file in ("models/model.json", "models/models.safetensors"):
        Predictor.load(folder)
        export(folder, None, "csv", folder.parent / "model.csv")
    elif file == "models/state.safetensors":
        from coterie.train.save import load_state

        load_state(folder)
    elif file == "models/scored.safetensors":
        coterie.load(folder)
    else:
        write_report([folder], folder.parent / "report.html")


@pytest.mark.parametrize("name", ["run", pytest.param("auto", marks=pytest.mark.slow), "all"])
def test_every_file_is_listed_and_checked(made: Path, name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make(made, name), tmp_path / name))
    listed = json.loads((folder / "manifest.json").read_text())["sha256"]
    inside = folder.glob("models/*") if name != "all" else ()
    there = {path.relative_to(folder).as_posix() for path in (*folder.glob("*"), *inside) if path.is_file()}
    assert set(listed) == there - {"manifest.json"}
    read(folder, "metrics.parquet")
    for file in listed:
        if file == "traces.safetensors" or (name == "all" and file in ("environment.json", "config.toml")):
            continue  # nothing reads them
        path, whole = folder / file, (folder / file).read_bytes()
        middle = len(whole) // 2
        for damaged in (
            whole[:middle],
            whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            b"",
        ):
            path.write_bytes(damaged)
            with pytest.raises(RunError, match=rf"{path.name} is damaged.*(Restore|again)"):
                read(folder, file)
        path.write_bytes(whole)


@pytest.mark.parametrize("file", ["ledger.parquet", "metrics.parquet"])
def test_load_notices_a_changed_byte_of_a_table(made: Path, tmp_path: Path, file: str) -> None:
    folder = Path(shutil.copytree(made / "run", tmp_path / "run"))
    content = bytearray((folder / file).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / file).write_bytes(content)
    with pytest.raises(RunError, match=f"{file} is damaged"):
        coterie.load(folder)


def test_a_damaged_manifest_is_named_and_one_that_is_missing_is_not_asked_for(
    made: Path, tmp_path: Path, command: Command
) -> None:
    folder = Path(shutil.copytree(made / "run", tmp_path / "run"))
    for text in ("", "{", "[]", '{"sha256": 3}', "[" * 10_000):
        (folder / "manifest.json").write_text(text)
        outcome = command("predict", folder, made / "table.csv")
        assert outcome.code == 2 and "manifest.json is damaged" in outcome.err, outcome
    (folder / "manifest.json").unlink()
    assert command("predict", folder, made / "table.csv").code == 0

"""Run folders that version 0.1.0 wrote before its modules were moved; what cannot be read says why in one line."""

import shutil
from pathlib import Path

import polars
import pytest
import torch

import coterie
from coterie import Federation, fit, resume
from coterie._core import files
from coterie._core.errors import CoterieError, RunError
from coterie.algorithms import make
from coterie.data import bundled, tables
from coterie.report.page import write_report
from coterie.train.adapt import adapt
from coterie.train.export import export
from coterie.train.predict import Predictor

VERSION = "0.1.0"
OLD = Path(__file__).parent / f"runs-{VERSION}"


@pytest.fixture()
def old(tmp_path):
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def heart(rounds):
    fed = Federation.from_table("heart_disease", client="hospital", target="sick")
    return fit(fed, make("fedavg", lr=0.1), rounds)


def test_an_old_run_predicts_and_exports(old):
    fresh, known = heart(3), Predictor.load(old / "finished")
    assert known.clients == fresh.fed.names
    assert torch.allclose(known.personal, fresh.personal, rtol=1e-9, atol=1e-12)
    assert export(old / "finished", known.clients[0], "csv").exists()


def test_an_old_run_is_reported(old):
    write_report([old / "finished"], old / "report.html")
    assert "cleveland" in (old / "report.html").read_text()


def test_an_old_run_is_loaded(old):
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    known, fresh = coterie.load(old / "finished"), heart(3)
    assert torch.allclose(known.score("test", "accuracy"), fresh.score("test", "accuracy"))
    assert known.ledger.equals(fresh.ledger)
    assert before == {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}


def test_an_old_run_is_adapted(old):
    """To the rows of one of its hospitals under another name, as a run of today is."""
    table = tables.read(bundled.path("heart_disease")).filter(polars.col("hospital") == "cleveland").head(60)
    newcomer = table.with_columns(hospital=polars.lit("elsewhere"))
    heart(3).save(old / "fresh")
    known, fresh = adapt(old / "finished", newcomer), adapt(old / "fresh", newcomer)
    assert known.names == fresh.names == ["elsewhere"]
    assert torch.allclose(known.models, fresh.models, rtol=1e-9, atol=1e-12)


def test_an_old_run_is_resumed(old):
    again, whole = resume(old / "interrupted", anyway=True), heart(5)
    assert torch.allclose(again.personal, whole.personal, rtol=1e-9, atol=1e-12)
    assert again.fed.ledger.entries == whole.fed.ledger.entries
    assert resume(old / "finished", anyway=True).deployed_round == 3


def test_a_run_of_another_version_is_not_resumed_unasked(old):
    """Random draws may differ between versions, so the result would be that of neither."""
    with pytest.raises(RunError, match=r"coterie: 0\.1\.0 then, .*--anyway"):
        resume(old / "interrupted")


def rewrite(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_run_of_a_newer_version_is_named(old):
    rewrite(old / "finished" / "config.toml", VERSION, "9.1.0")
    for read in (resume, Predictor.load):
        with pytest.raises(RunError, match=r"written by coterie 9\.1\.0, which is newer.*coterie==9\.1\.0$"):
            read(old / "finished")


@pytest.mark.parametrize(
    ("file", "there", "instead"),
    [
        ("models/model.json", "preprocessor", "encoding"),
        ("models/model.json", '"model": "logistic"', '"model": "logit"'),
    ],
)
def test_models_that_an_older_version_wrote_otherwise(old, file, there, instead):
    rewrite(old / "finished" / file, there, instead)
    rewrite(old / "finished" / "config.toml", VERSION, coterie.__version__)
    with pytest.raises(CoterieError, match=r"finished cannot be read .*damaged|no model 'logit'"):
        Predictor.load(old / "finished")
    rewrite(old / "finished" / "config.toml", coterie.__version__, "0.0.7")
    with pytest.raises(
        RunError, match=r"written by coterie 0\.0\.7, and .*pip install coterie==0\.0\.7$"
    ) as found:
        Predictor.load(old / "finished")
    assert "\n" not in str(found.value)


def test_settings_that_an_older_version_wrote_otherwise(old):
    path = old / "interrupted" / "config.toml"
    rewrite(path, f'coterie = "{VERSION}"', 'coterie = "0.0.7"')
    rewrite(path, "server_lr = 1.0", "attraction = 1.0")
    with pytest.raises(RunError, match=r"coterie 0\.0\.7, and .*'attraction'.*coterie==0\.0\.7$"):
        resume(old / "interrupted")


def test_tables_that_an_older_version_wrote_otherwise(old):
    rewrite(old / "finished" / "config.toml", f'coterie = "{VERSION}"', 'coterie = "0.0.7"')
    note = files.read_json(old / "finished" / "clients.json")
    files.write_json(old / "finished" / "clients.json", {**note, "shape": 3})
    with pytest.raises(RunError, match=r"written by coterie 0\.0\.7"):
        write_report([old / "finished"], old / "report.html")

"""Run folders of trees: predict, export to every format, adapt, report, the command line."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import torch
from typer.testing import CliRunner

import coterie
from coterie import models
from coterie.cli import app
from coterie.data import bundled, tables
from coterie.train.adapt import adapt
from coterie.train.export import export
from coterie.train.predict import Predictor

CLIENT = "cleveland"


def hearts() -> pl.DataFrame:
    return tables.read(bundled.path("heart_disease"))


@pytest.fixture(scope="module", params=[False, True], ids=["leaves", "profile"])
def run(request, tmp_path_factory):
    known = hearts().filter(pl.col("hospital") != "va")
    fed = coterie.Federation.from_table(known, "hospital", "sick", model=models.trees(10, 8))
    folder = tmp_path_factory.mktemp("trees") / "run"
    method = coterie.algorithms.BoostedTrees(leaves=8, profile=request.param)
    return coterie.fit(fed, method, rounds=10, out=folder)


@pytest.fixture(scope="module")
def rows() -> pl.DataFrame:
    return hearts().filter(pl.col("hospital") == CLIENT)


@pytest.fixture(scope="module")
def expected(run, rows):
    """Probability of the second class by the client's model, from the run in memory."""
    return run.model(CLIENT)(run.fed.table.preprocessor.encode(rows))[:, 1].numpy()


def test_a_loaded_predictor_is_the_run(run, rows, expected):
    found = Predictor.load(run.folder)(rows)
    assert np.abs(found["probability_1"].to_numpy() - expected).max() < 1e-12


def test_lightgbm_loads_the_client_model_and_its_shap_values_add_up(run, rows, expected):
    lgb = pytest.importorskip("lightgbm")
    booster = lgb.Booster(model_file=str(export(run.folder, CLIENT, "lightgbm")))
    x = run.fed.table.preprocessor.encode(rows).numpy()
    assert np.abs(booster.predict(x) - expected).max() < 1e-6
    shap = booster.predict(x, pred_contrib=True)
    assert np.abs(shap.sum(1) - booster.predict(x, raw_score=True)).max() < 1e-9
    assert np.abs(shap[:, :-1]).max() > 0.01
    assert booster.feature_name() == run.fed.table.preprocessor.feature_names


def columns(run, rows):
    preprocessor = run.fed.table.preprocessor
    numbers = {
        s.name: rows[s.name].cast(float).fill_null(float("nan")).to_numpy() for s in preprocessor.scales
    }
    texts = {c.name: rows[c.name].cast(str).fill_null("").to_list() for c in preprocessor.choices}
    return numbers, texts


@pytest.mark.slow
def test_onnx_takes_raw_columns(run, rows, expected):
    runtime = pytest.importorskip("onnxruntime")
    numbers, texts = columns(run, rows)
    session = runtime.InferenceSession(str(export(run.folder, CLIENT, "onnx")))
    feeds = {name: value.reshape(-1, 1) for name, value in numbers.items()}
    feeds |= {name: np.array(value, dtype=object).reshape(-1, 1) for name, value in texts.items()}
    assert np.abs(session.run(None, feeds)[0][:, 1] - expected).max() < 1e-9


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_takes_raw_columns(run, rows, expected):
    numbers, texts = columns(run, rows)
    module = torch.jit.load(str(export(run.folder, CLIENT, "torchscript")))
    found = module({name: torch.tensor(value) for name, value in numbers.items()}, texts)
    assert np.abs(found[:, 1].numpy() - expected).max() < 1e-12


def test_linear_formats_are_refused_with_a_remedy(run):
    with pytest.raises(coterie.CoterieError, match="only linear"):
        export(run.folder, CLIENT, "csv")


def test_a_newcomer_gets_leaves_of_its_own(run):
    found = adapt(run.folder, hearts().filter(pl.col("hospital") == "va"))
    assert found.names == ["va"] and found.models.shape == (1, run.fed.d)
    assert not torch.equal(found.models[0], run.common())
    same = torch.equal(
        found.models[0][run.fed.model.groups["body"]], run.common()[run.fed.model.groups["body"]]
    )
    assert same or run.algorithm.profile
    assert all(np.isfinite(score[0]) for score in found.scores.values())


def test_the_command_line_makes_the_model_by_itself(tmp_path):
    words = ["fit", "heart_disease", "--client", "hospital", "--target", "sick", "--algorithm", "trees"]
    words += ["--rounds", "3", "--set", "leaves=4", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert Predictor.load(tmp_path / "run").model.trees == 3
    assert (tmp_path / "run" / "report.html").exists()


HEARTS = ["heart_disease", "--client", "hospital", "--target", "sick", "--model", "trees"]


def test_the_command_line_takes_the_model_trees(tmp_path):
    words = ["fit", *HEARTS, "--rounds", "3", "--out", str(tmp_path / "run")]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert Predictor.load(tmp_path / "run").model.trees == 3
    for name, remedy in (("ditto", "does not grow trees"), ("auto", "by itself")):
        done = CliRunner().invoke(app, [*words[:-1], str(tmp_path / name), "--algorithm", name])
        assert remedy in str(done.exception)
        assert not (tmp_path / name).exists()


@pytest.mark.slow
def test_trees_are_compared_with_linear_models(tmp_path):
    words = ["compare", *HEARTS, "--rounds", "3", "--budget", "2", "--out", str(tmp_path / "both")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    kinds = {
        name: Predictor.load(tmp_path / "both" / name).model.describe()["model"]
        for name in ("local", "trees")
    }
    assert kinds == {"local": "logistic", "trees": "trees"}


@pytest.mark.slow
def test_trees_are_tuned_with_room_for_all_settings(tmp_path):
    pytest.importorskip("optuna")
    words = [
        "tune",
        *HEARTS,
        "--rounds",
        "2",
        "--trials",
        "2",
        "--sampler",
        "grid",
        "--out",
        str(tmp_path / "study"),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "--algorithm trees" in done.output and "--model trees" in done.output

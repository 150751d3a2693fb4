"""A run from its folder does what the run did: predict, score, export, report."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest
import torch

import coterie
from coterie._core.errors import RunError, SettingError
from coterie.algorithms import make

if TYPE_CHECKING:
    from tests.conftest import WriteTable

KINDS = ("binary", "multiclass", "regression")


@pytest.fixture(params=KINDS)
def table(request: pytest.FixtureRequest, tmp_path: Path, write_table: WriteTable) -> Path:
    return write_table(tmp_path / "table.csv", request.param)


@pytest.fixture
def run(table: Path, tmp_path: Path) -> coterie.Run:
    fed = coterie.Federation.from_table(table, "site", "y")
    return coterie.fit(fed, make("cobo", sampling="all"), 4, tmp_path / "run", metrics=["loss"])


def test_a_loaded_run_is_the_run(run: coterie.Run, table: Path, tmp_path: Path) -> None:
    same = coterie.load(tmp_path / "run")
    assert same.personal.equal(run.personal) and same.common().equal(run.common())
    assert same.algorithm == run.algorithm and same.state.weights.equal(run.state.weights)
    assert (same.rounds, same.deployed_round, same.lost_rounds) == (4, 4, 0)
    order = ["round", "split", "metric", "client"]
    assert same.metrics.sort(order).equals(run.metrics.sort(order)) and same.ledger.equals(run.ledger)
    assert same.traffic() == run.traffic()
    assert {t for t, *_ in same.history.blocks} == {t for t, *_ in run.history.blocks}
    assert same.predict(table).equals(run.predict(table))
    assert repr(same).partition(", d =")[0] == repr(run).partition(", d =")[0]
    x = torch.randn(3, len(run.fed.table.preprocessor.feature_names), dtype=torch.float64)
    assert torch.equal(same.model("south")(x), run.model("south")(x))


def test_other_metrics_are_computed_from_the_table_if_it_is_the_same(
    run: coterie.Run, table: Path, tmp_path: Path
) -> None:
    metric = "mae" if run.fed.model.task == "regression" else "log-loss"
    expected = run.score("test", metric)
    assert coterie.load(tmp_path / "run").score("test", metric).equal(expected)
    lines = table.read_text(encoding="utf-8").splitlines()
    table.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    with pytest.raises(RunError, match="have changed"):
        coterie.load(tmp_path / "run").score("test", metric)
    table.unlink()
    gone = coterie.load(tmp_path / "run")
    with pytest.raises(coterie.CoterieError, match="no such file"):
        gone.score("test", metric)
    main = "rmse" if run.fed.model.task == "regression" else "accuracy"
    assert gone.score("test", main).equal(run.score("test", main))
    assert gone.export("safetensors", "south", tmp_path / "south.safetensors").exists()


def test_exports_and_reports_with_and_without_a_folder(table: Path, tmp_path: Path) -> None:
    fed = coterie.Federation.from_table(table, "site", "y")
    kept, loose = (coterie.fit(fed, "ditto", 3, out) for out in (tmp_path / "kept", None))
    assert kept.export("csv", "south") == tmp_path / "kept" / "exports" / "south.csv"
    apart = loose.export("csv", "south", tmp_path / "south.csv")
    assert apart.read_bytes() == kept.export("csv", "south").read_bytes()
    assert apart.read_bytes() == coterie.load(tmp_path / "kept").export("csv", "south").read_bytes()
    assert kept.report() == tmp_path / "kept" / "report.html"
    page = loose.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "not yet compared with training alone" in page
    assert coterie.load(loose.save(tmp_path / "saved")).personal.equal(kept.personal)
    with pytest.raises(SettingError, match="Did you mean 'south'"):
        loose.export("csv", "souht")


def test_tables_for_pandas_and_notebooks(tmp_path: Path, write_table: WriteTable) -> None:
    table = write_table(tmp_path / "table.csv", "binary")
    run = coterie.fit(coterie.Federation.from_table(table, "site", "y"), "ditto", 3)
    frame = run.to_pandas()
    assert frame["client"].tolist() == run.fed.names
    assert frame["test_accuracy"].tolist() == run.score("test", "accuracy").tolist()
    assert frame["train_rows"].sum() == int(run.fed.rows["train"].sum())
    assert run.to_pandas("metrics").shape == run.metrics.shape
    with pytest.raises(SettingError, match="Did you mean 'ledger'"):
        run.to_pandas("leger")
    for shown in (run._repr_html_(), run.fed._repr_html_()):
        assert shown.count("<tr>") == 5 and "[red]north" in shown and ">site<" in shown
    found = coterie.compare(table, "site", "y", algorithms=[], seeds=1, rounds=2, budget=1)
    assert "fine-tuned" in found._repr_html_() and found.verdict()[:20] in found._repr_html_()
    few = coterie.Federation.from_arrays(
        [torch.ones(4, 1)] * 3, [torch.ones(4)] * 3, coterie.models.linear(), names=["<b>", "b", "c"]
    )
    assert "&lt;b&gt;" in few._repr_html_() and "<b>" not in few._repr_html_()


def test_a_module_of_your_own_is_given_again(tmp_path: Path, write_table: WriteTable) -> None:
    table = write_table(tmp_path / "table.csv", "binary")
    width = len(coterie.Federation.from_table(table, "site", "y").table.preprocessor.feature_names)
    module = torch.nn.Linear(width, 2).double()
    fed = coterie.Federation.from_table(table, "site", "y", model=module)
    run = coterie.fit(fed, "fedavg", 2, tmp_path / "run")
    with pytest.raises(RunError, match="module of your own"):
        coterie.load(tmp_path / "run")
    same = coterie.load(tmp_path / "run", model=module)
    assert same.predict(table).equals(run.predict(table))
    assert same.score("test", "auc").equal(run.score("test", "auc"))


def test_what_is_not_a_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not exist"):
        coterie.load(tmp_path / "nowhere")
    fed = coterie.Federation.from_table("heart_disease", "hospital", "sick")
    coterie.fit(fed, "fedavg", 1, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(RunError, match="is not finished"):
        coterie.load(tmp_path / "run")


def test_the_library_is_silent_until_logging_is_configured(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    fed = coterie.Federation.from_table("heart_disease", "hospital", "sick")
    coterie.fit(fed, "fedavg", 2)
    out, err = capfd.readouterr()
    assert out == err == ""
    with caplog.at_level(logging.DEBUG, logger="coterie"):
        coterie.fit(fed, "fedavg", 2)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("coterie")]
    assert said[0] == f"fedavg: 2 rounds, 4 clients, d = {fed.d}"
    assert any("round 2: validation loss" in line for line in said) and "round 2 deployed" in said[-1]


def test_a_refitted_run_is_scored_by_the_models_that_had_not_seen_the_rows(tmp_path: Path) -> None:
    fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
    run = coterie.fit(fed, "ditto", rounds=3, out=tmp_path / "run", refit="validation")
    same = coterie.load(tmp_path / "run")
    assert same.trained_on == run.trained_on == ("train", "validation")
    for split in ("validation", "test"):
        assert same.score(split, "brier").allclose(run.score(split, "brier"))
    assert (
        not run.fed.score(run.personal, "validation")["loss"]
        .double()
        .allclose(run.score("validation", "loss"))
    )
    same.scored = None
    with pytest.raises(SettingError, match="trained on the validation rows too"):
        same.score("validation", "brier")


@pytest.mark.quick("validation")
@pytest.mark.parametrize("refit", ["none", "validation"])
def test_a_loaded_hierarchical_run_has_its_effects_tests_and_intervals(refit: str, tmp_path: Path) -> None:
    """Clients get their models back, and are asked about the rows that trained them."""
    rng = np.random.default_rng(0)
    site = np.repeat(np.arange(12), 15)
    x, level = rng.normal(size=len(site)), 1.5 * rng.normal(size=12)[site]
    sick = rng.uniform(size=len(site)) < 1 / (1 + np.exp(-x - level))
    frame = pl.DataFrame({"site": [f"s{k:02}" for k in site], "x": x, "sick": np.where(sick, "yes", "no")})
    frame.write_csv(tmp_path / "table.csv")
    fed = coterie.Federation.from_table(tmp_path / "table.csv", client="site", target="sick")
    method = coterie.algorithms.make("hierarchical", grouping="one", effects="intercept")
    run = coterie.fit(fed, method, rounds=20, evaluate_every=0, refit=refit, out=tmp_path / "run")
    same = coterie.load(tmp_path / "run")
    assert same.tests() == pytest.approx(run.tests(), rel=1e-6) and same.tests()["clients differ"] < 0.5
    assert same.effects().equals(run.effects())
    assert same.variances().equals(run.variances())
    found = same.intervals(0.9).predict(tmp_path / "table.csv")
    assert (found["lower"] < found["probability_yes"]).all()
    assert (found["probability_yes"] < found["upper"]).all()

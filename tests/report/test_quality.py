"""Curves, rates and intervals of the report, against scikit-learn, brute force, simulation and statsmodels."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars
import pytest
import torch
from scipy.stats import chi2_contingency
from sklearn import metrics as sklearn_metrics

import coterie
from coterie._core.errors import RunError, SettingError
from coterie.algorithms import make
from coterie.report import fairness, quality
from coterie.report.facts import RunFacts, read_runs
from coterie.report.held_out import HeldOut, held_out
from coterie.report.importance import read_coefficients
from coterie.report.page import contents, write_report
from coterie.train.predictions import Predictions

if TYPE_CHECKING:
    from tests.conftest import Command, WriteTable


def facts(folder: Path) -> RunFacts:
    return read_runs([folder])[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, write_table: WriteTable) -> dict[str, Path]:
    """A run of ditto and one of local by kind of target."""
    place = tmp_path_factory.mktemp("quality")
    for kind in ("binary", "multiclass", "regression"):
        table = write_table(place / f"{kind}.csv", kind, 400)
        fed = coterie.Federation.from_table(table, "site", "y")
        for name in ("local", "ditto"):
            coterie.fit(fed, name, 20, place / kind / name)
    return {kind: place / kind for kind in ("binary", "multiclass", "regression")}


def held(folders: dict[str, Path], kind: str) -> HeldOut:
    found = held_out(facts(folders[kind] / "ditto"))
    assert found is not None
    return found


def test_accuracy_of_a_group_is_that_at_the_threshold(folders: dict[str, Path]) -> None:
    one = held(folders, "binary")
    rows = np.arange(len(one.target))
    for threshold in (0.1, 0.5, 0.9):
        right = (one.output[:, 1] >= threshold) == (one.target == 1)
        assert fairness.served(one, "all", rows, threshold).value == pytest.approx(right.mean())


@pytest.mark.parametrize("kind", ["binary", "multiclass", "regression"])
def test_held_out_rows_are_the_test_rows_with_their_predictions(folders: dict[str, Path], kind: str) -> None:
    one, run = held(folders, kind), coterie.load(folders[kind] / "ditto")
    metric = "rmse" if kind == "regression" else "accuracy"
    by_client = {name: one.value(metric, rows) for name, rows in one.by_client()}
    assert by_client == pytest.approx(
        dict(zip(run.fed.names, run.score("test", metric).tolist(), strict=True))
    )
    assert one.value("loss") == pytest.approx(run.pooled("test", "loss"))
    table = polars.read_csv(folders[kind].parent / f"{kind}.csv")
    said = run.predict(table)["prediction"].to_list()
    if kind == "regression":
        assert {round(value, 3) for value in one.output} <= {round(value, 3) for value in said}
    else:
        assert len(one) == int(run.fed.rows["test"].sum()) and one.output.shape[1] == len(one.classes)


def test_roc_and_auc_are_those_of_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    chance = draw.random(300).round(2)  # with ties
    positive = draw.random(300) < 0.3 + 0.4 * chance
    one = replace_output(np.c_[1 - chance, chance], positive.astype(int))
    false, true, _ = quality.roc(one)
    assert np.trapezoid(true, false) == pytest.approx(sklearn_metrics.roc_auc_score(positive, chance))
    assert quality.auc(chance, positive)[0] == pytest.approx(sklearn_metrics.roc_auc_score(positive, chance))
    for threshold in (0.2, 0.5, 0.9):
        found = quality.rates(one, threshold)
        called = chance >= threshold
        assert found["sensitivity"] == pytest.approx(sklearn_metrics.recall_score(positive, called))
        assert found["specificity"] == pytest.approx(sklearn_metrics.recall_score(~positive, ~called))
        assert found["ppv"] == pytest.approx(sklearn_metrics.precision_score(positive, called))
    assert math.isnan(quality.auc(chance, np.ones(300, dtype=bool))[0])


def replace_output(output: np.ndarray, target: np.ndarray) -> HeldOut:
    """Held-out rows with these outputs, of four clients in turn."""
    client = np.arange(len(target)) % 4
    run = object.__new__(RunFacts)
    object.__setattr__(run, "names", ["a", "b", "c", "d"])
    object.__setattr__(run, "config", {})
    task = "regression" if output.ndim == 1 else "binary"
    raw = Predictions("test", torch.from_numpy(client), torch.from_numpy(target), torch.from_numpy(output))
    return HeldOut(run, task, "test", client, target, output, ["no", "yes"], raw)


def test_the_interval_of_the_auc_covers() -> None:
    """Two normal classes, one apart: AUC = Phi(1/sqrt 2). 300 draws of 120 rows; a 95 % interval misses about 15."""
    draw = np.random.default_rng(1)
    truth, missed = 0.7602, 0
    for _ in range(300):
        positive = np.arange(120) < 50
        _, low, high = quality.auc(draw.normal(size=120) + positive, positive)
        missed += not low <= truth <= high
    assert 4 <= missed <= 30


def test_prediction_intervals_cover_new_rows() -> None:
    """Clients with many rows and other noise get their own width; one with nine rows gets the common one."""
    draw = np.random.default_rng(2)
    noise = np.array([1.0, 3.0, 0.5, 1.0])
    inside = np.zeros(4)
    for _ in range(200):
        one = replace_output(np.zeros(164), np.zeros(164))
        client = np.r_[np.repeat([0, 1, 2], 51), np.full(11, 3)]
        one = replace(one, client=client, output=np.zeros(164), target=draw.normal(size=164) * noise[client])
        widths, overall = quality.half_widths(one)
        fresh = np.abs(draw.normal(size=(200, 4)) * noise)
        inside += (fresh <= [widths[name] for name in "abcd"]).mean(0) / 200
        nine = quality.half_widths(replace(one, client=np.r_[client[:-2], [0, 0]]))
        assert nine[0]["d"] == nine[1]
    assert (inside > 0.89).all() and (inside[:3] < 0.94).all()
    assert overall > 0


def test_calibration_of_true_probabilities_is_the_diagonal() -> None:
    draw = np.random.default_rng(3)
    chance = draw.random(20_000)
    one = replace_output(np.c_[1 - chance, chance], (draw.random(20_000) < chance).astype(int))
    mean, share, rows = quality.calibration(one)
    assert len(mean) == 10 and rows.sum() == 20_000
    np.testing.assert_allclose(mean, share, atol=0.04)


@pytest.mark.slow
def test_coefficients_and_intervals_are_those_of_maximum_likelihood(tmp_path: Path) -> None:
    statsmodels = pytest.importorskip("statsmodels.api")
    draw = np.random.default_rng(0)
    level, x = draw.choice(["a", "b", "c"], 1500), draw.normal(3, 2, size=1500)
    score = 0.25 * x + np.where(level == "a", 1.0, np.where(level == "b", -0.5, 0)) - 0.7
    y = (draw.random(1500) < 1 / (1 + np.exp(-score))).astype(int)
    table = polars.DataFrame({"site": draw.choice(["s", "t"], 1500), "x": x, "level": level, "y": y})
    table.write_csv(tmp_path / "table.csv")
    model = coterie.models.logistic(l2=1e-7, intercept=True)
    fed = coterie.Federation.from_table(tmp_path / "table.csv", "site", "y", model=model, split=(1, 0, 0))
    coterie.fit(fed, make("fedavg", lr=2.0, steps=1, batch=0), 500, tmp_path / "run")
    found = read_coefficients(facts(tmp_path / "run"))
    assert found is not None and found.names == ["x", "level=a", "level=b", "level=c"]
    design = np.c_[np.ones(1500), (x - x.mean()) / x.std(), level == "a", level == "b"].astype(float)
    fit = statsmodels.Logit(y, design).fit(disp=0)
    centred = np.array([[0, 1, 0, 0], [0, 0, 2 / 3, -1 / 3], [0, 0, -1 / 3, 2 / 3], [0, 0, -1 / 3, -1 / 3]])
    np.testing.assert_allclose(found.value, centred @ fit.params, atol=1e-3)
    expected = np.sqrt(np.diag(centred @ fit.cov_params() @ centred.T))
    np.testing.assert_allclose(found.error, expected, rtol=1e-3)


def test_least_squares_errors_use_the_residual_variance(folders: dict[str, Path]) -> None:
    run = coterie.load(folders["regression"] / "local")
    found = read_coefficients(facts(folders["regression"] / "local"))
    assert found is not None
    rows, scale = run.fed.runtime.rows("train"), run.fed.table.target_scale
    x, y = rows.x.numpy(), rows.y.numpy()
    w = run.common().numpy()
    inverse = np.linalg.inv(x.T @ x + len(y) * 1e-3 * np.diag([1.0] * (x.shape[1] - 1) + [0.0]))
    sd = np.sqrt(((x @ w - y) ** 2).sum() / (len(y) - x.shape[1]))
    numeric = [found.names.index(name) for name in ("age", "score")]
    expected = scale * sd * np.sqrt(np.diag(inverse))[numeric]
    np.testing.assert_allclose(found.error[numeric], expected, rtol=1e-6)


def test_groups_of_a_column_are_those_of_the_table(folders: dict[str, Path]) -> None:
    one = held(folders, "binary")
    by_colour, by_age = one.by_column("colour"), one.by_column("age")
    assert {name for name, _ in by_colour} == {
        "colour = red",
        "colour = green",
        "colour = blue",
        "colour = missing",
    }
    assert sum(len(rows) for _, rows in by_colour) == len(one) == sum(len(rows) for _, rows in by_age)
    assert [name for name, _ in by_age][-1] == "age missing" and len(by_age) == 5
    south = {name: rows for name, rows in one.by_column("site")}["site = south"]
    assert (one.client[south] == one.run.names.index("south")).all()
    text = json.dumps(fairness.table(one, by_colour, 0.5))
    assert "red" in text


def test_a_change_of_the_table_is_noticed(tmp_path: Path, write_table: WriteTable) -> None:
    table = write_table(tmp_path / "table.csv", "binary")
    coterie.fit(coterie.Federation.from_table(table, "site", "y"), "local", 2, tmp_path / "run")
    text = table.read_text(encoding="utf-8")
    table.write_text(
        text.replace(",yes", ",maybe").replace(",no", ",yes").replace(",maybe", ",no"), encoding="utf-8"
    )
    with pytest.raises(RunError, match="has changed since the run"):
        write_report([tmp_path / "run"], tmp_path / "page.html", by=["colour"])
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("counts", [[[8, 2], [3, 9]], [[5, 5], [5, 5]], [[8, 2], [3, 9], [30, 41]]])
def test_the_test_of_shares_is_that_of_scipy(counts: list[list[int]]) -> None:
    table = np.array(counts)
    assert fairness._same_share(table) == pytest.approx(chi2_contingency(table).pvalue, rel=1e-12)


def test_differences_between_groups_are_tested() -> None:
    draw = np.random.default_rng(4)
    target = draw.integers(0, 2, 800)
    wrong = draw.random(800) < np.where(np.arange(800) % 4 == 3, 0.5, 0.1)
    chance = np.where(wrong, 1 - target, target) * 0.8 + 0.1
    one = replace_output(np.c_[1 - chance, chance], target)
    assert fairness.chance(one, one.by_client(), 0.5) < 1e-6
    assert "hardly chance" in fairness.sentence(one, "client", one.by_client(), 0.5)
    assert "d worst" in fairness.sentence(one, "client", one.by_client(), 0.5)
    same = [("first", np.arange(0, 800, 2)), ("second", np.arange(1, 800, 2) - 1)]
    assert fairness.chance(one, same, 0.5) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["binary", "multiclass", "regression"])
def test_the_page_has_quality_fairness_and_a_page_per_client(folders: dict[str, Path], kind: str) -> None:
    page = contents([folders[kind] / "ditto"], by=["colour"], threshold=0.3)
    assert [one.name for one in page["pages"]] == page["main"].names and page["client_column"] == "site"
    assert len(page["quality"].rows[0]) == 4  # ditto beside local, which is found by itself
    assert [part.panel.title for part in page["quality"].groups] == ["Quality by site", "Quality by colour"]
    keys = {panel.key for panel in page["sections"]["quality"]}
    expected = {
        "binary": {"roc", "calibration", "thresholds"},
        "multiclass": {"confusion", "calibration"},
        "regression": {"scatter", "errors"},
    }
    assert keys == expected[kind]
    facts_of = dict(page["pages"][0].facts)
    assert ("90 % prediction interval" in facts_of) == (kind == "regression")
    assert page["pages"][0].coefficients and page["tiles"][0].what == "Clients"


def test_bad_options_are_refused(folders: dict[str, Path], command: Command, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="between 0 and 1"):
        write_report([folders["binary"] / "ditto"], tmp_path / "page.html", threshold=1.5)
    shown = command("report", folders["binary"] / "ditto", "--by", "color", "--out", tmp_path / "page.html")
    assert shown.code == 2 and "Did you mean 'colour'" in shown.err and not (tmp_path / "page.html").exists()


def test_printing_without_a_browser_says_so(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingError, match="none is installed"):
        write_report([folders["binary"] / "ditto"], tmp_path / "page.html", pdf=True)
    assert not (tmp_path / "page.html").exists()

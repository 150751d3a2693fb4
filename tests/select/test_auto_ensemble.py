"""The weighted mean of finalists: what it predicts, when it is taken, what a run folder keeps of it."""

from __future__ import annotations

from pathlib import Path

import polars
import pytest
import torch

import coterie
from coterie import models
from coterie._core.errors import RunError, SettingError
from coterie.data import tables
from coterie.engine.federation import Federation
from coterie.models import from_description
from coterie.models.ensemble import ensemble
from coterie.models.metrics import find
from coterie.select import auto_ensemble, auto_field
from coterie.select.auto import ChosenRun, choose, fit_chosen
from coterie.train.adapt import adapt
from coterie.train.predict import Predictor


def table(rows: int = 150) -> polars.DataFrame:
    draw = torch.Generator().manual_seed(3)
    x = torch.rand(rows, 2, generator=draw, dtype=torch.float64)
    y = 4 * x[:, 0] + 3 * (x[:, 1] > 0.5) + torch.randn(rows, generator=draw)
    columns = {"site": [f"s{k % 3}" for k in range(rows)], "x0": x[:, 0].tolist(), "x1": x[:, 1].tolist()}
    columns |= {"kind": ["a" if k % 4 else None for k in range(rows)]}
    return tables.read(polars.DataFrame({**columns, "y": ["yes" if v > 3.5 else "no" for v in y.tolist()]}))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ChosenRun:
    """The mean of trees and linear models, taken however little it saves."""
    place = tmp_path_factory.mktemp("ensemble")
    table().write_csv(place / "table.csv")
    fed = Federation.from_table(place / "table.csv", "site", "y")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_ensemble, "LEAST_GAIN", -9.0)
        patch.setattr(
            auto_ensemble,
            "greedy_weights",
            lambda values, y: values.new_full((len(values),), 1 / len(values)),
        )
        patch.setattr(auto_field, "TREES", 18)
        return fit_chosen(fed, 9, place / "run", methods=["fedavg", "trees"], effort=3, refit="validation")


@pytest.mark.slow
def test_it_predicts_the_weighted_mean_of_probabilities(run: ChosenRun) -> None:
    assert run.algorithm.name == "ensemble" and run.blend is not None and run.refit == "validation"
    kinds = {part.algorithm.name for part in run.blend.parts}
    assert "trees" in kinds and len(kinds) > 1, "two encodings of the table"
    mean = sum(
        torch.tensor(part.predict(table())["probability_yes"].to_list(), dtype=torch.float64)
        * run.blend.weights[[int(site[1:]) for site in table()["site"]], k]
        for k, part in enumerate(run.blend.parts)
    )
    found = torch.tensor(run.predict(table())["probability_yes"].to_list(), dtype=torch.float64)
    assert torch.allclose(found, mean, atol=1e-12)
    assert run.blend.weights.sum(1).allclose(torch.ones(3, dtype=torch.float64))
    assert run.choice is not None and "Deployed: the weighted mean" in run.choice.text()


def test_scores_are_those_before_refitting(run: ChosenRun) -> None:
    assert run.scored is not None and not torch.equal(run.scored, run.personal)
    again = run.fed.score(run.scored, "test")["loss"]
    assert torch.allclose(run.score("test", "loss"), again.double())


def test_a_folder_keeps_it(run: ChosenRun) -> None:
    assert run.folder is not None
    same = coterie.load(run.folder)
    assert torch.equal(same.personal, run.personal) and same.algorithm == run.algorithm
    assert Predictor.load(run.folder)(table()).equals(run.predict(table()))
    assert run.scored is not None
    before = run.fed.pooled(run.scored, "test", [find("auc")])["auc"]
    assert float(same.pooled("test", "auc")) == pytest.approx(before)
    with pytest.raises(RunError, match=r"coterie\.load"):
        coterie.resume(run.folder)


def test_newcomers_get_the_common_models(run: ChosenRun) -> None:
    assert run.folder is not None
    stranger = table().with_columns(polars.lit("new").alias("site"))
    found = adapt(run.folder, stranger)
    assert torch.equal(found.models[0], run.common()) and found.scores["adapted"][0] > 0.5


def test_exports_hold_it_or_name_the_best_alone(run: ChosenRun, tmp_path: Path) -> None:
    assert run.export("safetensors", "s1", tmp_path / "s1.safetensors").exists()
    for to in ("csv", "onnx", "torchscript", "lightgbm"):
        with pytest.raises(
            SettingError, match=rf"deploy the best one alone \({run.algorithm.settings()['best']}\)"
        ):
            run.export(to, "s1", tmp_path / f"s1.{to}")


def test_a_report_shows_it(run: ChosenRun, tmp_path: Path) -> None:
    page = run.report(tmp_path / "page.html").read_text()
    assert "ensemble" in page and "Deployed: the weighted mean" in page


def test_it_can_be_switched_off_and_must_save_something(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Federation.from_table(table(60), "site", "y")
    options = {"rounds": 4, "methods": ["fedavg"], "effort": 2}
    monkeypatch.setattr(auto_ensemble, "LEAST_GAIN", 1.0)
    assert choose(fed, **options).run.algorithm.name != "ensemble"
    monkeypatch.setattr(auto_ensemble, "LEAST_GAIN", -9.0)
    assert choose(fed, **options, ensemble=False).run.algorithm.name != "ensemble"


@pytest.mark.parametrize("task", ["regression", "binary"])
def test_no_row_has_a_say_in_the_weights_that_predict_it(task: str) -> None:
    draw = torch.Generator().manual_seed(2)
    scores = torch.randn(4, 40, 1, generator=draw, dtype=torch.float64)
    y = torch.randn(40, generator=draw, dtype=torch.float64)
    y = y if task == "regression" else (y > 0).long()
    client, part = torch.arange(40) // 20, torch.arange(40) % 4
    other = torch.where(part == 0, 1 - y, y)
    before, after = (
        auto_ensemble.EntrantPredictions(task, scores, values, client, part).weights_of_others(2, 10.0)
        for values in (y, other)
    )
    assert torch.equal(before[part == 0], after[part == 0])
    assert not torch.allclose(before[part != 0], after[part != 0])
    assert before.sum(1).allclose(torch.ones(40, dtype=torch.float64))


def test_guarded_clients_use_the_model_they_trained_alone() -> None:
    class Judged:
        judged = None

    alone, other = object(), object()
    mixture = auto_ensemble.Finalists(
        [other],
        torch.ones(1),
        torch.ones(3, 1),
        False,
        1.0,
        2.0,
        Judged(),
        [],  # type: ignore[arg-type, list-item]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_ensemble, "harmed", lambda _: [1])
        auto_ensemble._keep_own(mixture, alone)  # type: ignore[arg-type]
    assert mixture.own == [1] and mixture.members == [other, alone] and mixture.shared.tolist() == [1.0, 0.0]
    assert mixture.weights.tolist() == [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass"])
def test_the_model_is_the_mean_of_its_members(task: str) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(20, 3, generator=draw, dtype=torch.float64)
    y = {"regression": x[:, 0], "binary": (x[:, 0] > 0).long(), "multiclass": torch.arange(20) % 3}[task]
    linear = {"regression": models.linear, "binary": models.logistic, "multiclass": models.softmax}[task]
    line, trees = linear(intercept=True).fit_to(x, y), models.trees(2, 4).fit_to(x, y)
    both = ensemble([line, trees, line], "trees")
    again = from_description(both.describe())
    assert again.describe() == both.describe() and both.encoding == "both" and both.features == 6
    parts = [torch.randn(2, one.d, generator=draw, dtype=torch.float64) for one in (line, trees, line)]
    parts[1] = trees.initial(0, torch.float64).expand(2, -1).clone()
    parts[1][:, 0] = 0.7
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.0, 1.0, 0.0]], dtype=torch.float64)
    w, rows = both.join(parts, weights), torch.cat([x, x], 1)
    stacked = both.scores(w, both.prepare(rows).expand(2, -1, -1))
    for k in range(2):
        wanted = sum(weights[k, m] * one.module(parts[m][k])(x) for m, one in enumerate((line, trees, line)))
        assert torch.allclose(both.module(w[k])(rows), wanted)
        link = {"regression": lambda s: s.squeeze(-1), "multiclass": lambda s: torch.softmax(s, -1)}
        link["binary"] = lambda s: torch.cat([torch.sigmoid(-s), torch.sigmoid(s)], -1)
        assert torch.allclose(link[task](stacked[k]), wanted)

"""Sentences and charts say what the numbers say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.models.metrics import find
from coterie.report import charts, summary
from coterie.report.board import Quality, tiles
from coterie.report.facts import RunFacts, read_runs
from coterie.report.gains import Scores, scores
from coterie.select.verdict import Verdict


@pytest.fixture
def runs(twelve: Path) -> list[RunFacts]:
    """CoBo and training alone, with known scores: 0.50, 0.52, ... and 0.1 less for everybody but the last."""
    together, alone = read_runs([twelve / "cobo", twelve / "local"])
    values = 0.5 + 0.02 * np.arange(12)
    other = values - 0.1
    other[-1] = 0.9
    return [replace(together, scores=values), replace(alone, scores=other)]


def told(runs: list[RunFacts], metric: str) -> str:
    runs = [replace(run, metric=metric) for run in runs]
    every = [scores(run, runs[1]) for run in runs]
    return " ".join(summary.sentences(runs, every, runs[0], runs[1]))


def test_the_worst_and_the_best_depend_on_the_metric(runs: list[RunFacts]) -> None:
    right, off = told(runs, "accuracy"), told(runs, "rmse")
    names = runs[0].names
    assert (
        f"served worst is {names[0]} with 50.0 %" in right
        and f"served worst is {names[-1]} with 0.7200" in off
    )
    assert "No other run on this page (local) has a better mean" in right
    assert "local has the best mean" in off
    assert "cobo" in right and "training alone" in right and "95 % interval" in right


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (0.5, "Training together helped"),
        (0.02, "No clear difference between training together and alone"),
        (-0.02, "No clear difference between training together and alone"),
        (-0.5, "Training together did harm"),
    ],
)
def test_the_headline_is_sure_only_of_more_than_chance(runs: list[RunFacts], gain: float, said: str) -> None:
    draw, client = np.random.default_rng(0), np.repeat(np.arange(12), 20)
    alone = draw.gamma(2.0, size=240)
    mine = alone - gain + draw.normal(size=240)
    verdict = Verdict.of_rows(mine, alone, client, runs[0].names, find("loss"))
    assert summary.headline(*runs, verdict) == said
    assert summary.headline(*runs, None).startswith("Trained together; not yet compared")


def test_whiskers_reach_from_the_lower_to_the_upper_limit(runs: list[RunFacts]) -> None:
    gain = np.linspace(-0.1, 0.2, 12)
    panel = charts.gain_chart(runs[0], Scores(gain, gain, gain, gain, gain - 0.03, gain + 0.08))
    assert panel is not None
    (bars,) = panel.data
    assert bars["x"] == pytest.approx(100 * gain, rel=1e-4)
    assert bars["error_x"]["array"] == pytest.approx([8.0] * 12) and bars["error_x"][
        "arrayminus"
    ] == pytest.approx([3.0] * 12)


def test_small_clients_are_compared_with_large_ones(runs: list[RunFacts]) -> None:
    rows = runs[0].rows("train")
    assert rows is not None
    quarter = np.quantile(rows, [0.25, 0.75])
    value = rows / 1000
    none = np.full(12, np.nan)
    panel = charts.size_chart(runs[:1], [Scores(value, none, none, none, none, none)])
    assert panel is not None
    few, many = value[rows <= quarter[0]].mean(), value[rows >= quarter[1]].mean()
    assert panel.rows == [["cobo", f"{100 * few:.1f} %", f"{100 * many:.1f} %"]] and few < many


def test_communication_is_that_of_the_ledger(twelve: Path) -> None:
    (run,) = read_runs([twelve / "ifca"])
    panel = charts.communication([run])
    assert panel is not None
    sent = run.ledger.filter(run.ledger["kind"] != "evaluate")
    up, down = sent["bytes_up"].sum() / 1e6, sent["bytes_down"].sum() / 1e6
    found = {trace["name"]: trace["x"] for trace in panel.data}
    assert found == {
        "client-server, up": pytest.approx([up], rel=1e-4),
        "client-server, down": pytest.approx([down], rel=1e-4),
    }
    assert up != down


def test_a_comparison_in_folds_says_so_and_which_rows_a_number_rests_on(tmp_path: Path) -> None:
    options = {"algorithms": [], "folds": 3, "rounds": 3, "budget": 1, "out": tmp_path / "folds"}
    coterie.compare("heart_disease", "hospital", "sick", **options)
    runs = read_runs([tmp_path / "folds"])
    every = [scores(run, runs[0]) for run in runs]
    text = " ".join(summary.sentences(runs, every, runs[1], runs[0]))
    assert "averaged over 3 folds in which every row is tested once" in text and "random splits" not in text
    shown = Quality.of(runs[1], runs[0], [], 0.5)
    first, _, area = tiles(runs[1], runs[0], every[1], shown)[:3]
    assert first.note.endswith("test rows of the first fold")
    assert area.what == "AUC over all rows of the first fold"

"""`--metric` on the command line: what is chosen and shown by it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Command, WriteTable

HEART = ("heart_disease", "--client", "hospital", "--target", "sick")


def test_compare_shows_the_metric(command: Command, tmp_path: Path) -> None:
    tiny = ("--rounds", 2, "--budget", 1, "--seeds", 1, "--algorithms", "", "--metric", "auc")
    done = command("compare", *HEART, *tiny, "--json", tmp_path / "c.json", "--out", tmp_path / "c")
    assert done.code == 0, done.err
    assert "Test auc over 4 clients (higher is better)" in done.out and "Report: " in done.out
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["metric"] == "auc (higher is better)"
    page = (tmp_path / "c" / "report.html").read_text(encoding="utf-8")
    assert "test auc of the clients' models (higher is better)" in page


@pytest.mark.parametrize("algorithm", ["fedavg", pytest.param("auto", marks=pytest.mark.slow)])
def test_fit_shows_and_keeps_the_metric(command: Command, tmp_path: Path, algorithm: str) -> None:
    options = ("--rounds", 3, "--algorithm", algorithm, "--metric", "ece", "--select", "best")
    done = command("fit", *HEART, *options, "--out", tmp_path / "run", "--json", tmp_path / "r.json")
    assert done.code == 0, done.err
    assert "test ece (lower is better)" in " ".join(done.out.split())
    assert json.loads((tmp_path / "r.json").read_text())["metric"] == "test ece (lower is better)"
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "the expected calibration error of a client&#39;s model is 0." in page
    assert "--select best --metric ece" in page
    if algorithm == "auto":  # training alone has the rounds and settings that it had in the race
        race = json.loads((tmp_path / "run" / "choice.json").read_text())["race"]
        alone = next(one["settings"] for one in race if one["method"] == "local")
        assert f"--rounds {max(one['rounds'] for one in race)} " in page and f"--set lr={alone['lr']}" in page
    if algorithm == "fedavg":
        again = command("resume", tmp_path / "run")
        assert again.code == 0 and "test ece (lower is better)" in " ".join(again.out.split())


def test_clients_for_which_a_metric_is_not_defined_are_shown_as_such(
    command: Command, tmp_path: Path
) -> None:
    lines = ["who,x,y"]
    for k in range(120):
        who = "abc"[k % 3]
        lines.append(f"{who},{(k * 7) % 11},{'no' if who == 'c' or k % 2 else 'yes'}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    options = ("--client", "who", "--target", "y", "--algorithm", "fedavg", "--rounds", 2, "--metric", "auc")
    done = command(
        "fit", tmp_path / "t.csv", *options, "--out", tmp_path / "run", "--json", tmp_path / "r.json"
    )
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "r.json").read_text())
    assert "not defined" in done.out and found["clients"]["c"] is None
    assert found["mean"] == pytest.approx((found["clients"]["a"] + found["clients"]["b"]) / 2)


@pytest.mark.quick("regression")
@pytest.mark.parametrize("kind", ["binary", "multiclass", "regression"])
def test_metrics_that_do_not_apply_are_named_with_those_that_do(
    command: Command, tmp_path: Path, write_table: WriteTable, kind: str
) -> None:
    table = (write_table(tmp_path / "t.csv", kind), "--client", "site", "--target", "y")
    wrong, right = (
        ("auc", "rmse, mae, r2, quantile-0.5") if kind == "regression" else ("r2", "accuracy, balanced-acc")
    )
    for words in (
        ("compare", *table, "--rounds", 1),
        ("fit", *table, "--rounds", 1, "--out", tmp_path / "f"),
        ("fit", *table, "--rounds", 1, "--out", tmp_path / "a", "--algorithm", "auto"),
        ("tune", *table, "--rounds", 1, "--algorithm", "ditto", "--out", tmp_path / "s"),
    ):
        done = command(*words, "--metric", wrong)
        said = " ".join(done.err.split())
        assert (
            done.code == 2
            and f"'{wrong}' does not apply to {kind} targets; choose from loss, {right}" in said
        )
        done = command(*words, "--metric", "bananas")
        assert done.code == 2 and "no metric 'bananas'" in done.err and "accuracy" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv"], "nothing is left behind"

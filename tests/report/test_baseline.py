"""Gains are told only against a run that trained alone on the same rows, however its rows were encoded."""

from __future__ import annotations

from pathlib import Path

import coterie
from coterie.algorithms import make
from coterie.report.baseline import same_rows
from coterie.report.page import contents
from coterie.select.auto import fit_chosen
from coterie.select.compare import compare

HEART = ("heart_disease", "hospital", "sick")


def told(*folders: Path) -> tuple[list[str], str]:
    page = contents(list(folders))
    return page["summary"], page["headline"]


def test_runs_on_other_test_rows_say_nothing_about_the_gain(tmp_path: Path) -> None:
    coterie.fit(coterie.Federation.from_table(*HEART), "ditto", 3, tmp_path / "one" / "ditto")
    other = tmp_path / "two"
    coterie.fit(coterie.Federation.from_table(*HEART, seed=5), "local", 3, other / "local")
    compare(
        *HEART, algorithms=["ditto"], rounds=3, folds=3, seeds=1, budget=1, refit="none", out=other / "folds"
    )
    for beside in ("local", "folds"):
        page = contents([tmp_path / "one" / "ditto", other / beside])
        said = " ".join(page["summary"])
        assert "no run trained alone on the same rows" in said and "log-loss" not in said
        assert "Tested on other rows, so that means cannot be compared: local" in said
        assert page["headline"] == "Trained together; not yet compared with training alone"
        assert not any("Gain" in tile.what for tile in page["tiles"])
        assert all(row["gain"] == "" for row in page["side_by_side"] if row["main"])


def test_trees_are_compared_row_by_row_with_linear_models_on_the_same_split(tmp_path: Path) -> None:
    coterie.fit(coterie.Federation.from_table(*HEART), "local", 3, tmp_path / "local")
    grown = coterie.Federation.from_table(*HEART, model=coterie.models.trees(3))
    coterie.fit(grown, make("trees"), 3, tmp_path / "trees")
    page = contents([tmp_path / "trees"])
    trees, alone = page["runs"]
    assert alone.label == "local" and trees.rows_hash != alone.rows_hash and same_rows(trees, alone)
    assert any("the log-loss" in sentence and "185 test rows" in sentence for sentence in page["summary"])


def test_the_headline_of_auto_alone_is_about_the_rows_it_held_out(tmp_path: Path) -> None:
    fed = coterie.Federation.from_table(*HEART)
    fit_chosen(fed, 6, tmp_path / "auto", methods=["fedavg", "fine-tuned"])
    said, headline = told(tmp_path / "auto")
    assert headline.startswith("Training together ") and headline.endswith("on the rows that auto held out")
    assert any("on test rows it is not known yet" in sentence for sentence in said)


def test_a_comparison_over_folds_lends_its_run_on_the_split_of_the_federation(tmp_path: Path) -> None:
    coterie.fit(coterie.Federation.from_table(*HEART), "ditto", 3, tmp_path / "chosen")
    compare(
        *HEART,
        algorithms=["local", "ditto"],
        rounds=3,
        folds=3,
        seeds=1,
        budget=1,
        refit="none",
        out=tmp_path / "all",
    )
    page = contents([tmp_path / "chosen", tmp_path / "all"])
    labels = [run.label for run in page["runs"]]
    assert labels[-1] == "local, same rows" and len(set(labels)) == len(labels)
    assert any("the log-loss" in sentence and "185 test rows" in sentence for sentence in page["summary"])
    assert "Tested on other rows" in " ".join(page["summary"])
    alone = contents([tmp_path / "chosen"])
    assert [run.label for run in alone["runs"]] == ["ditto", "local"]

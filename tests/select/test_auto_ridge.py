"""Ridge penalties in the race of `auto`: how strong they are, where they take part, and what they save."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

import coterie
from coterie.algorithms import Hierarchical
from coterie.select.auto_ridge import RIDGES, with_ridge
from coterie.train.fit import fit


def readmissions(rows: int, seed: int = 0) -> pl.DataFrame:
    """Return ten clinics with two numbers that matter and a diagnosis of forty levels that does not."""
    draw = np.random.default_rng(seed)
    clinic = np.repeat(np.arange(10), rows)
    age, weight = draw.normal(size=(2, len(clinic)))
    logit = draw.normal(size=10)[clinic] + age - 0.5 * weight
    return pl.DataFrame(
        {
            "clinic": [f"clinic {k}" for k in clinic],
            "age": age,
            "weight": weight,
            "diagnosis": [f"D{k}" for k in draw.integers(40, size=len(clinic))],
            "back": (draw.uniform(size=len(clinic)) < 1 / (1 + np.exp(-logit))).astype(int),
        }
    )


def federation(rows: int, **options: object) -> coterie.Federation:
    return coterie.Federation.from_table(readmissions(rows), client="clinic", target="back", **options)  # type: ignore[arg-type]


def test_penalties_fall_with_the_rows_and_end_where_they_change_nothing() -> None:
    fed = federation(50)
    found = with_ridge(fed, None)
    rows = int(fed.rows["train"].sum())
    assert {name: one.model.l2 * rows for name, one in found.items()} == pytest.approx(RIDGES)  # type: ignore[attr-defined]
    assert {one.d for one in found.values()} == {fed.d}, "the same columns"
    assert all((one.rows["test"] == fed.rows["test"]).all() for one in found.values()), "the same splits"
    assert list(with_ridge(federation(1300), None)) == ["strong ridge"], "10 over 7,800 rows is no change"
    assert not with_ridge(fed, ["hierarchical"]), "whoever names methods gets those"
    assert not with_ridge(federation(50, model=coterie.models.mlp((4,))), None)


def test_a_ridge_saves_what_levels_without_effect_cost() -> None:
    fed = federation(40)
    loss = {}
    for name, one in {"given": fed, **with_ridge(fed, None)}.items():
        run = fit(one, Hierarchical(grouping="one", choose="reml"), 20)
        loss[name] = float(run.score("test", "loss").mean())
    assert loss["ridge"] < 0.97 * loss["given"]


@pytest.mark.slow
def test_hierarchical_models_race_with_a_ridge() -> None:
    choice = coterie.choose(federation(40), rounds=18)
    told = {
        row["model"]: row["validation_loss"]
        for row in choice.rows
        if row["method"] == "hierarchical" and "model" in row
    }
    given = min(
        row["validation_loss"]
        for row in choice.rows
        if row["method"] == "hierarchical" and "model" not in row
    )
    assert {*RIDGES} <= set(told) and told["ridge"] < given

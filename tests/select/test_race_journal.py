"""An interrupted race goes on from where it was, and ends with the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from coterie.engine.federation import Federation
from coterie.select import auto_ensemble, auto_field, auto_networks
from coterie.select.auto import ChosenRun, fit_chosen, journal_of
from coterie.train import checkpoint
from coterie.train.predict import Predictor


def table() -> pl.DataFrame:
    draw = np.random.default_rng(5)
    x, site = draw.normal(size=(160, 2)), np.arange(160) % 4
    y = np.sin(2 * x[:, 0]) + 0.5 * site + 0.3 * draw.normal(size=160)
    return pl.DataFrame({"a": x[:, 0], "b": x[:, 1], "site": [f"s{k}" for k in site], "y": y})


class Watch:
    """Counts reports of the race and stops it, as Ctrl-C does, at one of them."""

    def __init__(self, stop: int = -1) -> None:
        self.seen, self.stop = 0, stop

    def __call__(self, done: int, total: int) -> None:
        self.seen += 1
        if self.seen == self.stop:
            raise KeyboardInterrupt


def federation() -> Federation:
    return Federation.from_table(table(), "site", "y")


def raced(out: Path, watch: Watch) -> ChosenRun:
    return fit_chosen(federation(), 9, out, watch=watch, effort=4, refit="none")


def told(out: Path) -> dict[str, object]:
    """Return choice.json, and the bytes of the models."""
    kept = {path.name: path.read_bytes() for path in sorted(out.rglob("*.safetensors"))}
    assert kept
    return {"choice": json.loads((out / "choice.json").read_text()), **kept}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a small race have a network, be noted after every entrant, and deploy the mean of all finalists."""
    monkeypatch.setattr(auto_ensemble, "LEAST_GAIN", -9.0)
    monkeypatch.setattr(
        auto_ensemble, "greedy_weights", lambda values, y: values.new_full((len(values),), 1 / len(values))
    )
    monkeypatch.setattr(auto_networks, "FEWEST", 50)
    monkeypatch.setattr(auto_field, "TREES", 9)
    monkeypatch.setattr(checkpoint.Clock, "due", lambda self, t: True)


@pytest.mark.slow
def test_an_interrupted_race_ends_with_the_same_bytes(tmp_path: Path) -> None:
    whole = Watch()
    run = raced(tmp_path / "whole", whole)
    expected = told(tmp_path / "whole")
    assert run.blend is not None and {"Trees", "Zoo"} <= {
        type(one.fed.model).__name__ for one in run.blend.parts
    }
    found = [
        one(table())["prediction"].to_list() for one in (run.predict, Predictor.load(tmp_path / "whole"))
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-9)
    entrants = {row.get("model", "") for row in expected["choice"]["race"]}  # type: ignore[index]
    assert {"", "trees", "splines", "mlp"} <= entrants
    assert not journal_of(tmp_path / "whole").exists()
    out, reports = tmp_path / "run", 0
    for stop in (
        whole.seen // 4,
        whole.seen // 3,
        whole.seen // 3,
    ):  # in the first heat, after it, and in the last
        watch = Watch(stop)
        with pytest.raises(KeyboardInterrupt):
            raced(out, watch)
        reports += watch.seen - 1
        assert journal_of(out).exists() and not out.exists()
    last = Watch()
    raced(out, last)
    assert reports + last.seen == whole.seen, "nobody was advanced twice"
    assert told(out) == expected
    assert not journal_of(out).exists()


def test_networks_race_where_rows_are_enough_and_classes_count_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation()
    assert type(auto_networks.with_network(fed, None).model).__name__ == "Zoo"
    assert auto_networks.with_network(fed, ["fedavg"]) is None
    frame = table().with_columns(
        pl.when(pl.col("y") > 1).then(pl.lit("yes")).otherwise(pl.lit("no")).alias("y")
    )
    even = Federation.from_table(frame, "site", "y", class_weights="balanced")
    assert auto_networks.with_network(even, None) is None
    monkeypatch.setattr(auto_networks, "FEWEST", 1000)
    assert auto_networks.with_network(fed, None) is None


@pytest.mark.slow
def test_another_race_does_not_go_on_from_it(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        raced(tmp_path / "run", Watch(5))
    watch = Watch()
    fit_chosen(federation(), 8, tmp_path / "run", watch=watch, effort=1, refit="none", methods=["fedavg"])
    assert watch.seen > 3
    assert not journal_of(tmp_path / "run").exists()

"""Searching settings: the best declared ones are found, test rows are not read, a study goes on where it was."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from coterie import Algorithm, models
from coterie._core import systems
from coterie._core.errors import DataError, RunError, SettingError
from coterie.algorithms import make
from coterie.cli import app
from coterie.data import bundled
from coterie.engine.federation import Federation
from coterie.select import tune as searching
from coterie.select.tune import search, search_table, space
from coterie.train.fit import fit
from coterie.train.history import mean_over_clients


@dataclass(frozen=True)
class Fixed(Algorithm):
    """Nothing to choose (2022)."""


TABLE = {"source": bundled.path("heart_disease"), "client": "hospital", "target": "sick", "drop": ()}


def world(split: tuple[float, float, float] = (0.5, 0.25, 0.25)) -> Federation:
    draw = torch.Generator().manual_seed(3)
    xs = torch.randn(4, 24, 3, generator=draw, dtype=torch.float64)
    own = torch.randn(4, 3, generator=draw, dtype=torch.float64)
    ys = torch.einsum("crd,cd->cr", xs, own) + torch.randn(4, 24, generator=draw, dtype=torch.float64)
    return Federation.from_arrays(list(xs), list(ys), models.linear(), split=split)


def test_the_grid_finds_the_best_declared_settings() -> None:
    fed, ditto = world(), make("ditto", batch=0)
    found = search(fed, ditto, trials=100, rounds=10, sampler="grid")
    losses = {}
    for values in itertools.product(*space(ditto).values()):
        settings = dict(zip(space(ditto), values, strict=True))
        run = fit(fed, ditto.replace(**settings), 10, evaluate_every=1, select="best", score_test=False)
        losses[tuple(settings.items())] = mean_over_clients(run.score("validation", "loss"))
    assert found.score == pytest.approx(min(losses.values()), rel=1e-12)
    assert len(found.trials) == len(losses)
    assert tuple((name, found.algorithm.settings()[name]) for name in space(ditto)) == min(
        losses, key=losses.get
    )


def test_tpe_searches_between_the_declared_values_and_prunes() -> None:
    found = search(world(), make("ditto", batch=0), trials=20, rounds=10)
    for name, values in space(make("ditto")).items():
        drawn = {trial["settings"][name] for trial in found.trials}
        assert min(values) <= min(drawn) and max(drawn) <= max(values) and len(drawn - set(values)) > 5
    assert {trial["state"] for trial in found.trials} == {"complete", "pruned"}
    assert found.trials[0]["validation_loss"] == found.score


def test_test_rows_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = world()
    rows = fed.runtime.splits["test"]
    monkeypatch.setitem(
        fed.runtime.splits, "test", type(rows)(rows.x * torch.nan, rows.y * torch.nan, rows.start, rows.size)
    )
    assert search(fed, "ditto", trials=3, rounds=4).score > 0


def test_a_study_in_a_folder_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = search_table(tmp_path / "s", make("ditto"), TABLE, trials=2, rounds=4)
    again = search_table(tmp_path / "s", make("ditto"), TABLE, trials=4, rounds=4)
    assert len(first.trials) == 2 and len(again.trials) == 4 and again.score <= first.score
    monkeypatch.setattr(searching, "Contestant", lambda *given: pytest.fail("nothing is left to do"))
    assert search_table(tmp_path / "s", make("ditto"), TABLE, trials=4, rounds=4).json() == again.json()
    with pytest.raises(RunError, match="holds a search with other settings"):
        search_table(tmp_path / "s", make("ditto"), TABLE, trials=4, rounds=5)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(RunError, match="holds no search"):
        search_table(tmp_path / "other", make("ditto"), TABLE, trials=4, rounds=5)


@pytest.mark.slow
def test_processes_share_a_study(tmp_path: Path) -> None:
    found = search_table(tmp_path / "s", make("ditto"), TABLE, trials=4, rounds=2, jobs=2)
    assert 4 <= len(found.trials) <= 5


def test_what_cannot_be_tuned_is_said() -> None:
    for given, message in (
        ({"sampler": "magic"}, "choose from tpe, grid"),
        ({"trials": 0}, "at least 1"),
        ({"algorithm": Fixed()}, "declares no search space"),
    ):
        with pytest.raises(SettingError, match=message):
            search(world(), **{"algorithm": "ditto", "rounds": 3, **given})
    with pytest.raises(DataError, match="validation rows"):
        search(world((1.0, 0.0, 0.0)), "ditto", trials=2)


def test_settings_that_diverge_are_not_chosen() -> None:
    local = make("local", batch=0, steps=200)
    found = search(world(), local, trials=12, rounds=5, sampler="grid")
    losses = {trial["settings"]["lr"]: trial["validation_loss"] for trial in found.trials}
    assert losses[3.0] > 1.1 * found.score and found.algorithm.settings()["lr"] < 1


def test_the_command_prints_what_to_do_next(tmp_path: Path) -> None:
    command = (
        "tune heart_disease --client hospital --target sick --algorithm ditto --trials 2 --rounds 2 --out"
    )
    shown = CliRunner().invoke(app, [*command.split(), str(tmp_path / "study")])
    assert shown.exit_code == 0, shown.output
    assert (
        "coterie fit heart_disease --client hospital --target sick --algorithm ditto --set lr="
        in shown.output
    )


def test_a_metric_decides_instead_of_the_loss() -> None:
    """The grid is ranked by the best validation value of the metric, whichever way it is better."""
    fed, ditto = world(), make("ditto", batch=0)
    for metric, best in (("mae", min), ("r2", max)):
        found = search(fed, ditto, trials=100, rounds=10, sampler="grid", metric=metric)
        values = []
        for point in itertools.product(*space(ditto).values()):
            one = ditto.replace(**dict(zip(space(ditto), point, strict=True)))
            run = fit(fed, one, 10, evaluate_every=1, select="best", metric=metric, score_test=False)
            values.append(mean_over_clients(run.score("validation", metric)))
        assert found.score == pytest.approx(best(values), rel=1e-12) and found.metric == metric
        told = [trial[f"validation_{metric}"] for trial in found.trials if trial["state"] == "complete"]
        assert told == sorted(told, reverse=best is max) and told[0] == found.score
        assert found.json()[f"validation_{metric}"] == found.score


@pytest.mark.slow
def test_the_command_takes_a_metric_and_repeats_it(tmp_path: Path) -> None:
    command = "tune heart_disease --client hospital --target sick --algorithm ditto --trials 2 --rounds 2"
    metric = ["--metric", "auc", "--jobs", "2", "--out", str(tmp_path / "study")]
    shown = CliRunner().invoke(app, [*command.split(), *metric])
    assert shown.exit_code == 0, shown.output
    assert "--select best --metric auc --seed 0" in " ".join(shown.output.split())
    assert "mean validation auc over clients" in shown.output
    with pytest.raises(RunError, match="holds a search with other settings"):
        search_table(tmp_path / "study", make("ditto"), TABLE | {"seed": 0}, trials=2, rounds=2)


@pytest.mark.slow
@pytest.mark.parametrize("last", [2, 11])
def test_a_search_that_was_killed_goes_on_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """In the middle of a trial, which stays open, with the study locked and half a line written."""
    fed, asked = world(), {"trials": 14, "rounds": 10}
    whole = search(fed, "ditto", folder=tmp_path / "whole", **asked)
    contestant, made = searching.Contestant, []

    def killed(*given: object) -> object:
        made.append(given)
        if len(made) > last:
            raise KeyboardInterrupt
        return contestant(*given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(searching, "Contestant", killed)
        search(fed, "ditto", folder=tmp_path / "killed", **asked)
    study = tmp_path / "killed" / "study.log"
    study.with_name("study.log.lock").touch()
    with open(study, "a") as stream:
        stream.write('{"op_code": 5, "tri')
    assert search(fed, "ditto", folder=tmp_path / "killed", **asked).json() == whole.json()


def test_two_searches_do_not_share_a_folder(tmp_path: Path) -> None:
    with systems.locked(tmp_path / "lock") as ours:
        assert ours
        with pytest.raises(RunError, match="in use by another search"):
            search(world(), "ditto", trials=1, rounds=2, folder=tmp_path)


def test_settings_that_cannot_run_are_said_in_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    fed = Federation.from_table("heart_disease", client="hospital", target="sick")
    with pytest.raises(RunError, match="needs known clusters"):
        search(fed, make("hierarchical", grouping="known"), trials=2, rounds=2)
    assert "Traceback" not in capfd.readouterr().err

"""Refitting: the deployed models have seen more rows, the scores are those from before, and it is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import coterie
from coterie._core.errors import SettingError
from coterie.conformance import federation
from coterie.engine.resplit import merged
from coterie.select.auto import fit_chosen
from coterie.train import fit as training
from coterie.train.fit import fit, resume

SPLIT = (0.6, 0.2, 0.2)


@pytest.mark.parametrize(("which", "rows"), [("validation", ("train", "validation")), ("all", None)])
def test_models_are_those_of_more_rows_and_scores_those_from_before(
    which: str, rows: tuple[str, ...] | None
) -> None:
    fed, rows = federation((20, 30, 25), split=SPLIT), rows or ("train", "validation", "test")
    before = fit(fed, "ditto", 12, select="best")
    run = fit(fed, "ditto", 12, select="best", refit=which)
    more = fit(merged(fed, rows), "ditto", before.deployed_round, evaluate_every=0)
    assert torch.equal(run.personal, more.personal) and not torch.equal(run.personal, before.personal)
    assert run.trained_on == rows and before.trained_on == ("train",)
    for metric in ("rmse", "mae"):
        assert torch.equal(run.score("test", metric), before.score("test", metric))
    assert run.traffic() == before.traffic()
    again = run.ledger.filter(kind="refit")
    assert again["bytes_up"].sum() == more.ledger.filter(more.ledger["kind"] != "evaluate")["bytes_up"].sum()


def test_a_run_that_was_killed_while_refitting_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = federation((20, 30), split=SPLIT)
    whole = fit(fed, "ditto", 9, tmp_path / "whole", select="best", refit="validation", checkpoint_every=4)

    def killed(run: coterie.Run, which: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "refit", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(fed, "ditto", 9, tmp_path / "cut", select="best", refit="validation", checkpoint_every=4)
    assert not (tmp_path / "cut" / "result.json").exists()
    run = resume(tmp_path / "cut", fed)
    assert torch.equal(run.personal, whole.personal) and run.trained_on == ("train", "validation")
    for name in ("models/models.safetensors", "metrics.parquet", "ledger.parquet", "test_rows.parquet"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert torch.equal(resume(tmp_path / "whole", fed).personal, whole.personal)


def test_the_folder_says_which_rows_were_seen(tmp_path: Path) -> None:
    fed = federation((20, 30), split=SPLIT)
    for which, rows in (("none", ["train"]), ("all", ["train", "validation", "test"])):
        fit(fed, "fedavg", 3, tmp_path / which, refit=which)
        assert json.loads((tmp_path / which / "result.json").read_text())["trained_on"] == rows
        assert json.loads((tmp_path / which / "models" / "model.json").read_text())["trained_on"] == rows


def test_what_cannot_be_refitted() -> None:
    with pytest.raises(SettingError, match="refit is 'some'; it is 'none', 'validation', 'all'"):
        fit(federation((20, 30), split=SPLIT), "fedavg", 1, refit="some")
    alone = fit(federation((20, 30)), "fedavg", 2, refit="validation")
    assert alone.trained_on == ("train",), "there are no more rows"


@pytest.mark.slow
def test_auto_refits_unless_told_otherwise(tmp_path: Path) -> None:
    fed = federation((30, 30, 30), split=SPLIT)
    run = fit_chosen(fed, 9, tmp_path / "auto", refit="validation", guard=False)
    assert run.trained_on == coterie.fit(fed, "auto", 9).trained_on == ("train", "validation")
    plain = fit_chosen(fed, 9, guard=False)
    assert plain.trained_on == ("train",) and torch.equal(plain.personal, run.scored)
    assert torch.equal(resume(tmp_path / "auto", fed).personal, run.personal)

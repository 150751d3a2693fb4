"""Clients whom the winner of `auto` would harm keep the model that they trained alone."""

from __future__ import annotations

import functools
import json

import pytest
import torch

from coterie import Federation, load, models, resume
from coterie._core.errors import RunError
from coterie.select.auto import Choice, choose, fit_chosen

STRANGER = 3


def with_a_stranger(seed: int = 2) -> Federation:
    """Fourteen clients, of which one has the opposite of the others' coefficients."""
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(6, generator=draw, dtype=torch.float64)
    xs = [torch.randn(60, 6, generator=draw, dtype=torch.float64) for _ in range(14)]
    signs = [-1 if k == STRANGER else 1 for k in range(14)]
    noise = [1.5 * torch.randn(60, generator=draw, dtype=torch.float64) for _ in range(14)]
    ys = [x @ (sign * w) + e for x, sign, e in zip(xs, signs, noise, strict=True)]
    return Federation.from_arrays(xs, ys, models.linear(), split=(0.4, 0.2, 0.4), seed=seed)


@functools.cache
def chosen(guard: bool) -> Choice:
    return choose(with_a_stranger(), rounds=27, methods=["fedavg", "ditto"], guard=guard)


@pytest.mark.slow
def test_a_stranger_keeps_its_own_model_and_nobody_else_does():
    free, guarded = chosen(False), chosen(True)
    assert guarded.guarded == [STRANGER] and free.guarded == [] and guarded.run.own is not None
    alone = guarded.run.own.alone
    others = [k for k in range(14) if k != STRANGER]
    assert torch.equal(guarded.run.personal[others], free.run.personal[others])
    assert torch.equal(guarded.run.personal[STRANGER], alone.personal[STRANGER])
    before, after = (one.run.score("test", "loss") for one in (free, guarded))
    assert float(after[STRANGER]) < 0.75 * float(before[STRANGER])
    assert "('3') keeps the model" in guarded.text() and "keeps the model" not in free.text()


def test_scores_are_those_of_the_deployed_models():
    run = chosen(True).run
    for split in ("train", "validation"):
        again = run.fed.score(run.personal.to(run.fed.dtype), split)["loss"].cpu().double()
        assert torch.allclose(run.score(split, "loss"), again, atol=1e-9), split


@pytest.mark.slow
def test_the_guard_holds_after_refitting_and_is_written_down(tmp_path):
    methods = {"methods": ["fedavg", "ditto"], "rounds": 27, "refit": "validation"}
    run = fit_chosen(with_a_stranger(), out=tmp_path / "run", **methods)
    with pytest.raises(RunError, match=r"coterie\.load"):
        resume(tmp_path / "run", with_a_stranger())
    assert torch.equal(load(tmp_path / "run").personal, run.personal)
    free = fit_chosen(with_a_stranger(), guard=False, **methods)
    same = (run.personal == free.personal).all(1)
    assert same.sum() == 13 and not same[STRANGER]
    assert json.loads((tmp_path / "run" / "choice.json").read_text())["own_models"] == [str(STRANGER)]

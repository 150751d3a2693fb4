"""What clients keep may lie on disk: the run is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import coterie
from coterie import Federation, fit, resume
from coterie._core.errors import SettingError


def federation() -> Federation:
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(6, 3, generator=generator) for _ in range(9)]
    return Federation.from_arrays(xs, [x.sum(1) for x in xs], model=coterie.models.linear())


def test_on_disk_is_in_memory(tmp_path: Path) -> None:
    algorithm = coterie.algorithms.make("ditto", participation=0.5, batch=2)
    inside = fit(federation(), algorithm, 6)
    outside = fit(federation(), algorithm, 6, tmp_path / "run", state_memory=0, checkpoint_every=2)
    assert outside.fed.runtime.store.columns["personal"].on_disk
    assert not inside.fed.runtime.store.columns["personal"].on_disk
    assert torch.equal(inside.personal, outside.personal)
    assert torch.equal(resume(tmp_path / "run", federation(), state_memory=0).personal, inside.personal)


def test_less_than_nothing_is_refused() -> None:
    with pytest.raises(SettingError, match="0 or more"):
        fit(federation(), "ditto", 1, state_memory=-1)

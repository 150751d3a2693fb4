"""A relayed run on real nodes with signed keys: models of a plain run, and nothing of them at the server."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch

from coterie.algorithms import make
from coterie.deploy import federation_folder
from coterie.deploy.policy import Policy
from coterie.train.fit import fit

if TYPE_CHECKING:
    from conftest import Live

pytestmark = pytest.mark.e2e
ROUNDS = 3


def test_a_relayed_run_needs_the_owners_word_and_has_the_models_of_a_plain_one(live: Live) -> None:
    """Nodes refuse until their owners allow `peers`; then FC trains what it trains in one process."""
    algorithm = make("fc", lr=0.1, batch=4)
    places = {name: live.table(name).parent / "policy.toml" for name in ("n0", "n1", "n2")}
    before = {name: Policy.read(path) for name, path in places.items()}
    for name, path in places.items():
        assert "peers" not in before[name].reveal
        live.kill(name)
        words = (*before[name].reveal, "peers")
        if name != "n2":
            dataclasses.replace(before[name], reveal=words).write(path)
        live.start_node(name)
    job = live.job("half", algorithm, ROUNDS, relay=True)
    live.run(job)
    notes = federation_folder.notes(job)
    assert any("n2" in line and "answers do not go to other nodes" in line for line in notes), notes
    live.kill("n2")
    dataclasses.replace(before["n2"], reveal=(*before["n2"].reveal, "peers")).write(places["n2"])
    live.start_node("n2")
    job = live.job("relayed", algorithm, ROUNDS, relay=True)
    live.run(job)
    expected = fit(live.local(), algorithm, ROUNDS, evaluate_every=0)
    models = live.models(job)
    assert len(models) == expected.fed.n
    for name, model in zip(expected.fed.names, expected.personal, strict=True):
        assert float((models[name] - model).abs().max()) < 1e-9, name
    needle = expected.personal[0][:1].double().numpy().tobytes()
    folder = live.folder.path
    told = [path.read_bytes() for path in (folder / "runs" / "relayed").rglob("*") if path.is_file()]
    told += [path.read_bytes() for path in job.rglob("*") if path.is_file()]
    assert told and not any(needle in content for content in told)
    assert torch.isfinite(expected.personal).all()

"""Secure sums and noise on a real SuperLink with real nodes."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

from coterie.algorithms import make
from coterie.train.fit import fit

if TYPE_CHECKING:
    from tests.e2e.conftest import Live

pytestmark = pytest.mark.e2e
FIVE = ("n0", "n1", "n2", "n3", "n4")


def test_a_secure_run_trains_what_one_process_trains(live: Live) -> None:
    """With secure sums of statistics and of answers; nodes have certificates and sign their keys."""
    methods = {
        name: make(name, batch=4, **more)
        for name, more in (("fedavg", {}), ("ditto", {}), ("ifca", {"clusters": 2}))
    }
    jobs = {
        name: live.job(f"secure-{name}", method, 3, l2=0.1, secure=True) for name, method in methods.items()
    }
    live.run(*jobs.values())
    for name, job in jobs.items():
        here = fit(live.local(l2=0.1), methods[name], 3, evaluate_every=0)
        there = live.models(job)
        for k, client in enumerate(here.fed.names):
            assert float((there[client] - here.personal[k]).abs().max()) < 1e-5
        assert live.result(job)["left_out"] == []


def test_trees_grow_from_secure_sums_of_histograms(live: Live) -> None:
    """Counts, histograms and judgements leave the nodes under masks; the trees are those of one process."""
    trees = make("trees", leaves=4, least=2.0)
    job = live.job("secure-trees", trees, 3, secure=True)
    live.run(job)
    here = fit(live.local(model=trees.own_model(3)), trees, 3, evaluate_every=0)
    there = live.models(job)
    for k, client in enumerate(here.fed.names):
        assert float((there[client] - here.personal[k]).abs().max()) < 1e-5
    assert live.result(job)["left_out"] == []


def test_a_node_that_is_killed_in_a_secure_run(live: Live) -> None:
    job = live.job("secure-killed", make("fedavg", batch=4), 8, FIVE, l2=0.1, secure=True, deadline=5.0)
    dead = []

    def watch(told: dict[str, Any]) -> None:
        if told.get("round", 0) >= 2 and not dead:
            live.kill("n4", signal.SIGKILL)
            dead.append(told["round"])

    live.run(job, watch=watch)
    live.start_node("n4")
    progress = json.loads((job / "progress.json").read_text())
    assert progress["state"] == "finished" and dead
    assert live.result(job)["lost_rounds"] <= 1
    assert torch.isfinite(next(iter(live.models(job, FIVE[:4]).values()))).all()


def test_rows_are_protected_by_the_nodes(live: Live) -> None:
    job = live.job("private-rows", make("ditto", batch=4), 3, l2=0.1)
    request = json.loads((job / "request.json").read_text())
    request["plan"] |= {"epsilon": 2.0, "delta": 1e-2, "unit": "row", "clip": 1.0}
    (job / "request.json").write_text(json.dumps(request))
    live.run(job)
    spent = json.loads((live.folder.path / "runs" / job.name / "privacy.json").read_text())
    assert spent["unit"] == "row" and set(spent["spent"].values()) == {2.0}
    own = json.loads(
        (live.folder.path / "nodes" / "n0" / "state" / request["run"] / "privacy.json").read_text()
    )
    assert own["used"] == [15, 15] and own["settings"]["epsilon"] == pytest.approx(
        1.6
    )  # a fifth is for statistics
    assert not (live.folder.path / "nodes" / "n0" / "state" / request["run"] / "noise.key").exists()

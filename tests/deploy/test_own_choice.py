"""A node's last word: a client whose validation rows speak against the models of a run keeps what it trains alone."""

from __future__ import annotations

import dataclasses

import polars
import pytest
import torch

from coterie._core import files
from coterie.algorithms import make
from coterie.data.federated import Roles
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.in_process import InProcessTransport
from coterie.deploy.node_service import NodeService
from coterie.deploy.policy import TRUSTING
from coterie.deploy.transport import NodeCaller
from coterie.engine.federation import Federation
from coterie.train.fit import fit

NAMES, RUN = (*(f"n{k}" for k in range(7)), "stranger"), "choice01"
ROWS = 110
GUARDED = dataclasses.replace(TRUSTING, guard=True)


@pytest.fixture(scope="module")
def table() -> polars.DataFrame:
    """Clients alike, but for one whose target follows another feature."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(8 * ROWS, 12, generator=g)
    score = torch.where(torch.arange(8 * ROWS) < 7 * ROWS, x[:, :6].sum(1), 2 * x[:, 10] - 2 * x[:, 11])
    y = (score + 3 * torch.randn(8 * ROWS, generator=g) > 0).long()
    features = {f"x{j}": x[:, j].numpy() for j in range(12)}
    return polars.DataFrame({"who": [NAMES[k // ROWS] for k in range(8 * ROWS)], **features, "y": y.numpy()})


def run(table, folder, policy=GUARDED, refit="none", **more):
    nodes = {
        name: NodeService(table.filter(polars.col("who") == name), folder / name, policy=policy)
        for name in NAMES
    }
    notes: list[str] = []
    caller = NodeCaller(InProcessTransport(nodes), note=notes.append)
    plan = survey(caller, {name: [] for name in NAMES}, RunRequest(Roles("who", "y")), RUN)
    method = make(more.pop("method", "fedavg"), lr=0.5)
    done = fit(connect(caller, plan, method, **more), method, 10, evaluate_every=0, refit=refit, **more)
    done.fed.runtime.finish(10, None)
    if done.refitted is not None:
        done.refitted.runtime.finish(10, None)
    places = {name: folder / name / RUN / "run" / "models" for name in NAMES}
    models = {
        name: files.read_tensors(place / "models.safetensors")[0]["personal"]
        for name, place in places.items()
    }
    own = {name: files.read_json(place / "model.json")["trained_alone"] for name, place in places.items()}
    return models, own, notes


@pytest.mark.slow
def test_a_stranger_keeps_its_own_model_and_says_so(table, tmp_path):
    models, own, notes = run(table, tmp_path)
    assert own["stranger"] == ["stranger"] and sum(map(len, own.values())) <= 2
    told = "'stranger' keeps models trained alone: its validation rows speak against those of this run"
    assert f"stranger: {told}" in notes
    assert models["n0"].equal(models["n1"]) and not models["stranger"].equal(models["n1"])
    fed = Federation.from_table(table, "who", "y")
    alone = fit(fed, make("local", lr=0.5), 10, evaluate_every=0)
    found = alone.personal[fed.names.index("stranger")]
    assert torch.allclose(models["stranger"][0], found, atol=1e-9)


@pytest.mark.slow
def test_without_the_guard_everybody_has_the_model_of_the_run(table, tmp_path):
    models, own, notes = run(table, tmp_path, TRUSTING)
    assert models["stranger"].equal(models["n0"]) and own["stranger"] == [] and not notes


@pytest.mark.slow
def test_the_choice_holds_after_refitting(table, tmp_path):
    models, own, _ = run(table, tmp_path, refit="validation")
    assert own["stranger"] == ["stranger"] and own["n0"] == []
    assert models["n0"].equal(models["n1"]) and not models["stranger"].equal(models["n1"])


@pytest.mark.parametrize("method", ["local", "trees"])
def test_where_clients_have_no_choice(table, tmp_path, method):
    """Training alone is what they did, or they could not train such a model alone."""
    from coterie.deploy.own_choice import can_choose

    node = NodeService(table.filter(polars.col("who") == "n0"), tmp_path / "n0", policy=GUARDED)
    caller = NodeCaller(InProcessTransport({"n0": node}))
    connect(caller, survey(caller, {"n0": []}, RunRequest(Roles("who", "y")), RUN), make("fedavg"))
    runtime = node.runs[RUN].runtime
    assert can_choose(runtime, make("fedavg")) and not can_choose(runtime, make(method))

"""Parity on a real SuperLink with real nodes: what a federation trains is what one process trains."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars
import pytest
import torch

from coterie.algorithms import all_algorithms, make
from coterie.models.description import description
from coterie.train.fit import fit

if TYPE_CHECKING:
    from tests.e2e.conftest import Live

pytestmark = pytest.mark.e2e
ROUNDS = 2


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.shape == other.shape
    scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
    assert not other.numel() or float((one - other).abs().max()) <= 1e-12 * scale


def same(live: Live, job: Any, here: Any, nodes: Any) -> None:
    """Personal models and metrics to 1e-12, the ledger to the byte."""
    there = live.models(job, nodes)
    assert sorted(there) == sorted(here.fed.names)
    for k, name in enumerate(here.fed.names):
        close(there[name], here.personal[k])
    folder = live.folder.path / "runs" / job.name
    assert polars.read_parquet(folder / "ledger.parquet").equals(here.ledger)
    metrics, expected = polars.read_parquet(folder / "metrics.parquet"), here.metrics
    assert metrics.drop("value").equals(expected.drop("value"))
    close(torch.tensor(metrics["value"].to_numpy()), torch.tensor(expected["value"].to_numpy()))


@pytest.fixture(scope="module")
def parity(live: Live) -> dict[str, Any]:
    """All algorithms on three nodes, one after the other in one ServerApp."""
    jobs = {}
    for name in all_algorithms():
        method = make(name, batch=4)
        own = method.trial_model(ROUNDS)
        model = None if own is None else description(own)
        jobs[name] = live.job(f"parity-{name}", method, ROUNDS, l2=0.1, described=model)
    live.run(*jobs.values())
    return jobs


@pytest.mark.parametrize("name", sorted(all_algorithms()))
def test_every_algorithm_is_the_same_on_flower(live: Live, parity: dict[str, Any], name: str) -> None:
    method = make(name, batch=4)
    here = fit(live.local(l2=0.1, model=method.trial_model(ROUNDS)), method, ROUNDS, evaluate_every=0)
    same(live, parity[name], here, ("n0", "n1", "n2"))
    assert live.result(parity[name])["left_out"] == []


def test_personal_models_are_not_on_the_server(live: Live, parity: dict[str, Any]) -> None:
    for job in parity.values():
        models = live.folder.path / "runs" / job.name / "models" / "model.json"
        assert not models.exists() or '"clients": []' in models.read_text()


def test_two_shards_of_five_thousand_clients(live: Live) -> None:
    """Stacked on two nodes and on one machine."""
    from coterie._core import randomness
    from coterie.engine.federation import Federation

    clients, rows = 10_000, 4
    total = clients * rows
    x = randomness.normal(randomness.slots(randomness.key(5, "x", torch.arange(total)), 3))
    y = (x.sum(-1) + randomness.normal(randomness.key(6, "e", torch.arange(total))) > 0).long()
    owner = torch.arange(total) // rows
    frame = polars.DataFrame(
        {
            "who": owner.numpy(),
            "group": (owner % 2).numpy(),
            **{f"x{k}": x[:, k].numpy() for k in range(3)},
            "y": y.numpy(),
        }
    )
    for name, parity_of in (("n6", 0), ("n7", 1)):
        live.kill(name)
        live.write_table(name, frame.filter(polars.col("who") % 2 == parity_of))
        live.start_shard(name)
    try:
        algorithm = make("ditto", lr=0.1)
        job = live.job("shards", algorithm, 3, ("n6", "n7"))
        live.run(job)
        here = fit(Federation.from_table(frame, "who", "y", cluster="group"), algorithm, 3, evaluate_every=0)
        same(live, job, here, ("n6", "n7"))
        trained = here.fed.ledger.total("messages_up", phase="train")
        assert trained == 3 * clients
    finally:
        for name in ("n6", "n7"):
            live.kill(name)
            live.write_table(name, live.rows(live.folder.nodes[name]))
            live.start_node(name)


def test_nodes_answer_from_memory(live: Live) -> None:
    """No process is started for a message, which would take ten seconds or so."""
    started: set[str] = set()

    def look(told: dict[str, Any]) -> None:
        for name in ("n0", "n1", "n2"):
            pid = live.processes[name].pid
            started.update(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())

    job = live.job("quick", make("fedavg", lr=0.1), 12)
    live.run(job, watch=look)
    assert not started and live.result(job)["left_out"] == []


def test_flowers_own_supernode_gives_the_same(live: Live) -> None:
    """One node of three is Flower's SuperNode, which starts a process for every message and has no certificate."""
    certificate, config = (live.folder.path / part for part in ("nodes/n2/node.crt", "federation.toml"))
    certificate.rename(certificate.with_suffix(".away"))
    config.touch()
    live.kill("n2", signal.SIGTERM)  # signs out, as Flower's own cannot do for a node that was killed
    live.processes["n2"].wait()
    live.start_node("n2", "--stock")
    try:
        algorithm = make("ditto", lr=0.1, batch=4)
        job = live.job("stock", algorithm, 2, deadline=120.0)
        live.run(job)
        assert live.result(job)["left_out"] == []
        same(live, job, fit(live.local(), algorithm, 2, evaluate_every=0), ("n0", "n1", "n2"))
    finally:
        live.kill("n2")
        certificate.with_suffix(".away").rename(certificate)
        config.touch()
        live.start_node("n2")


def test_run_is_left_by_ctrl_c_and_attach_follows(live: Live, until: Any) -> None:
    from coterie.deploy import federation_folder

    folder = live.folder.path
    words = federation_folder.command("federate", "run", folder, "--algorithm", "fedavg", "--rounds", 12)
    words += ["--name", "left", "--deadline", "20", "--evaluate-every", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    job = folder / "jobs" / "left"
    until(lambda: federation_folder.progress(job).get("round", 0) >= 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "The run continues" in errors and "federate attach" in errors
    done = subprocess.run(
        federation_folder.command("federate", "attach", folder), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout and "runs/left" in done.stdout
    assert live.result(job)["rounds"] == 12 and live.result(job)["lost_rounds"] == 0


def test_the_demo_needs_one_command(tmp_path: Any) -> None:
    from coterie.deploy import federation_folder

    words = federation_folder.command("federate", "demo", "--rounds", 5, "--out", tmp_path / "demo")
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        assert hospital in done.stdout

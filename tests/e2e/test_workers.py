"""Real processes share a simulation: same results as one process, a worker that is killed, torchrun, Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from coterie import fit, load
from coterie.algorithms import make
from coterie.train.workers import crew_of
from tests.engine.sharding import BUFFERS, METHODS, MODELS, federation, gap

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
DATA = ["heart_disease", "--client", "hospital", "--target", "sick"]


def coterie(*arguments: str, before: tuple[str, ...] = (sys.executable,)) -> list[str]:
    return [*before, "-m", "coterie", *arguments]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="module")
def four():
    with crew_of(4) as crew:
        yield crew


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_four_processes_train_what_one_trains(four, method, model):
    fed = federation(model, buffers=BUFFERS.get(method, "averaged"))
    algorithm = make(method, **METHODS[method])
    one, other = fit(fed, algorithm, rounds=3), fit(fed, algorithm, rounds=3, workers=four)
    assert gap(one.personal, other.personal) < 1e-6
    assert one.fed.ledger.entries == other.fed.ledger.entries


def test_exact_runs_of_the_command_have_the_same_bits(tmp_path):
    for count in "13":
        options = ["--rounds", "5", "--exact", "--workers", count, "--out", str(tmp_path / count)]
        subprocess.run(coterie("fit", *DATA, *options), env=environment(), check=True, capture_output=True)
    assert load(tmp_path / "1").personal.equal(load(tmp_path / "3").personal)


def children(pid: int) -> list[int]:
    command = ["ps", "-o", "pid=,args=", "--ppid", str(pid)]  # ends with 1 if there are none
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "coterie.train.worker" in line]


def test_a_killed_worker_is_named_and_the_run_resumes(tmp_path):
    out = tmp_path / "run"
    options = ["--rounds", "600", "--checkpoint-every", "5", "--workers", "3", "--refit", "none"]
    command = coterie("fit", *DATA, "--algorithm", "ditto", *options, "--out", str(out))
    running = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 300
    while not (out / "checkpoint" / "checkpoint.json").exists() and running.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert running.poll() is None, running.stderr.read()
    victim = children(running.pid)[1]
    os.kill(victim, signal.SIGKILL)
    _, told = running.communicate(timeout=60)
    assert running.returncode == 2
    assert f"worker 2 has died (process {victim}, SIGKILL), in round" in told and "coterie resume" in told
    assert not children(running.pid)
    subprocess.run(
        coterie("resume", str(out)), env=environment(), check=True, capture_output=True, timeout=300
    )
    assert (out / "result.json").exists()


def test_torchrun_starts_the_processes(tmp_path):
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "3",
        "--master-port",
        "29613",
    )
    options = ["--rounds", "4", "--workers", "torchrun", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        coterie("fit", *DATA, *options, before=torchrun), env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Run folder") == 1  # the first process alone
    fed_run = load(tmp_path / "run")
    subprocess.run(
        coterie("fit", *DATA, "--rounds", "4", "--out", str(tmp_path / "one")),
        env=environment(),
        check=True,
        capture_output=True,
    )
    assert gap(load(tmp_path / "one").personal, fed_run.personal) < 1e-6


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_starts_the_processes():
    pytest.importorskip("ray")
    fed, algorithm = federation("glm"), make("ditto", **METHODS["ditto"])
    one, other = fit(fed, algorithm, rounds=3), fit(fed, algorithm, rounds=3, workers="ray:4")
    assert gap(one.personal, other.personal) < 1e-6
    assert torch.get_num_threads() == 1

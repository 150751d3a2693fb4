"""Recipes and faults on real processes: what the compose file starts trains, and a few random moments to die at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from coterie.deploy import federation_folder, live_page
from coterie.deploy.demo import process
from coterie.deploy.federation_folder import FederationFolder
from tests.test_recipes import HOSPITALS, RECIPES, ROOT, bin_folder, compose

pytestmark = pytest.mark.e2e


def test_what_the_compose_file_starts_trains_and_is_seen(tmp_path: Path) -> None:
    """Its very commands, as processes; keys are made at the nodes, and the server has none of them."""
    pytest.importorskip("flwr", reason="a federation needs the extra 'flower'")
    port, place = federation_folder.free_port(), tmp_path / "federation"
    path = f"{bin_folder(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = ["sh", str(RECIPES / "hospitals.sh"), str(place), "127.0.0.1", str(port)]
    subprocess.run(script, env=environment, check=True, capture_output=True, text=True)
    assert not list((place / "server").rglob("node.key")) and not (place / "server" / "ca").exists()
    assert all((place / name / "node.key").stat().st_mode & 0o077 == 0 for name in HOSPITALS)

    with ExitStack() as stack:
        for name, service in compose()["services"].items():
            inside = {"/federation": str(place / "server"), "/node": str(place / name)}
            words = [
                next(
                    (word.replace(key, value) for key, value in inside.items() if word.startswith(key)), word
                )
                for word in service["command"]
            ]
            words += ["--host", "127.0.0.1"] if name == "server" else []
            stack.enter_context(
                process([sys.executable, "-m", "coterie", *words], tmp_path / f"{name}.log", environment)
            )
        federation_folder.wait_for_port("127.0.0.1", port, 300.0)
        run = ["federate", "run", str(place / "server"), "--rounds", "3", "--name", "first", "--wait", "300"]
        done = subprocess.run(
            [sys.executable, "-m", "coterie", *run],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        told = live_page.health(FederationFolder.open(place / "server"))
        assert told["status"] == "ok" and told["online"] == sorted(HOSPITALS)
        assert told["run"] == {"name": "first", "state": "finished", "round": 3, "rounds": 3}
        address = live_page.page_address(FederationFolder.open(place / "server"))
        token = address.partition("token=")[2]
        asked = urllib.request.Request(
            address.partition("?")[0] + "live.json", headers={"authorization": f"Bearer {token}"}
        )
        seen = json.loads(urllib.request.urlopen(asked, timeout=30).read())
        assert {node["name"] for node in seen["nodes"]} == set(HOSPITALS)
        assert all(node["bytes_up"] > 0 and node["answers"] == node["messages"] > 3 for node in seen["nodes"])
        assert len(seen["losses"]) > 1 and seen["run"]["algorithm"] == "ditto"
    for name in HOSPITALS:
        assert list((place / name / "state").glob("*/run/models/models.safetensors"))
    text = (tmp_path / "server.log").read_text().splitlines()
    lines = [json.loads(line) for line in text if line.startswith("{")]  # others are of Flower's processes
    assert {"ready: 4 nodes may connect to port " + str(port), "first: finished"} <= {
        line["message"] for line in lines
    }
    assert any('"who": "va"' in line for line in (tmp_path / "va.log").read_text().splitlines())


def faults(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", *words],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_commands_that_are_killed_at_two_random_moments_go_on() -> None:
    """`make faults` takes twenty of each."""
    faults("--part", "commands", "--moments", "2", "--seed", "1")


def test_full_disks_of_a_node_and_of_the_server_lose_nothing() -> None:
    pytest.importorskip("flwr", reason="a federation needs the extra 'flower'")
    mount = "mkdir /tmp/x$$ && mount -t tmpfs tmpfs /tmp/x$$ && umount /tmp/x$$; rmdir /tmp/x$$"
    try:
        subprocess.run(["unshare", "-rm", "sh", "-ec", mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no small disk can be mounted here: that needs `unshare -rm`")
    faults("--part", "disks", "--moments", "1")

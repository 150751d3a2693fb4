"""The folder of a federation and the first checks of its commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="a federation needs the extra 'flower'")

from coterie._core import files
from coterie._core.errors import RunError, SettingError
from coterie.data.federated import Roles
from coterie.deploy import federation_folder


@pytest.fixture
def folder(tmp_path):
    nodes = {"north": [], "south": ["anna", "bert"]}
    return federation_folder.init(
        tmp_path / "f", nodes, Roles("who", "y", drop=("id",)), ["example.org"], port=4567
    )


def test_a_federation_is_ready_to_copy(folder):
    assert folder.nodes == {"north": ["north"], "south": ["anna", "bert"]}
    assert folder.roles == Roles("who", "y", drop=("id",))
    for name in ("node.key", "node.pub", "ca.crt", "node.toml", "start.sh"):
        assert (folder.path / "nodes" / "north" / name).exists()
    assert files.read_toml(folder.path / "nodes" / "north" / "node.toml")["server"] == "example.org:4567"
    assert "coterie.deploy.flower:server" in (folder.path / "server" / "app" / "pyproject.toml").read_text()
    assert [file.name for file in (folder.path / "server" / "app").iterdir()] == ["pyproject.toml"]
    assert "nodes/NAME" in (folder.path / "README.md").read_text()


def test_no_secret_is_readable_by_others_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        made = federation_folder.init(tmp_path / "f", {"north": []}, Roles("who", "y"))
    finally:
        os.umask(before)
    secrets = [path for kind in ("*.key", "*.token") for path in made.path.rglob(kind)]
    assert len(secrets) == 4
    for path in (*secrets, made.path, *(path for path in made.path.rglob("*") if path.is_dir())):
        assert path.stat().st_mode & 0o077 == 0, path


def test_nodes_can_be_added_and_keys_stay(folder):
    key = (folder.path / "nodes" / "north" / "node.key").read_bytes()
    federation_folder.init(folder.path, {"west": []}, folder.roles)
    assert set(folder.nodes) == {"north", "south", "west"}
    assert (folder.path / "nodes" / "north" / "node.key").read_bytes() == key
    with pytest.raises(SettingError, match="has a node 'north' already"):
        federation_folder.init(folder.path, {"north": []}, folder.roles)


@pytest.mark.parametrize("name", ["", "../up", "a b", "a/b", "-x", "x" * 80])
def test_names_that_are_no_names_are_refused(tmp_path, name):
    with pytest.raises(SettingError, match="letters, digits"):
        federation_folder.init(tmp_path / "f", {name: []}, Roles("who", "y"))
    assert not (tmp_path / "f").exists()


def test_errors_say_what_to_do(command, tmp_path, folder):
    for words, told in (
        (("run", tmp_path / "nothing"), "coterie federate init"),
        (("attach", folder.path), "has no run yet"),
        (("attach", folder.path, "--run", "x"), "has no run 'x'"),
        (("run", folder.path, "--algorithm", "dito"), "Did you mean 'ditto'?"),
        (("run", folder.path, "--resume", "x"), "has no run 'x'"),
        (("run", folder.path, "--algorithm", "ditto"), "cannot be reached"),
        (("server", folder.path, "--insecure", "--host", "10.0.0.1"), "127.0.0.1 only"),
        (("node", folder.path / "nodes" / "north", "--data", "x.csv"), "x.csv: no such file"),
        (
            ("node", folder.path / "nodes" / "north", "--data", "heart_disease", "--insecure"),
            "127.0.0.1 only",
        ),
        (("node", tmp_path, "--data", "heart_disease"), "node.toml does not exist"),
        (("init", folder.path / "nodes", "--node", "a"), "is not a federation"),
    ):
        done = command("federate", *words)
        assert done.code == 2 and told in " ".join(done.err.split()), (words, done.err)


def test_two_nodes_do_not_share_a_state(tmp_path):
    with (
        federation_folder.only_one(tmp_path),
        pytest.raises(RunError, match="in use"),
        federation_folder.only_one(tmp_path),
    ):
        pass


def test_a_run_that_vanished_is_told_apart_from_one_that_waits(folder, tmp_path):
    job = folder.path / "jobs" / "gone"
    files.write_json(job / "progress.json", {"state": "running", "pid": 2**22 - 1, "round": 3, "rounds": 9})
    with pytest.raises(RunError, match=r"interrupted after round 3.*--resume gone"):
        federation_folder.follow(job, lambda told: None)
    files.write_json(job / "progress.json", {"state": "failed", "error": "no node", "round": 0, "rounds": 9})
    with pytest.raises(RunError, match="no node"):
        federation_folder.follow(job, lambda told: None)
    with pytest.raises(RunError, match="not started"):
        federation_folder.follow(tmp_path / "never", lambda told: None, limit=0.1)


def test_a_run_that_is_going_on_is_not_started_twice(folder):
    job = folder.path / "jobs" / "busy"
    told = {"state": "running", "pid": os.getpid(), "round": 3, "rounds": 9}
    files.write_json(job / "progress.json", told)
    with pytest.raises(RunError, match="is still running"):
        federation_folder.submit(folder, [job])
    assert federation_folder.progress(job) == told


def test_coterie_needs_flower_only_for_federations():
    script = """
import sys
sys.modules["flwr"] = None
import coterie, coterie.cli.federate, coterie.deploy.federation_folder, coterie.deploy.federation_plan
from coterie.deploy.federation_folder import load_flower
try:
    load_flower()
except coterie.CoterieError as problem:
    print(problem)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "coterie[flower]" in done.stdout


def test_the_page_on_security_has_every_method_and_what_it_sends():
    from coterie.algorithms import all_algorithms, make

    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    for name in all_algorithms():
        lines = [line for line in text.splitlines() if f"`{name}`" in line and line.startswith("|")]
        assert lines, f"docs/security.md does not say what {name} sends"
        for phase, (_, up) in make(name).traffic(10).items():
            assert not up or f"`{phase}`" in lines[0], f"docs/security.md: {name} sends {phase}"


def test_files_in_the_current_folder_are_not_imported(tmp_path):
    """A process of ours is not led astray by a module that happens to lie where it is started."""
    (tmp_path / "typing.py").write_text("raise SystemExit('the wrong module')")
    done = subprocess.run(
        federation_folder.command("--version"), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

"""The folder of a federation and the first checks of its commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="a federation needs the extra 'flower'")

from coterie._core import files
from coterie._core.errors import RunError, SettingError
from coterie.data import bundled, tables
from coterie.data.federated import Roles
from coterie.deploy import federation_folder, keys, membership
from coterie.deploy.audit import verify
from coterie.deploy.demo import write_images
from coterie.deploy.membership import Roster
from coterie.deploy.policy import ROLES, Policy
from coterie.models import installed


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
    assert len(secrets) == 5
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
    frame = tables.read(bundled.resolve("heart_disease"))
    Policy.strict(frame, Roles("hospital", "sick")).write(folder.path / "nodes" / "south" / "policy.toml")
    for words, told in (
        (("run", tmp_path / "nothing"), "coterie federate init"),
        (("attach", folder.path), "has no run yet"),
        (("attach", folder.path, "--run", "x"), "has no run 'x'"),
        (("run", folder.path, "--algorithm", "dito"), "Did you mean 'ditto'?"),
        (("run", folder.path, "--resume", "x"), "has no run 'x'"),
        (("run", folder.path, "--model", "mpl"), "no model 'mpl' for table. Did you mean 'mlp'?"),
        (("run", folder.path, "--models", tmp_path / "no.py"), "name a Python file with a dict MODELS"),
        (("init", tmp_path / "new", "--kind", "sounds"), "choose table, images or texts"),
        (("run", folder.path, "--algorithm", "ditto"), "cannot be reached"),
        (("server", folder.path, "--insecure", "--host", "10.0.0.1"), "127.0.0.1 only"),
        (("node", folder.path / "nodes" / "north", "--data", "x.csv"), "coterie federate policy"),
        (("node", folder.path / "nodes" / "north", "--show-policy"), "has no policy.toml"),
        (("node", folder.path / "nodes" / "south"), "--data PATH"),
        (("node", folder.path / "nodes" / "south", "--data", "x.csv"), "x.csv: no such file"),
        (("policy", folder.path / "nodes" / "south", "--data", "x.csv"), "exists already"),
        (("join", folder.path / "nodes" / "north", "north"), "has a key already"),
        (("sign", folder.path, tmp_path / "no.csr"), "is not a request"),
        (("revoke", folder.path, "nobody"), "has no node 'nobody'"),
        (("audit", tmp_path / "no.log"), "does not exist"),
        (
            ("node", folder.path / "nodes" / "south", "--data", "heart_disease", "--insecure"),
            "127.0.0.1 only",
        ),
        (("init", folder.path / "nodes", "--node", "a"), "is not a federation"),
    ):
        done = command("federate", *words)
        assert done.code == 2 and told in " ".join(done.err.split()), (words, done.err)


def test_owners_of_images_write_a_policy_that_pins_their_shape(command, tmp_path, monkeypatch):
    pytest.importorskip("PIL", reason="needs coterie[images]")
    monkeypatch.setattr(installed, "_from_files", {})
    write_images(tmp_path / "pictures" / "anna", torch.zeros(4, 8, 8), ["cat", "dog", "cat", "dog"])
    (tmp_path / "nets.py").write_text("from torch import nn\nMODELS = {'mine': lambda: nn.Flatten()}\n")
    (tmp_path / "east").mkdir()
    words = ("--data", tmp_path / "pictures", "--kind", "images", "--models", tmp_path / "nets.py")
    done = command("federate", "policy", tmp_path / "east", *words)
    assert done.code == 0 and "images of 1 x 8 x 8" in done.out
    policy = Policy.read(tmp_path / "east" / "policy.toml")
    assert (
        policy.kind == "images"
        and policy.shape == (1, 8, 8)
        and policy.models == ("cnn", "resnet9", "mlp", "mine")
    )
    for line, words in (
        ('image = "1x8x8"', "CHANNELSxHEIGHTxWIDTH"),
        ('client = "client"', "client = 'client'"),
        ('kind = "images"', "write"),
    ):
        text = (tmp_path / "east" / "policy.toml").read_text()
        (tmp_path / "bad.toml").write_text(text.replace(line, line.partition("=")[0] + '= "x"'))
        with pytest.raises(SettingError, match=words):
            Policy.read(tmp_path / "bad.toml")
    made = federation_folder.init(tmp_path / "f", {"east": []}, ROLES["images"], kind="images")
    assert made.kind == "images" and made.roles == ROLES["images"]


class TestMembership:
    """Keys are made at nodes; the operator signs, revokes and renews."""

    def test_a_node_joins_without_its_key_leaving_it(self, folder, tmp_path, command):
        assert command("federate", "join", tmp_path / "west", "west").code == 0
        done = command(
            "federate", "sign", folder.path, tmp_path / "west" / "west.csr", "--clients", "anton,berta"
        )
        assert done.code == 0 and "SHA-256" in done.out
        assert folder.nodes["west"] == ["anton", "berta"]
        back = folder.path / "nodes" / "west"
        assert {path.name for path in back.iterdir()} == {"node.pub", "node.crt", "ca.crt", "node.toml"}
        for name in ("node.crt", "ca.crt", "node.toml"):
            (tmp_path / "west" / name).write_bytes((back / name).read_bytes())
        keys.tls_context(
            tmp_path / "west" / "ca.crt", tmp_path / "west" / "node.key"
        )  # key and certificate fit
        admitted = Roster(folder.path)()
        assert admitted[keys.public_bytes(back / "node.pub")] == keys.fingerprint(back / "node.crt")
        assert list(verify(folder.path / "server" / "audit.log"))[-1]["what"] == "signed"

    def test_a_key_serves_one_node_and_a_revoked_key_does_not_return(self, folder, tmp_path):
        roster = Roster(folder.path)
        request = membership.join(tmp_path / "west", "west")
        membership.sign(folder.path, request)
        assert len(roster()) == 3
        (tmp_path / "east").mkdir()
        (tmp_path / "east" / "node.key").write_bytes((tmp_path / "west" / "node.key").read_bytes())
        (tmp_path / "east" / "node.key").chmod(0o600)
        with pytest.raises(SettingError, match="the node 'west' has this key"):
            membership.sign(folder.path, membership.join(tmp_path / "east", "east", renew=True))
        membership.revoke(folder.path, "west")
        assert len(roster()) == 2 and "west" not in folder.nodes
        with pytest.raises(SettingError, match="this key was revoked"):
            membership.sign(folder.path, request)
        membership.sign(folder.path, membership.join(tmp_path / "new", "west"))
        assert len(roster()) == 3

    def test_certificates_are_renewed_before_they_expire(self, folder, tmp_path):
        request = membership.join(tmp_path / "west", "west")
        place = membership.sign(folder.path, request)
        before = keys.fingerprint(place / "node.crt")
        assert membership.expiring(folder.path) == []
        _, public = keys.load_node_key(tmp_path / "west" / "node.key")
        keys.certify(folder.path / "ca", public, "west", place, days=3)
        (warning,) = membership.expiring(folder.path)
        assert "expires in 3 days" in warning and "--renew" in warning
        with pytest.raises(SettingError, match="--renew gives it another"):
            membership.sign(folder.path, request)
        membership.sign(folder.path, membership.join(tmp_path / "west", "west", renew=True), renew=True)
        assert membership.expiring(folder.path) == [] and keys.fingerprint(place / "node.crt") != before
        hosts = keys.hosts_of(folder.path / "server" / "server.crt")
        membership.renew_server(folder.path)
        assert keys.hosts_of(folder.path / "server" / "server.crt") == hosts and "example.org" in hosts

    @pytest.mark.parametrize("name", ["../../etc", "a b", ".", "-x"])
    def test_a_request_names_no_path(self, folder, tmp_path, name):
        with pytest.raises(SettingError, match="letters, digits"):
            membership.join(tmp_path / "evil", name)
        with pytest.raises(SettingError, match="letters, digits"):
            membership.sign(folder.path, keys.make_request(tmp_path / "forged", name.replace("/", "")))

    def test_a_request_is_signed_by_the_key_that_it_names(self, folder, tmp_path):
        request = membership.join(tmp_path / "west", "west")
        name, changed = request.read_bytes(), bytearray(request.read_bytes())
        place = name.index(b"-----END") - 20
        changed[place] = ord("A") if changed[place] != ord("A") else ord("B")
        request.write_bytes(bytes(changed))
        with pytest.raises(SettingError, match="is not"):
            membership.sign(folder.path, request)
        assert "west" not in folder.nodes

    def test_a_policy_is_written_once_and_shown(self, command, tmp_path):
        (tmp_path / "n").mkdir()
        words = ("--data", "heart_disease", "--client", "hospital", "--target", "sick", "--drop", "age")
        assert command("federate", "policy", tmp_path / "n", *words, "--allow", "cobo").code == 0
        shown = command("federate", "node", tmp_path / "n", "--show-policy")
        assert shown.code == 0 and "age" not in shown.out.split("Rows are split")[0]
        assert "cobo" in shown.out and "personal: sends its personal model" in shown.out
        assert command("federate", "approve", tmp_path / "n").out.startswith("0 runs wait")


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


@pytest.mark.slow
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
        tables = [line for line in text.splitlines() if line.startswith("|")]
        lines = [line for line in tables if f"`{name}`" in line.split("|")[1]]
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

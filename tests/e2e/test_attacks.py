"""Attacks on real processes with TLS: nodes that lie, a server that was taken over, strangers on the network.

Nobody ends a run, recovers a row, poisons anybody unnoticed, or makes the server's memory grow. The same attacks, and
many more, run against nodes in this process in `tests/deploy/test_malicious_server.py` and `test_malicious_node.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars
import pytest

from coterie._core import files
from coterie.data.federated import Roles
from coterie.deploy import federation_folder, keys, membership
from coterie.deploy.audit import verify
from coterie.deploy.policy import Policy

if TYPE_CHECKING:
    from tests.e2e.conftest import Live

pytestmark = pytest.mark.e2e
HOSTILE = Path(__file__).with_name("hostile.py")
MEGABYTE = 1 << 20


def memory(live: Live) -> float:
    """Megabytes that the server's process holds."""
    text = Path(f"/proc/{live.processes['server'].pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith("VmRSS"))


SPEC = {
    "client": "who",
    "target": "y",
    "cluster": None,
    "task": "binary",
    "classes": ["0", "1"],
    "numeric": ["a"],
    "categories": [],
    "warnings": [],
}


def attacks(run: str) -> list[dict[str, Any]]:
    """Messages of a server that was taken over."""
    roles = Roles("who", "y").to_json()
    about = {"run": run, "roles": roles}
    stats = {"kind": "statistics", **about, "spec": SPEC, "split": [0.6, 0.2, 0.2], "seed": 0}
    found = [{"kind": "hello", **about}, stats]
    found += [
        {**stats, "run": secrets.token_hex(8), "split": [0.0, 0.0, 1.0], "seed": seed} for seed in range(8)
    ]
    found += [{**stats, "spec": {**SPEC, "categories": [name]}} for name in ("ssn", "note", "a")]
    found += [{**stats, "spec": {**SPEC, "numeric": [name]}} for name in ("ssn", "note")]
    counted = {"step": "histogram", "columns": [], "privacy": None, "secure": True, "weight": 1.0}
    found += [{**stats, "about": {**counted, "levels": {name: ["7.0"]}}} for name in ("a", "who", "y")]
    found += [{"kind": "hello", **about, "roles": {**roles, "target": name}} for name in ("ssn", "note", "a")]
    spec = {**SPEC, "warnings": []}
    scales = [{"name": "a", "mean": 0.0, "sd": 1.0, "missing": False}]
    encoding = {"spec": spec, "scales": scales, "choices": [], "target_mean": 0.0, "target_sd": 1.0}
    logistic = {"model": "logistic", "l2": 0.0, "intercept": True, "reduction": "mean", "features": 1}

    def opened(algorithm: str, model: dict[str, Any], **settings: Any) -> dict[str, Any]:
        setup = {"algorithm": {"name": algorithm, "settings": {"batch": 0, **settings}}, "model": model}
        setup["preprocessor"] = json.dumps(encoding)
        clients = {"clients": ["client g"], "seed": 0, "split": [0.6, 0.2, 0.2]}
        return {"kind": "open", **about, **clients, "setup": setup}

    found += [
        opened("cobo", logistic),
        opened("ditto", logistic, batch=1),
        opened("ditto", logistic, steps=10**9),
    ]
    found += [opened("ditto", {"model": "causal_lm", "path_or_name": "/etc"})]
    found += [opened("ditto", {"model": "mlp", "hidden": [20_000, 20_000], "classes": 2, "inputs": [1]})]
    found += [{**opened("ditto", logistic), "run": "../../../tmp/x"}, opened("ditto", logistic)]
    call = {
        "kind": "call",
        "run": run,
        "algorithm": "ditto",
        "phase": "train",
        "round": 1,
        "call": 0,
        "numbers": {},
    }
    call |= {
        "begins": True,
        "welcome_numbers": {},
        "lasting": True,
        "split": "",
        "metrics": [],
        "compress": "",
    }
    call |= {"since": None, "floor": None}
    after = {**call, "begins": False, "since": [1, 0]}
    found += [call, {**after, "phase": "deploy"}, {**after, "phase": "__class__"}, {**after, "round": 10**6}]
    found += [{**after, "phase": "deploy", "split": "test", "metrics": ["auc"]}, {**after, "nonce": "once"}]
    return [*found, {**after, "nonce": "once"}, {"kind": "rows", **about}]


def test_a_server_that_was_taken_over_gets_no_row_and_no_personal_model(live: Live) -> None:
    place = live.folder.path / "nodes" / "n7"
    rows = live.rows(live.folder.nodes["n7"])
    secret = rows.with_columns(
        ssn=polars.Series([f"{k:03d}-11-{7 * k:04d}" for k in range(rows.height)]),
        note=polars.Series([f"patient {k} HIV pos" for k in range(rows.height)]),
    )
    live.kill("n7")
    live.write_table("n7", secret)
    Policy.strict(secret, Roles("who", "y", drop=("ssn", "note", "group"))).write(place / "policy.toml")
    live.start_node("n7")
    job = keys.private_folder(live.folder.path / "jobs" / "takeover")
    app = live.folder.path / "server" / "hostile-app"
    messages = attacks(secrets.token_hex(8))
    files.write_json(job / "messages.json", {"node": "n7", "messages": messages, "d": 2})
    bundle = (live.folder.path / "server" / "app" / "pyproject.toml").read_text()
    files.write_text(app / "pyproject.toml", bundle.replace("coterie.deploy.flower:server", "hostile:server"))
    try:
        operator = live.folder.operator()
        end = time.monotonic() + 120
        while "online" not in operator.nodes().get("n7", "") and time.monotonic() < end:
            time.sleep(0.5)
        operator.start(app, [job.absolute()])
        while not (job / "heard.json").exists():
            assert time.monotonic() < end + 120, live.log("server")[-2000:]
            time.sleep(0.5)
    finally:
        live.kill("n7")
        live.write_table("n7", rows)
        live.start_node("n7")
    heard = files.read_json(job / "heard.json")
    answered = [k for k, one in enumerate(heard) if "error" not in one["header"]]
    fine = [k for k, one in enumerate(messages) if one in (messages[0], messages[1])]
    allowed = {
        *fine,
        *(k for k, one in enumerate(messages) if one["kind"] == "open" and k + 1 < len(messages)),
    }
    kinds = [(messages[k]["kind"], messages[k].get("phase")) for k in answered]
    assert kinds == [
        ("hello", None),
        ("statistics", None),
        ("open", None),
        ("call", "train"),
        ("call", "train"),
    ], heard
    assert set(answered[:2]) == {0, 1} and answered[2] in allowed
    text = json.dumps(heard)
    for name in ("ssn", "note"):
        assert not any(value in text for value in secret[name]), name
    assert not any(repr(value) in text for value in secret["a"].to_list())
    entries = list(verify(place / "state" / "audit.log"))
    assert sum("refused" in entry for entry in entries) >= len(messages) - 8


class TestStrangers:
    """People on the network without a key of the federation; the server's memory stays where it was."""

    @pytest.fixture(autouse=True)
    def idle(self, live: Live) -> Any:
        before = memory(live)
        yield
        assert memory(live) - before < 100, f"the server grew from {before:.0f} to {memory(live):.0f} MB"
        assert live.processes["server"].poll() is None

    def connect(self, live: Live, timeout: float = 20.0) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=live.folder.path / "server" / "ca.crt")
        bare = socket.create_connection(("127.0.0.1", live.folder.port), timeout)
        return context.wrap_socket(bare, server_hostname="localhost")

    def post(self, stranger: ssl.SSLSocket, path: str, length: int, headers: bytes = b"") -> None:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n".encode()
        stranger.sendall(head + headers + b"content-type: application/protobuf\r\n\r\n")

    def answer(self, stranger: ssl.SSLSocket) -> bytes:
        try:
            return stranger.recv(4096)
        except (OSError, ssl.SSLError):
            return b""

    def test_bodies_of_strangers_are_not_kept(self, live: Live) -> None:
        fake = (
            b"flwr-public-key: QUJD\r\nflwr-signature: QUJD\r\nflwr-timestamp: 2030-01-01T00:00:00+00:00\r\n"
        )
        for _ in range(3):
            with self.connect(live) as stranger:
                self.post(stranger, "/v1/fleet/push-object", 60 * MEGABYTE, fake)
                sent = 0
                try:
                    while sent < 60:
                        stranger.sendall(b"\0" * MEGABYTE)
                        sent += 1
                except (OSError, ssl.SSLError):
                    pass
                assert self.answer(stranger)[:12] in (b"HTTP/1.1 401", b"")

    def test_requests_that_are_too_long_are_refused(self, live: Live) -> None:
        with self.connect(live) as stranger:
            self.post(stranger, "/v1/fleet/push-object", 1 << 40)
            assert b"413" in self.answer(stranger)[:20]
        with self.connect(live) as stranger:
            with contextlib.suppress(OSError):  # it may be shut out before all of it is sent
                self.post(stranger, "/v1/fleet/pull-messages", 0, b"x: " + b"A" * 2_000_000 + b"\r\n")
            assert self.answer(stranger)[:12] in (b"HTTP/1.1 400", b"")

    def test_a_flood_of_headers_leaves_nothing_behind(self, live: Live) -> None:
        for _ in range(100):
            with self.connect(live) as stranger:
                name = secrets.token_hex(4000).encode()
                self.post(stranger, "/v1/fleet/pull-messages", 0, b"flwr-public-key: " + name + b"\r\n")
                assert b"401" in self.answer(stranger)[:20]

    @pytest.mark.parametrize(
        "path",
        [
            "/v1/control/start-run", "//v1/control/start-run", "/v1/fleet/../control/start-run",
            "/v1/control%2Fstart-run", "/v1/./control/start-run",
            "/V1/control/start-run", "/v1/control/start-run/", "/v1/control;a/start-run",
        ],
    )  # fmt: skip
    def test_no_path_leads_around_the_operators_token(self, live: Live, path: str) -> None:
        with self.connect(live) as stranger:
            self.post(stranger, path, 0)
            assert self.answer(stranger)[9:12] in (b"400", b"401", b"403", b"404", b"405", b"307")

    def test_no_request_hides_in_another(self, live: Live) -> None:
        """Two lengths, chunks, a second request in the body, another protocol: one refusal, then the end."""
        hidden = b"GET /v1/control/list-nodes HTTP/1.1\r\nhost: localhost\r\n\r\n"
        for headers in (
            b"transfer-encoding: chunked\r\n",
            b"content-length: 7\r\n",
            b"transfer-encoding: chunked, identity\r\n",
            b"upgrade: h2c\r\nconnection: upgrade\r\n",
            b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n",
            b"expect: 100-continue\r\n",
        ):
            with self.connect(live) as stranger:
                self.post(stranger, "/v1/fleet/pull-messages", len(hidden), headers)
                with contextlib.suppress(OSError):
                    stranger.sendall(hidden)
                heard = self.answer(stranger)
                while more := self.answer(stranger):
                    heard += more
                assert heard.count(b"HTTP/1.1 ") <= 1 and b" 200 " not in heard, heard

    def test_half_open_connections_are_closed(self, live: Live) -> None:
        begun, half = time.monotonic(), []
        for k in range(300):
            one = (
                self.connect(live)
                if k % 2
                else socket.create_connection(("127.0.0.1", live.folder.port), 5.0)
            )
            if k % 2:
                one.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: a\r\nx-a: ")
            half.append(one)
        began = time.monotonic()
        live.folder.operator(observe=True).nodes()  # others are served meanwhile
        assert time.monotonic() - began < 10
        while time.monotonic() - begun < 60:
            time.sleep(1.0)
            for one in half[1::2]:
                try:
                    one.sendall(b"a")  # a byte now and then does not keep it open
                except (OSError, ssl.SSLError):
                    pass
            if all(self.closed(one) for one in half):
                break
        assert all(self.closed(one) for one in half), f"open after {time.monotonic() - begun:.0f} s"
        for one in half:
            one.close()

    def closed(self, one: socket.socket) -> bool:
        one.setblocking(False)
        try:
            return one.recv(1) == b""
        except (ssl.SSLWantReadError, BlockingIOError):
            return False
        except (OSError, ssl.SSLError):
            return True

    def test_a_certificate_of_another_federation_is_refused(self, live: Live, tmp_path: Path) -> None:
        keys.make_authority(tmp_path / "other", "other")
        keys.make_node_key(tmp_path / "n0", "n0")
        keys.certify(
            tmp_path / "other", keys.load_node_key(tmp_path / "n0" / "node.key")[1], "n0", tmp_path / "n0"
        )
        context = keys.tls_context(live.folder.path / "server" / "ca.crt", tmp_path / "n0" / "node.key")
        bare = socket.create_connection(("127.0.0.1", live.folder.port), 20.0)
        try:
            with context.wrap_socket(bare, server_hostname="localhost") as one:
                self.post(one, "/v1/fleet/pull-messages", 0)
                assert one.recv(100) == b"", "the server answered"
        except (OSError, ssl.SSLError):
            pass  # the handshake failed, as it should

    @pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
    def test_old_tls_is_refused(self, live: Live, version: ssl.TLSVersion) -> None:
        import warnings

        context = ssl.create_default_context(cafile=live.folder.path / "server" / "ca.crt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = version
        bare = socket.create_connection(("127.0.0.1", live.folder.port), 20.0)
        with pytest.raises((OSError, ssl.SSLError)):
            context.wrap_socket(bare, server_hostname="localhost")


def test_a_key_without_its_certificate_and_a_revoked_node_stay_outside(
    live: Live, tmp_path: Path, until: Any
) -> None:
    """A stolen key file alone does not let anybody in; revoking takes effect without a restart."""
    import subprocess

    def start(folder: Path) -> subprocess.CompletedProcess[str]:
        words = federation_folder.command("federate", "node", folder, "--data", live.table("n6"))
        words += ["--server", f"127.0.0.1:{live.folder.port}", "--client", live.folder.nodes["n5"][0]]
        return subprocess.run(words, capture_output=True, text=True, timeout=120)

    place = live.folder.path / "nodes" / "n6"
    stolen = tmp_path / "stolen"
    stolen.mkdir(mode=0o700)
    for name in ("node.key", "ca.crt", "node.toml", "policy.toml"):
        (stolen / name).write_bytes((place / name).read_bytes())
    os.chmod(stolen / "node.key", 0o600)
    done = start(stolen)
    assert done.returncode == 2 and "rejected this node's key" in done.stderr
    clients = live.folder.nodes["n6"]
    membership.revoke(live.folder.path, "n6")
    try:
        until(lambda: live.processes["n6"].poll() is not None)
        assert "revoked" in live.log("n6")
        (stolen / "node.crt").write_bytes((place / "node.crt").read_bytes())
        done = start(stolen)
        assert done.returncode == 2 and "revoked" in done.stderr
    finally:
        config = files.read_toml(live.folder.path / "federation.toml")
        config["nodes"]["n6"] = clients
        config["revoked"] = {}
        files.write_toml(live.folder.path / "federation.toml", config)
        live.start_node("n6")

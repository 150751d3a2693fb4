"""Doors of a real SuperLink: who has no registered key, no certificate or an old message stays outside."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coterie._core import files
from coterie._core.errors import SettingError
from coterie.deploy import federation_folder, keys

if TYPE_CHECKING:
    import httpx

    from tests.e2e.conftest import Live

pytestmark = pytest.mark.e2e


def node_folder(live: Live, path: Path, name: str = "n0") -> Path:
    """A copy of a node's folder without its key."""
    path.mkdir(mode=0o700)
    for file in ("ca.crt", "node.toml", "policy.toml"):
        shutil.copy(live.folder.path / "nodes" / name / file, path / file)
    return path


def start(live: Live, folder: Path, address: str | None = None) -> subprocess.CompletedProcess[str]:
    words = federation_folder.command("federate", "node", folder, "--data", live.table("n0"))
    words += ["--server", address or f"127.0.0.1:{live.folder.port}"]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_a_key_that_is_not_registered_is_refused(live: Live, tmp_path: Path) -> None:
    folder = node_folder(live, tmp_path / "stranger")
    keys.make_node_key(folder, "n0")
    done = start(live, folder)
    assert done.returncode == 2 and "rejected this node's key" in done.stderr


def test_without_a_key_there_is_no_node(live: Live, tmp_path: Path) -> None:
    folder = node_folder(live, tmp_path / "keyless")
    done = start(live, folder)
    assert done.returncode == 2 and "node.key does not exist" in done.stderr


def test_a_server_with_a_foreign_certificate_gets_no_node(live: Live, tmp_path: Path) -> None:
    folder = node_folder(live, tmp_path / "misled")
    shutil.copy(live.folder.path / "nodes" / "n0" / "node.key", folder / "node.key")
    keys.make_authority(tmp_path / "other", "another federation")
    shutil.copy(tmp_path / "other" / "ca.crt", folder / "ca.crt")
    done = start(live, folder)
    assert done.returncode == 2 and "was not issued by this federation" in done.stderr


@contextmanager
def tls_server(folder: Path) -> Iterator[str]:
    """Somebody who listens with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                try:
                    context.wrap_socket(connection, server_side=True).close()
                except OSError:
                    connection.close()

        threading.Thread(target=listen, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def test_a_server_with_an_expired_certificate_gets_no_node(live: Live, tmp_path: Path) -> None:
    folder = node_folder(live, tmp_path / "patient")
    shutil.copy(live.folder.path / "nodes" / "n0" / "node.key", folder / "node.key")
    keys.make_authority(tmp_path / "ca", "old")
    keys.make_server_certificate(tmp_path / "ca", tmp_path / "old", ["127.0.0.1"], days=-1)
    shutil.copy(tmp_path / "ca" / "ca.crt", folder / "ca.crt")
    with tls_server(tmp_path / "old") as address:
        done = start(live, folder, address)
    assert done.returncode == 2 and "expired" in done.stderr


def test_a_node_does_not_pass_for_the_server(live: Live, tmp_path: Path) -> None:
    """Its certificate is of the federation, too, but for a node."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    folder, place = node_folder(live, tmp_path / "misled"), live.folder.path / "nodes" / "n1"
    shutil.copy(live.folder.path / "nodes" / "n0" / "node.key", folder / "node.key")
    (tmp_path / "posing").mkdir()
    shutil.copy(place / "node.crt", tmp_path / "posing" / "server.crt")
    private, _ = keys.load_node_key(place / "node.key")
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "posing" / "server.key").write_bytes(pem)
    with tls_server(tmp_path / "posing") as address:
        done = start(live, folder, address)
    assert done.returncode == 2 and "certificate" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def http(live: Live) -> Iterator[httpx.Client]:
    import httpx

    place = live.folder.path / "nodes" / "n0"
    context = keys.tls_context(place / "ca.crt", place / "node.key")
    with httpx.Client(verify=context, base_url=f"https://127.0.0.1:{live.folder.port}", timeout=30) as client:
        yield client


def signed(key: Path, at: str | None = None) -> dict[str, str]:
    """The headers by which Flower knows a node."""
    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    private, public = keys.load_node_key(key)
    stamp = at or now().isoformat()
    return {
        "flwr-public-key": b64encode(public_key_to_bytes(public)).decode(),
        "flwr-signature": b64encode(sign_message(private, stamp.encode())).decode(),
        "flwr-timestamp": stamp,
        "content-type": "application/protobuf",
        "accept": "application/protobuf",
    }


class TestRequests:
    """What somebody on the network could try without our programs."""

    def heartbeat(self, live: Live, of: str = "n0") -> bytes:
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
        from flwr.proto.node_pb2 import Node

        number = int((live.folder.path / "nodes" / of / "node-id").read_text())
        return SendNodeHeartbeatRequest(node=Node(node_id=number), heartbeat_interval=30).SerializeToString()

    def post(self, http: httpx.Client, path: str, body: bytes, headers: dict[str, str]) -> int:
        plain = {"content-type": "application/protobuf", "accept": "application/protobuf"}
        return http.post(path, content=body, headers={**plain, **headers}).status_code

    def test_a_request_is_good_once(self, live: Live, http: httpx.Client) -> None:
        headers = signed(live.folder.path / "nodes" / "n0" / "node.key")
        path, body = "/v1/fleet/send-node-heartbeat", self.heartbeat(live)
        assert self.post(http, path, body, headers) == 200
        assert self.post(http, path, body, headers) == 401

    def test_an_old_request_is_refused(self, live: Live, http: httpx.Client) -> None:
        headers = signed(live.folder.path / "nodes" / "n0" / "node.key", "2020-01-01T00:00:00+00:00")
        assert self.post(http, "/v1/fleet/send-node-heartbeat", self.heartbeat(live), headers) == 401

    def test_a_request_without_a_signature_is_refused(self, live: Live, http: httpx.Client) -> None:
        assert self.post(http, "/v1/fleet/send-node-heartbeat", self.heartbeat(live), {}) == 401

    def test_nobody_speaks_for_another_node(self, live: Live, http: httpx.Client) -> None:
        headers = signed(live.folder.path / "nodes" / "n0" / "node.key")
        body = self.heartbeat(live, of="n1")
        assert self.post(http, "/v1/fleet/send-node-heartbeat", body, headers) == 401

    def test_nobody_registers_itself(self, live: Live, http: httpx.Client, tmp_path: Path) -> None:
        from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest

        keys.make_node_key(tmp_path / "own", "n0")
        public = keys.public_bytes(tmp_path / "own" / "node.pub")
        body = RegisterNodeFleetRequest(public_key=public).SerializeToString()
        status = self.post(http, "/v1/fleet/register-node", body, signed(tmp_path / "own" / "node.key"))
        assert status in (401, 403, 412)

    @pytest.mark.parametrize("token", [{}, {"coterie-operator": "0" * 64}])
    @pytest.mark.parametrize("path", ["start-run", "register-node", "list-nodes", "list-runs"])
    def test_runs_and_keys_are_for_the_operator(
        self, http: httpx.Client, path: str, token: dict[str, str]
    ) -> None:
        assert self.post(http, f"/v1/control/{path}", b"", token) == 403


def test_without_tls_only_this_machine(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "example.org", "10.0.0.1"):
        with pytest.raises(SettingError, match=r"127\.0\.0\.1 only"):
            federation_folder.require_loopback(host)


def test_no_secret_can_be_read_by_others(live: Live) -> None:
    """Of all files of the federation, also those that running it has made."""
    folder = live.folder.path
    secrets = [path for name in ("*.key", "*.token") for path in folder.rglob(name)]
    assert len(secrets) >= 11
    assert all(path.stat().st_mode & 0o077 == 0 for path in secrets)
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir() and path.parent == folder)):
        assert path == folder / "runs" or path.stat().st_mode & 0o077 == 0, path
    assert files.read_toml(folder / "federation.toml")["nodes"].keys() == live.folder.nodes.keys()
    tokens = [live.folder.token.encode(), live.folder.observer.encode()]
    inside = [
        path.read_bytes().split(b"\n")[1] for path in folder.rglob("*.key")
    ]  # a line of each private key
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix not in (".key", ".token"):
            content = path.read_bytes()
            assert not any(secret in content for secret in (*tokens, *inside)), f"{path} holds a secret"

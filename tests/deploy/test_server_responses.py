"""What a server that was taken over answers to a node's requests, below the messages that a node understands."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from coterie.deploy import flower_private, keys

pytest.importorskip("flwr", reason="a node needs the extra 'flower'")
from coterie.deploy import flower_node
from coterie.deploy.flower_node import Link, Refused


class Stop(Exception):
    """Ends a node that would try again."""


@pytest.fixture
def link(tmp_path: Path) -> Link:
    keys.make_node_key(tmp_path, "n0")

    def stop(text: str) -> None:
        raise Stop(text)

    return Link("", tmp_path / "node.key", None, stop)


@contextlib.contextmanager
def listening(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that answers so whatever it is asked; yield its address and what it was asked."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = listener.accept()[0]
                    with connection, contextlib.suppress(OSError):
                        asked.append(connection.recv(1 << 16))
                        connection.sendall(answer)

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", asked
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5.0)


def told(link: Link, answer: bytes) -> str:
    """What a node says of a server that answers so."""
    with listening(answer) as (link.address, asked):
        with pytest.raises((Stop, Refused)) as problem:
            link.serve(lambda message: message)
        assert asked
    return str(problem.value)


@pytest.mark.parametrize(
    "status", ["301 Moved", "303 See Other", "307 Temporary Redirect", "308 Permanent Redirect"]
)
def test_a_node_is_not_sent_to_other_machines(link: Link, status: str) -> None:
    """Those of the hospital's network, which the server itself cannot reach."""
    with listening(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") as (inside, asked):
        head = f"HTTP/1.1 {status}\r\nlocation: http://{inside}/admin\r\ncontent-length: 0\r\n\r\n"
        assert "leads elsewhere" in told(link, head.encode())
        assert not asked


def test_a_small_response_does_not_unpack_into_a_large_one(link: Link) -> None:
    body = gzip.compress(bytes(1 << 20))
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(body)}\r\n\r\n"
    assert "is compressed" in told(link, head.encode() + body)


@pytest.mark.parametrize(
    "length", ["content-length: 99999999999\r\n", "transfer-encoding: chunked\r\n", "connection: close\r\n"]
)
@pytest.mark.parametrize("status", ["200 OK", "401 Unauthorized"])
def test_a_response_without_end_is_not_read(link: Link, length: str, status: str) -> None:
    assert "does not say" in told(
        link, f"HTTP/1.1 {status}\r\n{length}\r\n".encode() + b"ff\r\n" + bytes(255)
    )


def test_errors_of_a_server_command_no_terminal(link: Link) -> None:
    body = b"\x1b]0;owned\x07\x1b[2J\xe2\x80\xae\nconnected"
    head = f"HTTP/1.1 401 Unauthorized\r\ncontent-length: {len(body)}\r\n\r\n"
    said = told(link, head.encode() + body)
    assert "owned" in said and said.isprintable()


def test_a_node_does_not_fetch_a_message_of_very_many_parts() -> None:
    from flwr.proto.message_pb2 import ObjectTree

    asked: list[str] = []
    client = SimpleNamespace(
        PullObject=lambda request: asked.append("part"),
        ConfirmMessageReceived=lambda request: asked.append("let go"),
    )
    tree = ObjectTree(object_id="f" * 64)
    tree.children.extend(ObjectTree(object_id=f"{k:064x}") for k in range(99_999))
    with pytest.raises(flower_private.ObjectPullError, match="100000 parts is refused"):
        flower_node.received(client, None, SimpleNamespace(run_id=1, message_id="f" * 64), tree, 10.0)
    assert asked == ["let go"]

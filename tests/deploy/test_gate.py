"""The gate in front of a SuperLink: who may use which of its interfaces, and how long news are waited for."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from coterie.deploy import flower_link
from coterie.deploy.flower_link import Bell, Gate


def scope(path, client="10.1.2.3", content_length="10", **headers):
    headers |= {"content_length": content_length} if content_length else {}
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "path": path, "headers": pairs, "client": (client, 5) if client else None}


@pytest.fixture
def gate():
    return Gate(None, "secret", threading.Event())


def test_nodes_are_let_in_when_their_keys_are_registered(gate):
    assert gate.refusal(scope("/v1/fleet/pull-messages"))[0] == 503
    gate.ready.set()
    assert gate.refusal(scope("/v1/fleet/pull-messages")) is None


def test_a_signed_request_passes_once(gate):
    gate.ready.set()
    assert gate.refusal(scope("/v1/fleet/push-messages", flwr_signature="abc")) is None
    assert gate.refusal(scope("/v1/fleet/push-messages", flwr_signature="abc"))[0] == 401
    assert gate.refusal(scope("/v1/fleet/push-messages", flwr_signature="abd")) is None


def test_old_signatures_are_forgotten(gate, monkeypatch):
    gate.ready.set()
    now = time.monotonic()
    for k in range(100):
        monkeypatch.setattr(flower_link.time, "monotonic", lambda k=k: now + 60.0 * k)
        gate.refusal(scope("/v1/fleet/push-messages", flwr_signature=str(k)))
    assert len(gate.seen) < 10


@pytest.mark.parametrize("length", ["", "-1", "many", str(1 << 31)])
def test_a_request_without_end_is_refused(gate, length):
    gate.ready.set()
    assert gate.refusal(scope("/v1/fleet/push-object", content_length=length))[0] == 413


@pytest.mark.parametrize(
    "path", ["/v1/runtime/acquire-task", "/v1/control/start-run", "/docs", "/", "/openapi.json"]
)
@pytest.mark.parametrize("client", ["10.1.2.3", "::ffff:10.1.2.3", "testclient", None])
def test_everything_else_is_for_this_machine(gate, path, client):
    gate.ready.set()
    assert gate.refusal(scope(path, client, coterie_operator="secret"))[0] == 403


def test_the_operator_has_a_token(gate):
    for token in ({}, {"coterie_operator": "guess"}, {"coterie_operator": ""}):
        assert gate.refusal(scope("/v1/control/start-run", "127.0.0.1", **token))[0] == 403
    assert gate.refusal(scope("/v1/control/start-run", "127.0.0.1", coterie_operator="secret")) is None
    assert gate.refusal(scope("/v1/runtime/acquire-task", "::1")) is None


def test_a_bell_wakes_who_has_not_heard_it():
    async def scene():
        bell = Bell()
        await bell.wait(b"a", 5.0)  # the first question is answered at once
        began = time.monotonic()
        await bell.wait(b"a", 0.05)
        waited = time.monotonic() - began
        asyncio.get_running_loop().call_later(0.02, bell.ring)
        began = time.monotonic()
        await bell.wait(b"a", 30.0)
        woken = time.monotonic() - began
        await bell.wait(b"b", 30.0)  # has not heard it yet
        return waited, woken

    waited, woken = asyncio.run(scene())
    assert waited >= 0.04 and woken < 5.0

"""The gate in front of a SuperLink: who may use which of its interfaces, and how long news are waited for."""

from __future__ import annotations

import asyncio
import base64
import datetime
import threading
import time

import pytest

from coterie.deploy import gate as gate_module
from coterie.deploy import keys
from coterie.deploy.gate import MOST_LISTENERS, Bell, Gate

pytest.importorskip("cryptography", reason="keys need the extra 'flower'")
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

CERTIFICATE = "f" * 64


def scope(path, client="10.1.2.3", content_length="10", **headers):
    headers |= {"content_length": content_length} if content_length else {}
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "path": path, "headers": pairs, "client": (client, 5) if client else None}


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    folder = tmp_path_factory.mktemp("node")
    keys.make_node_key(folder, "north")
    return folder / "node.key"


@pytest.fixture
def gate(node):
    public = keys.public_bytes(node.with_name("node.pub"))
    return Gate(None, "secret", "look", threading.Event(), lambda: {public: CERTIFICATE})


def signed(node, path="/v1/fleet/push-messages", at=None, peer=CERTIFICATE, **more):
    """A request of a node, as Flower's client makes it."""
    private, _ = keys.load_node_key(node)
    stamp = (at or datetime.datetime.now(datetime.UTC)).isoformat()
    headers = {
        "flwr_public_key": base64.b64encode(keys.public_bytes(node.with_name("node.pub"))).decode(),
        "flwr_signature": base64.b64encode(private.sign(stamp.encode(), ec.ECDSA(hashes.SHA256()))).decode(),
        "flwr_timestamp": stamp,
    }
    return {**scope(path, **{**headers, **more}), "state": {"peer": peer}}


def test_nodes_are_let_in_when_their_keys_are_registered(gate, node):
    assert gate.refusal(signed(node))[0] == 503
    gate.ready.set()
    assert gate.refusal(signed(node)) is None


def test_a_signed_request_passes_once(gate, node):
    gate.ready.set()
    request = signed(node)
    assert gate.refusal(request) is None
    assert gate.refusal(request)[0] == 401
    assert gate.refusal(signed(node)) is None


def test_a_signature_that_was_changed_into_another_valid_one_is_a_replay(gate, node):
    """(r, s) and (r, n - s) both verify: a request is known by what was signed, not by its signature."""
    gate.ready.set()
    request = signed(node)
    assert gate.refusal(request) is None
    headers = dict(request["headers"])
    r, s = decode_dss_signature(base64.b64decode(headers[b"flwr-signature"]))
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    headers[b"flwr-signature"] = base64.b64encode(encode_dss_signature(r, order - s))
    assert "replayed" in gate.refusal({**request, "headers": list(headers.items())})[1]


@pytest.mark.parametrize(
    "change",
    [
        {"flwr_signature": ""},
        {"flwr_signature": base64.b64encode(b"x" * 70).decode()},
        {"flwr_public_key": base64.b64encode(b"a stranger").decode()},
        {"flwr_public_key": "%%%"},
        {"flwr_timestamp": "yesterday"},
        {"flwr_timestamp": "2020-01-01T00:00:00+00:00"},
        {"flwr_timestamp": "2020-01-01T00:00:00"},
        {"peer": None},
        {"peer": "0" * 64},
        {"at": datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)},
        {"at": datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)},
        {"content_encoding": "gzip"},
        {"transfer_encoding": "chunked"},
    ],
)
def test_strangers_are_refused_before_their_body_is_read(gate, node, change):
    gate.ready.set()
    assert gate.refusal(signed(node, **change))[0] in (401, 415)
    assert not gate.seen  # and nothing is remembered about them


def test_a_revoked_node_is_outside_at_once(gate, node):
    gate.ready.set()
    assert gate.refusal(signed(node)) is None
    gate.nodes = dict
    assert "revoked" in gate.refusal(signed(node))[1]


def test_a_body_is_read_by_nobody_before_its_sender_is_known(gate):
    gate.ready.set()
    sent = []

    async def receive():
        raise AssertionError("the body of a stranger was read")

    async def send(message):
        sent.append(message)

    asyncio.run(gate(scope("/v1/fleet/push-object", content_length=str(60 << 20)), receive, send))
    assert sent[0]["status"] == 401 and (b"connection", b"close") in sent[0]["headers"]


def test_a_body_that_does_not_come_is_not_waited_for():
    async def scene():
        async def never():
            await asyncio.sleep(60)

        return await (await gate_module._whole(never, 0.05))()

    assert asyncio.run(scene()) == {"type": "http.disconnect"}


def test_a_body_comes_in_one_piece():
    """Flower's layers would start tasks for each of its pieces."""

    async def scene():
        pieces = [(b"a", True), (b"b", True), (b"c", False)]

        async def receive():
            if not pieces:
                return {"type": "http.disconnect"}
            body, more = pieces.pop(0)
            return {"type": "http.request", "body": body, "more_body": more}

        whole = await gate_module._whole(receive, 5.0)
        return await whole(), await whole()

    body, after = asyncio.run(scene())
    assert body == {"type": "http.request", "body": b"abc", "more_body": False}
    assert after == {"type": "http.disconnect"}


def test_bodies_of_nodes_and_of_the_job_come_in_one_piece(gate, node):
    gate.ready.set()
    read = []

    async def app(scope, receive, send):
        read.append((await receive())["body"])

    async def scene():
        gate.app = app
        for request in (signed(node, "/v1/fleet/push-object"), scope("/v1/runtime/push-object", "127.0.0.1")):
            pieces = [b"a", b"b"]

            async def receive(pieces=pieces):
                return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

            await gate(request, receive, None)

    asyncio.run(scene())
    assert read == [b"ab", b"ab"]


def test_a_message_is_told_of_when_its_sender_has_sent_all_of_it(gate, node):
    """Who is told of parts asks for the others again and again. Nobody waits longer than a moment."""
    gate.ready.set()
    gate.down.settle = 0.3

    async def app(scope, receive, send):
        pass

    async def scene():
        gate.app = app
        token = {"flwr_task_token": "job"}
        push, look = scope("/v1/runtime/push-object", "127.0.0.1"), "/v1/runtime/pull-messages"
        for _ in range(3):
            await gate(push, nothing, nothing)
        before = gate.down.rings
        await gate(scope(look, "127.0.0.1", **token), nothing, nothing)  # the job has sent all
        after = gate.down.rings
        await gate(push, nothing, nothing)
        await asyncio.sleep(0.1)
        waiting = gate.down.rings
        await asyncio.sleep(0.4)
        settled = gate.down.rings
        await gate(signed(node, "/v1/fleet/push-object"), nothing, nothing)
        half = gate.up.rings
        await gate(signed(node, "/v1/fleet/pull-messages"), nothing, nothing)  # the node has sent all
        return before, after, waiting, settled, half, gate.up.rings

    assert asyncio.run(scene()) == (0, 1, 1, 2, 0, 1)


def test_a_node_that_goes_while_it_waits_is_given_no_message(gate, node):
    """Flower counts a message as delivered when it has answered; one for a node that was killed would be lost."""
    told, here = [], {"type": "http.request", "body": b"x" * 10, "more_body": False}

    async def app(scope, receive, send):
        told.append((await receive())["type"])

    gate.app, gone = app, False

    async def receive():
        return {"type": "http.disconnect"} if gone else here

    async def scene():
        nonlocal gone
        gate.ready.set()
        request = signed(node, "/v1/fleet/pull-messages")
        gate.down.heard[dict(request["headers"])[b"flwr-public-key"]] = gate.down.rings
        asked = asyncio.create_task(gate(request, receive, nothing))
        await asyncio.sleep(0.05)
        assert not told
        gone = True
        gate.down.ring_soon()
        gate.down.done()
        await asyncio.wait_for(asked, 5.0)

    asyncio.run(scene())
    assert told == ["http.disconnect"]


async def nothing(message=None):
    """Bring an empty body, or take a part of an answer."""
    return {"type": "http.request", "body": b""}


class TestTurns:
    """Flower works on few requests of nodes at a time, and nobody keeps a place for longer than that takes."""

    @pytest.fixture
    def others(self, tmp_path):
        for k in range(12):
            (tmp_path / f"{k}").mkdir()
            keys.make_node_key(tmp_path / f"{k}", "other")
        return [tmp_path / f"{k}" / "node.key" for k in range(12)]

    @pytest.fixture
    def busy(self, gate, others):
        """A gate before an app that works on a request until it is let go, and who it works for."""
        public = {keys.public_bytes(key.with_name("node.pub")): CERTIFICATE for key in others}
        gate.ready.set()
        gate.nodes = lambda: public
        gate.working, gate.most, gate.go = 0, 0, asyncio.Event()

        async def app(scope, receive, send):
            gate.working += 1
            gate.most = max(gate.most, gate.working)
            if scope["path"] != gate_module.BEAT and scope["path"].startswith("/v1/fleet"):
                await gate.go.wait()
            gate.working -= 1
            await send({"type": "http.response.body"})

        gate.app = app
        return gate

    def test_a_few_are_worked_on_and_all_are_answered(self, busy, others):
        answered = []

        async def scene():
            send = lambda message: _note(answered, message)  # noqa: E731
            asked = [
                busy(signed(key, "/v1/fleet/pull-object"), nothing, send) for key in others for _ in "ab"
            ]
            tasks = [asyncio.create_task(each) for each in asked]
            await asyncio.sleep(0.1)
            at_work = busy.working
            for path in (gate_module.BEAT, "/v1/runtime/get-nodes"):  # neither waits for a turn
                client = "127.0.0.1"
                request = signed(others[0], path) if path == gate_module.BEAT else scope(path, client)
                await asyncio.wait_for(busy(request, nothing, send), 2.0)
            early = len(answered)
            busy.go.set()
            await asyncio.gather(*tasks)
            return at_work, early

        assert asyncio.run(scene()) == (gate_module.AT_ONCE, 2)
        assert len(answered) == 2 * len(others) + 2

    def test_a_node_with_many_requests_does_not_take_all_turns(self, busy, others):
        async def scene():
            flood = [busy(signed(others[0], "/v1/fleet/pull-object"), nothing, nothing) for _ in range(30)]
            tasks = [asyncio.create_task(each) for each in flood]
            await asyncio.sleep(0.1)
            at_work = busy.working
            busy.go.set()
            await asyncio.wait_for(busy(signed(others[1], "/v1/fleet/pull-object"), nothing, nothing), 2.0)
            await asyncio.gather(*tasks)
            return at_work

        assert asyncio.run(scene()) == gate_module.AT_ONCE_EACH

    def test_who_sends_or_reads_slowly_holds_up_nobody(self, busy, others):
        async def never(message=None):
            await asyncio.sleep(60)

        async def scene():
            busy.go.set()
            slow = [
                busy(signed(key, "/v1/fleet/push-object"), *hands)
                for key in others[:-1]
                for hands in ((never, nothing), (nothing, never))
            ]
            tasks = [asyncio.create_task(each) for each in slow]
            await asyncio.sleep(0.1)
            await asyncio.wait_for(busy(signed(others[-1], "/v1/fleet/pull-object"), nothing, nothing), 2.0)
            for task in tasks:
                task.cancel()

        asyncio.run(scene())


async def _note(answered, message):
    answered.append(message)


def test_old_signatures_are_forgotten(gate, node, monkeypatch):
    gate.ready.set()
    now = time.monotonic()
    for k in range(100):
        monkeypatch.setattr(gate_module.time, "monotonic", lambda k=k: now + 100.0 * k)
        gate.refusal(signed(node))
    assert len(gate.seen) < 10 and sum(gate.requests.values()) == len(gate.seen)


def test_a_node_that_floods_is_bounded(gate, node, monkeypatch):
    gate.ready.set()
    monkeypatch.setattr(gate_module, "MOST_REQUESTS", 5)
    answers = [gate.refusal(signed(node)) for _ in range(9)]
    assert answers[:5] == [None] * 5 and all(answers[5:]) and len(gate.seen) == 5


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


@pytest.mark.parametrize(
    "path",
    ["/v1/fleet/../control/start-run", "/v1/fleet//../../control/start-run", "/v1/fleet/%2e%2e/control/x"],
)
def test_no_way_around_leads_to_the_operator(gate, path):
    """What begins as the Fleet API is for nodes, whatever follows."""
    gate.ready.set()
    assert gate.refusal(scope(path, "127.0.0.1", coterie_operator="guess"))[0] == 401


def test_the_operator_has_a_token(gate):
    for token in ({}, {"coterie_operator": "guess"}, {"coterie_operator": ""}):
        assert gate.refusal(scope("/v1/control/start-run", "127.0.0.1", **token))[0] == 403
    assert gate.refusal(scope("/v1/control/start-run", "127.0.0.1", coterie_operator="secret")) is None
    assert gate.refusal(scope("/v1/runtime/acquire-task", "::1")) is None


def test_an_observer_looks_and_changes_nothing(gate):
    for path in ("list-runs", "list-nodes"):
        assert gate.refusal(scope(f"/v1/control/{path}", "127.0.0.1", coterie_operator="look")) is None
    for path in ("start-run", "stop-run", "register-node", "unregister-node", "list-runs/../start-run"):
        assert gate.refusal(scope(f"/v1/control/{path}", "127.0.0.1", coterie_operator="look"))[0] == 403
    assert (
        Gate(None, "", "").refusal(scope("/v1/control/list-runs", "127.0.0.1", coterie_operator=""))[0] == 403
    )


def test_a_bell_remembers_a_bounded_number():
    async def scene():
        bell = Bell()
        for k in range(MOST_LISTENERS + 500):
            await bell.wait(str(k).encode(), 0.0)
        return len(bell.heard)

    assert asyncio.run(scene()) == MOST_LISTENERS


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

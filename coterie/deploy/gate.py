"""The gate in front of a SuperLink: who is not known stays outside before a byte of a body is read.

Nodes show a certificate of the federation and sign every request with the same key. Everything that is remembered about
requests is bounded, and a connection that is slow to say what it wants is closed.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import datetime
import hmac
import ipaddress
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

OPERATOR_HEADER = "coterie-operator"
SIGNATURE_WINDOW = 305.0  # seconds for which Flower takes a signature
CLOCKS_DIFFER = 5.0  # seconds by which a node's clock may be ahead
MOST_BYTES = 64 << 20  # of one request of a node
MOST_SMALL_BYTES = 1 << 20  # of requests that carry no values
MOST_REQUESTS = 60_000  # of one node within the signature window
BODY_SECONDS, BODY_RATE = 30.0, 1e5  # a body may take so long, and a second more for so many bytes
HOLD_NODE, HOLD_SERVER = 20.0, 0.5  # seconds that a question for news may be kept waiting
GATHER = 0.01  # seconds after a ring, in which more may come
SETTLE_DOWN, SETTLE_UP = 30.0, 0.2  # seconds after a first part of a message, in which the rest may be sent
AT_ONCE, AT_ONCE_EACH = 8, 4  # requests of all nodes, and of each, that Flower works on at the same time
BEAT = "/v1/fleet/send-node-heartbeat"
MOST_LISTENERS = 4096
TASK_TOKEN = b"flwr-task-token"
LARGE = "/v1/fleet/push-object"  # what announces a message has names of its parts only
OBSERVE = ("/v1/control/list-runs", "/v1/control/list-nodes")  # what an observer's token opens

Keys = Callable[[], Mapping[bytes, str | None]]


class Bell:
    """Lets requests wait until something new has arrived.

    Parameters
    ----------
    settle
        Seconds that a sender may take to send all it has. A ring wakes all nodes, so those to whom messages go are told
        together.
    """

    def __init__(self, settle: float = 0.0) -> None:
        self.settle = settle
        self.rings = 0
        self.heard: OrderedDict[bytes, int] = OrderedDict()
        self.waiting: set[asyncio.Future[None]] = set()
        self.due: asyncio.TimerHandle | None = None

    def ring_soon(self) -> None:
        """Say that a part of something has arrived: ring when its sender is done, after a moment at the latest.

        Whoever is told of a message that is still on its way asks for its parts again and again.
        """
        if self.due is None:
            self.due = asyncio.get_running_loop().call_later(self.settle, self.ring)

    def done(self) -> None:
        """Say that a sender has sent all it had."""
        if self.due is not None:
            self.ring()

    def ring(self) -> None:
        """Say that something has arrived; end all waiting."""
        if self.due is not None:
            self.due.cancel()
            self.due = None
        self.rings += 1
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, who: bytes, limit: float) -> None:
        """Return at the first ring that `who` has not heard, after `limit` seconds at the latest."""
        if self.heard.get(who) == self.rings:
            waiter = asyncio.get_running_loop().create_future()
            self.waiting.add(waiter)
            try:
                await asyncio.wait_for(waiter, limit)
                await asyncio.sleep(GATHER)
            except TimeoutError:
                pass
            finally:
                self.waiting.discard(waiter)
        self.heard[who] = self.rings
        self.heard.move_to_end(who)
        while len(self.heard) > MOST_LISTENERS:
            self.heard.popitem(last=False)


class Gate:
    """Middleware in front of all of Flower's interfaces.

    Nodes may use the Fleet API, with each signed request once. All other interfaces are open to this machine only;
    starting runs and registering keys also needs the operator's token; an observer's token is enough to look.

    A request for messages is held for a moment if there are none, so that nobody has to ask often. Nodes take turns:
    two hundred requests at once cost Flower more than one after the other, and the job's would wait behind them.

    Parameters
    ----------
    app
        What is behind the gate.
    token, observer
        Tokens of the operator and of observers; an empty token opens nothing.
    ready
        Set when the nodes' keys are registered; nodes are let in from then on.
    nodes
        Returns the public keys of nodes that may enter, as PEM, each with the SHA-256 of its certificate, or None for a
        node that needs none. It is asked at every request, so a revoked node is outside at once.
    most_bytes
        Largest body of a request.
    """

    def __init__(
        self,
        app: Any,
        token: str = "",
        observer: str = "",
        ready: threading.Event | None = None,
        nodes: Keys = dict,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.app, self.token, self.observer, self.ready = app, token, observer, ready
        self.nodes, self.most_bytes = nodes, most_bytes
        self.seen: OrderedDict[tuple[bytes, str], float] = OrderedDict()
        self.requests: Counter[bytes] = Counter()
        self.down, self.up = Bell(SETTLE_DOWN), Bell(SETTLE_UP)
        self.turns = asyncio.Semaphore(AT_ONCE)
        self.turns_of: dict[tuple[bytes, bool], asyncio.Semaphore] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, refuse it, or hold it until there is something new."""
        if scope["type"] == "websocket":
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused = self.refusal(scope)
        if refused:
            await _respond(send, *refused)
            return
        path, headers = scope["path"], dict(scope["headers"])
        key = headers.get(b"flwr-public-key", b"")
        if path == "/v1/fleet/pull-messages":  # a node asks for messages when it has sent its answer
            self.up.done()
            await self.down.wait(key, HOLD_NODE)
        elif path == "/v1/runtime/pull-messages":  # and the server for answers when it has sent its messages
            self.down.done()
            await self.up.wait(headers.get(TASK_TOKEN, b""), HOLD_SERVER)
        # Read after the wait: a node that was killed meanwhile has gone, and Flower must not give it a message.
        if path.startswith("/v1/fleet/"):
            receive = await _whole(receive, BODY_SECONDS + int(headers[b"content-length"]) / BODY_RATE)
        elif path == "/v1/runtime/push-object":
            receive = await _whole(receive, None)
        if path.startswith("/v1/fleet/"):
            await self._in_turn(key, scope, receive, send)
        else:
            await self.app(scope, receive, send)
        if path == "/v1/runtime/push-object":
            self.down.ring_soon()
        elif path == "/v1/fleet/push-object":
            self.up.ring_soon()

    async def _in_turn(self, key: bytes, scope: Any, receive: Any, send: Any) -> None:
        """Let Flower answer a node when it is its turn, and send the answer afterwards.

        So who reads slowly holds up nobody. Heartbeats wait for nobody else: a node whose come late is taken for dead.
        """
        beat = scope["path"] == BEAT
        own = self.turns_of.setdefault((key, beat), asyncio.Semaphore(AT_ONCE_EACH))
        written: list[Any] = []

        async def write(message: Any) -> None:
            written.append(message)

        async with own, contextlib.nullcontext() if beat else self.turns:
            await self.app(scope, receive, write)
        for message in written:
            await send(message)

    def refusal(self, scope: Any) -> tuple[int, str] | None:
        """Return status and reason if a request is refused, else None."""
        path, headers = scope["path"], dict(scope["headers"])
        if path.startswith("/v1/fleet/"):
            most = self.most_bytes if path == LARGE else MOST_SMALL_BYTES
            length = headers.get(b"content-length", b"")
            if not length.isdigit() or len(length) > 12 or int(length) > most:
                return 413, f"Content-Length is required, and at most {most}"
            if b"content-encoding" in headers or b"transfer-encoding" in headers:
                return 415, "bodies are sent as they are"
            if self.ready is not None and not self.ready.is_set():
                return 503, "node keys are being registered; try again"
            return self._stranger(scope, headers)
        if not _is_this_machine(scope.get("client")):
            return 403, "only available on the server itself"
        if path.startswith("/v1/control/"):
            given = headers.get(OPERATOR_HEADER.encode(), b"")
            tokens = [self.token, *([self.observer] if path in OBSERVE else [])]
            if not any([bool(token) and hmac.compare_digest(given, token.encode()) for token in tokens]):
                return 403, "operator token required"
        return None

    def _stranger(self, scope: Any, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        """Return why a request of the Fleet API does not come from a node, or None if it does."""
        try:
            key = base64.b64decode(headers[b"flwr-public-key"], validate=True)
            signature = base64.b64decode(headers[b"flwr-signature"], validate=True)
            stamp = headers[b"flwr-timestamp"].decode("ascii")
            age = (
                datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(stamp)
            ).total_seconds()
        except (KeyError, ValueError, TypeError, binascii.Error):
            return 401, "signed request of a node required"
        nodes = self.nodes()
        if key not in nodes:
            return 401, "this key is not registered, or was revoked"
        peer = (scope.get("state") or {}).get("peer")
        if nodes[key] is not None and peer != nodes[key]:
            return 401, "the certificate of this node required"
        if not -CLOCKS_DIFFER < age < SIGNATURE_WINDOW:
            return 401, "the request is too old; check the clocks of node and server"
        if not _is_signed(key, stamp, signature):
            return 401, "invalid signature"
        # An elliptic-curve signature can be changed into another valid one, so the request is known by what was signed.
        if not self._first_time(key, stamp):
            return 401, "replayed request: it was sent before"
        return None

    def _first_time(self, key: bytes, stamp: str) -> bool:
        """Return False if a request was seen before; forget those too old to be accepted."""
        now = time.monotonic()
        while self.seen:
            (old, _), at = next(iter(self.seen.items()))
            if now - at < 2 * SIGNATURE_WINDOW:
                break
            self.seen.popitem(last=False)
            self.requests[old] -= 1
        if (key, stamp) in self.seen or self.requests[key] >= MOST_REQUESTS:
            return False
        self.seen[key, stamp] = now
        self.requests[key] += 1
        return True


def _is_signed(key: bytes, stamp: str, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        public = serialization.load_pem_public_key(key)
        if not isinstance(public, ec.EllipticCurvePublicKey):
            return False
        public.verify(signature, stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True


async def _whole(receive: Any, seconds: float | None) -> Any:
    """Read a body within a time limit and return a `receive` that brings it at once; a slower sender has gone away.

    Flower reads bodies through layers that start tasks for every piece, which takes most of the time of a model.
    """
    pieces, more = [], True
    first: Any = {"type": "http.disconnect"}
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    first = message
                    break
                pieces.append(message.get("body", b""))
                more = message.get("more_body", False)
            else:
                first = {"type": "http.request", "body": b"".join(pieces), "more_body": False}
    except TimeoutError:
        pass
    brought = [first]

    async def at_once() -> Any:  # after the body there is nothing but the end of the connection
        return brought.pop() if brought else await receive()

    return at_once


def _is_this_machine(client: Any) -> bool:
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


async def _respond(send: Callable[[dict[str, Any]], Any], status: int, reason: str) -> None:
    body = reason.encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close")]  # what else this connection would send is not read
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

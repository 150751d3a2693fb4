"""A long-running node: it keeps torch, its rows and its clients' state in memory, and speaks Flower's Fleet API itself.

Flower's own SuperNode installs the app that a server sends and starts a process for every message. This one runs
nothing that comes from outside and answers from memory, which is both safer and a hundred times faster.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie._core.errors import CoterieError
from coterie._core.printable import printable
from coterie.deploy import flower_private as private
from coterie.deploy import keys, wire
from coterie.deploy.flower_link import QUIET, missing

BUSY_POLL, IDLE_POLL = 0.05, 1.0  # seconds between looks for messages, after one and when nothing happens
WAS_KEPT_WAITING = 0.5  # seconds; a server of ours answers when there is something, and nobody need hurry
HEARTBEAT, BEATS = 15.0, 7.0  # seconds that we promise Flower, of which two may pass, and after which we beat
ANSWERS_WITHIN = 60.0  # seconds; an answer that a busy server gives after its node has gone is lost
MOST_PARTS = 4096  # of a message: each takes a request
MOST_RESPONSE_BYTES = 256 << 20  # of one request; large tensors come in pieces
RETRY = 2.0  # seconds before a server that cannot be reached is tried again
NODE_ID = "node-id"


class Refused(CoterieError):
    """The server does not let this node in."""


@dataclass
class Link:
    """A node's connection to its SuperLink.

    Attributes
    ----------
    address : str
        host:port of the server.
    key : Path
        The node's private key.
    authority : Path or None
        Certificate of the federation's authority; None connects without TLS.
    log : callable
        Receives messages about the connection.
    """

    address: str
    key: Path
    authority: Path | None  # None: without TLS
    log: Callable[[str], None]

    def serve(self, answer: Callable[[wire.Content], wire.Content]) -> None:
        """Answer messages for ever; reconnect when the server was away."""
        os.environ.update(QUIET)
        waiting = False
        while True:
            try:
                with self._connected() as fleet:
                    self.log(f"connected to {self.address}")
                    waiting = False
                    self._loop(fleet, answer)
            except CoterieError:
                raise
            except Exception as problem:
                reason = _reason(problem)
                if _is_refused(reason):
                    raise Refused(
                        f"the server at {self.address} refused this node's certificate, which has expired or is of "
                        f"another federation ({reason}). Renew it: coterie federate join {self.key.parent} --renew"
                    ) from None
                if isinstance(problem, _tls_errors()) and _is_certificate(problem):
                    raise Refused(
                        f"the certificate of the server at {self.address} has expired, or was not issued by this "
                        f"federation ({reason}). Its operator renews it: coterie federate renew-server DIR"
                    ) from None
                if not waiting:
                    self.log(f"cannot connect to {self.address}, retrying: {reason}")
                waiting = True
                time.sleep(RETRY)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Fleet]:
        key, public = keys.load_node_key(self.key)
        tls = None
        if self.authority is not None:
            keys.require_valid(self.key.with_name(keys.CERTIFICATE), self.authority)
            tls = keys.tls_context(self.authority, self.key)
        try:
            version = private.RuntimeVersionHttpInterceptor(component_name="SuperNode")
            client = private.FleetHttpClient(
                f"{'http' if tls is None else 'https'}://{self.address}",
                interceptors=[version, private.NodeAuthHttpInterceptor(key, public)],
                verify=False if tls is None else tls,
                timeout=ANSWERS_WITHIN,
            )
        except ImportError as problem:
            raise missing(problem) from None
        private.http_of(client).event_hooks = {"response": [require_plain]}
        with client:
            fleet = Fleet(client, _public(public), self.key.parent / NODE_ID)
            fleet.activate()
            stop = threading.Event()
            heart = threading.Thread(target=fleet.beat, args=(stop,), daemon=True)
            heart.start()
            try:
                yield fleet
            finally:
                stop.set()
                with contextlib.suppress(Exception):
                    fleet.deactivate()

    def _loop(self, fleet: Fleet, answer: Callable[[wire.Content], wire.Content]) -> None:
        pause = BUSY_POLL
        while True:
            began = time.monotonic()
            if fleet.answer_one(answer):
                pause = BUSY_POLL
            elif time.monotonic() - began < WAS_KEPT_WAITING:
                time.sleep(pause)
                pause = min(1.2 * pause, IDLE_POLL)


class Fleet:
    """The Fleet API as one node uses it."""

    def __init__(self, client: Any, public: bytes, remembered: Path) -> None:
        self.client, self.public, self.remembered = client, public, remembered
        self.node: Any = None

    def activate(self) -> None:
        """Sign in. A node that was killed is still signed in, so it signs itself out first."""
        import httpx

        request = private.ActivateNodeRequest(public_key=self.public, heartbeat_interval=HEARTBEAT)
        try:
            try:
                response = self.client.ActivateNode(request)
            except httpx.HTTPStatusError:
                if not self.remembered.exists():
                    raise
                before = int(self.remembered.read_text(encoding="ascii"))
                with contextlib.suppress(httpx.HTTPStatusError):
                    self.client.DeactivateNode(private.DeactivateNodeRequest(node_id=before))
                response = self.client.ActivateNode(request)
        except httpx.HTTPStatusError as problem:
            if problem.response.status_code in (502, 503, 504):
                raise
            raise Refused(
                f"the server rejected this node's key ({_reason(problem)}). Is it registered? The server's operator "
                "does that with `coterie federate server`, which reads nodes/*/node.pub. If it is, a node that was "
                "killed may still be signed in; try again in half a minute."
            ) from None
        self.node = private.Node(node_id=response.node_id)
        self.remembered.write_bytes(str(response.node_id).encode())

    def deactivate(self) -> None:
        """Sign out."""
        self.client.DeactivateNode(private.DeactivateNodeRequest(node_id=self.node.node_id))

    def beat(self, stop: threading.Event) -> None:
        """Tell the server regularly that this node is alive, until `stop` is set."""
        while not stop.wait(BEATS):
            with contextlib.suppress(Exception):
                self.client.SendNodeHeartbeat(
                    private.SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT)
                )

    def answer_one(self, answer: Callable[[wire.Content], wire.Content]) -> bool:
        """Answer one message, and return whether there was one."""
        response = self.client.PullMessages(private.PullMessagesRequest(node=self.node))
        if not response.messages_list:
            return False
        message = self._received(response.messages_list[0], response.message_object_trees[0])
        if message is not None:
            self._send(message, answer(content(message)))
        return True

    def _received(self, announced: Any, tree: Any) -> Any:
        """Return the whole message, or None if it was withdrawn meanwhile."""
        about = private.message_from_proto(announced).metadata
        try:
            return received(self.client, self.node, about, tree, about.ttl)
        except private.ObjectPullError:
            return None

    def _send(self, message: Any, answer: wire.Content) -> None:

        reply = reply_to(message, answer)
        with private.no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            response = self.client.PushMessages(
                private.PushMessagesRequest(
                    node=self.node,
                    messages_list=[private.message_to_proto(private.remove_content_from_message(reply))],
                    message_object_trees=[private.get_object_tree(reply)],
                    clientapp_runtime_list=[0.0],
                )
            )
            wanted = set(response.objects_to_push)
            push = private.make_push_object_fn_protobuf(
                self.client.PushObject, self.node, message.metadata.run_id, response.session_id
            )
            for name, part in private.get_all_nested_objects(reply).items():
                if name in wanted:
                    push(name, part.deflate())


def require_plain(response: Any) -> None:
    """Raise unless a response of the server is what it says, before its body is read.

    A server that was taken over would send a node to other machines of its network, or fill its memory.
    """
    import httpx

    length = response.headers.get("content-length", "")
    if response.has_redirect_location:
        problem = "leads elsewhere"
    elif "content-encoding" in response.headers:
        problem = "is compressed"
    elif not length.isdecimal() or len(length) > 12 or int(length) > MOST_RESPONSE_BYTES:
        problem = f"does not say that it has at most {MOST_RESPONSE_BYTES} bytes"
    else:
        return
    raise httpx.RemoteProtocolError(f"an answer of the server is refused: it {problem}")


def let_go(client: Any, node: Any, about: Any) -> None:
    """Tell the server that it need not keep a message any longer."""
    private.make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, about.run_id)(
        about.message_id
    )


def received(client: Any, node: Any, about: Any, tree: Any, wait: float) -> Any:
    """Return the whole message that was announced, or raise `ObjectPullError`.

    A message of very many parts is refused: small ones would take its receiver hours.

    Parameters
    ----------
    client, node
        Flower's client of the Fleet or Runtime API, and for whom it asks.
    about, tree
        Metadata of the message, and the names of its parts.
    wait
        Seconds to wait at most for parts on their way.
    """
    pull = private.make_pull_object_fn_protobuf(client.PullObject, node, about.run_id)
    ids = list(dict.fromkeys(part.object_id for part in private.iterate_object_tree(tree)))
    if len(ids) > MOST_PARTS:
        let_go(client, node, about)
        raise private.ObjectPullError(about.message_id, f"a message of {len(ids)} parts is refused")
    parts = pulled(ids, pull, wait)
    let_go(client, node, about)
    try:
        message = private.inflate_object_from_contents(about.message_id, parts)
        message.metadata.__dict__["_message_id"] = about.message_id
    except Exception as problem:  # the sender wrote them
        raise private.ObjectPullError(
            about.message_id, f"its parts are not those of a message ({type(problem).__name__})"
        ) from None
    return message


def pulled(object_ids: list[str], pull_object_fn: Callable[[str], bytes], wait: float) -> dict[str, bytes]:
    """Return the parts of a message, waiting at most `wait` seconds for those on their way.

    Flower by itself looks again after a second, and for three minutes where a sender has stopped in the middle.
    """
    found: dict[str, bytes] = private.pull_objects(
        object_ids,
        pull_object_fn,
        max_time=wait,
        max_tries_per_object=None,
        initial_backoff=0.02,
        backoff_cap=0.25,
    )
    return found


PARCEL, BYTES, KIND = "coterie", "message", "query"
LARGE, RAW = "large", "coterie"  # record of the large parts, and how they are written


def records(message: wire.Content, arrays: dict[int, Any] | None = None) -> Any:
    """Return the Flower records that carry a message.

    Flower hashes a configuration record whenever it is looked at, and an array once. It stores an array once, too,
    however many messages have it.

    Parameters
    ----------
    message
        The message.
    arrays
        Arrays of parts of other messages, by the parts' `id`; those of this message are added.
    """
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    arrays = {} if arrays is None else arrays
    first, *large = (message,) if isinstance(message, bytes) else message
    found = RecordDict({PARCEL: ConfigRecord({BYTES: first})})
    for part in large:
        if id(part) not in arrays:
            arrays[id(part)] = Array("uint8", (len(part),), RAW, part)
    if large:
        found[LARGE] = ArrayRecord({str(k): arrays[id(part)] for k, part in enumerate(large)})
    return found


def content(message: Any) -> wire.Content:
    """Return the bytes that a Flower message carries for us; b"" for anything else, which is rejected later."""
    try:
        found = message.content
        arrays = found[LARGE] if LARGE in found else {}
        parts = (found[PARCEL][BYTES], *(arrays[str(k)].data for k in range(len(arrays))))
    except (KeyError, TypeError, ValueError, AttributeError):
        return b""
    if not all(isinstance(part, bytes) for part in parts):
        return b""
    return parts if len(parts) > 1 else bytes(parts[0])


def reply_to(message: Any, answer: wire.Content) -> Any:
    """Return a Flower message that answers another."""
    from flwr.app import Message

    return Message(records(answer), reply_to=message)


def _public(key: Any) -> bytes:

    public: bytes = private.public_key_to_bytes(key)
    return public


def _tls_errors() -> tuple[type[Exception], ...]:
    import ssl

    import httpx

    return (httpx.ConnectError, ssl.SSLError)


def _is_refused(reason: str) -> bool:
    """Return True if the other side ended TLS because of our certificate."""
    text = reason.lower()
    return "alert" in text and ("certificate" in text or "unknown ca" in text)


def _is_certificate(problem: Exception) -> bool:
    return "certificate" in str(problem).lower()


def _reason(problem: Exception) -> str:
    """Return in one line what went wrong."""
    response = getattr(problem, "response", None)
    text = getattr(response, "text", "") if response is not None else ""
    return printable(" ".join(f"{text or problem}"[:1000].split())) or type(problem).__name__

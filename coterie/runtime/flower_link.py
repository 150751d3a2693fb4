"""The SuperLink of a federation: Flower's own, with a gate in front that lets strangers see the Fleet API only."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import hmac
import importlib
import ipaddress
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError
from coterie.runtime import keys

OPERATOR_HEADER = "coterie-operator"
SIGNATURE_WINDOW = 400.0  # seconds; Flower takes a signature for 305
MOST_BYTES = 1 << 30  # of one request of a node
HOLD_NODE, HOLD_SERVER = 10.0, 0.5  # seconds that a question for news may be kept waiting
GATHER = 0.01  # seconds after a ring, in which more may come
TASK_TOKEN = b"flwr-task-token"
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


class Bell:
    """Rings when something was put down; who has heard all rings so far may wait for the next."""

    def __init__(self) -> None:
        self.rings = 0
        self.heard: dict[bytes, int] = {}
        self.waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        self.rings += 1
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, who: bytes, limit: float) -> None:
        """Return at the first ring that `who` has not heard, at the latest after `limit` seconds."""
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


class Gate:
    """In front of all of Flower's interfaces.

    Nodes may use the Fleet API, each signed request once. Everything else is for this machine; starting runs and
    registering keys also needs the operator's token, which is in a file that only the operator can read.

    Who asks for messages when there is nothing new is kept waiting for a moment, so that nobody needs to ask often.
    """

    def __init__(self, app: Any, token: str = "", ready: threading.Event | None = None) -> None:
        self.app, self.token, self.ready = app, token, ready
        self.seen: dict[str, float] = {}
        self.down, self.up = Bell(), Bell()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused = self.refusal(scope)
        if refused:
            await _respond(send, *refused)
            return
        path, headers = scope["path"], dict(scope["headers"])
        if path == "/v1/fleet/pull-messages":
            await self.down.wait(headers.get(b"flwr-public-key", b""), HOLD_NODE)
        elif path == "/v1/runtime/pull-messages":
            await self.up.wait(headers.get(TASK_TOKEN, b""), HOLD_SERVER)
        await self.app(scope, receive, send)
        if path == "/v1/runtime/push-object":
            self.down.ring()
        elif path == "/v1/fleet/push-object":
            self.up.ring()

    def refusal(self, scope: Any) -> tuple[int, str] | None:
        """Status and reason, None for what may pass."""
        path, headers = scope["path"], dict(scope["headers"])
        if path.startswith("/v1/fleet/"):
            length = headers.get(b"content-length", b"")
            if not length.isdigit() or int(length) > MOST_BYTES:
                return 413, f"a request has a length, and at most {MOST_BYTES} bytes"
            if self.ready is not None and not self.ready.is_set():
                return 503, "the keys of the nodes are being registered"
            signature = headers.get(b"flwr-signature")
            if signature is not None and not self._first_time(signature.decode("latin-1")):
                return 401, "this request was seen before"
            return None
        if not _is_this_machine(scope.get("client")):
            return 403, "this interface is for the server's own machine"
        if path.startswith("/v1/control/"):
            given = headers.get(OPERATOR_HEADER.encode(), b"").decode("latin-1")
            if not hmac.compare_digest(given, self.token):
                return 403, "this needs the token of the federation's operator"
        return None

    def _first_time(self, signature: str) -> bool:
        now = time.monotonic()
        if signature in self.seen:
            return False
        self.seen[signature] = now
        while self.seen:
            oldest = next(iter(self.seen))
            if now - self.seen[oldest] < SIGNATURE_WINDOW:
                break
            del self.seen[oldest]
        return True


def serve(
    folder: Path, host: str, port: int, token: str, ready: threading.Event, insecure: bool = False
) -> None:
    """Run the SuperLink of the server folder until it is stopped; `insecure` leaves TLS out, not the keys.

    Nodes are let in from when `ready` is set, which is when their keys are registered. Flower's own state is in
    memory: ours is in the job's folder, and a database would take most of a round's time.
    """
    os.environ.update(QUIET)
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.3")
    os.environ["FLWR_HOME"] = str(keys.private_folder(folder / "flower"))
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    tls = ["--ssl-certfile", folder / "server.crt", "--ssl-keyfile", folder / "server.key"]
    tls += ["--ssl-ca-certfile", folder / "ca.crt", "--enable-supernode-auth"]
    sys.argv = ["flower-superlink", "--host", host, "--port", str(port)]
    sys.argv += ["--insecure"] if insecure else [str(part) for part in tls]
    sys.argv += ["--disable-runtime-dependency-installation"]
    try:
        import uvicorn
        from flwr.superlink.main import create_app

        superlink: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    except ImportError as problem:
        raise missing(problem) from None
    superlink.get_popen_detach_kwargs = lambda: {"start_new_session": True, "preexec_fn": die_with_parent}
    config = dataclasses.replace(superlink._parse_superlink_lifespan_config(), enable_supernode_auth=True)
    app = create_app(config, superlink.SuperLinkLifespan)
    app.add_middleware(Gate, token=token, ready=ready)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=2,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
    )


def die_with_parent() -> None:
    """In a new process: let the kernel end it with its parent. By itself Flower's would try to reach it for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def leave_with_parent() -> None:
    """End this process at once when the one that started it is gone; whatever matters is on the disk."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def missing(problem: ImportError) -> CoterieError:
    """What to do when Flower is not installed."""
    return CoterieError(f"a federation needs Flower ({problem}). Install it: pip install coterie[flower]")


def _is_this_machine(client: Any) -> bool:
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


async def _respond(send: Callable[[dict[str, Any]], Any], status: int, reason: str) -> None:
    body = reason.encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

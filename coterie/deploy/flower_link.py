"""The SuperLink of a federation: Flower's own, behind a gate that shows nodes the Fleet API only."""

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

from coterie._core.errors import CoterieError
from coterie.deploy import keys

OPERATOR_HEADER = "coterie-operator"
SIGNATURE_WINDOW = 400.0  # seconds; Flower takes a signature for 305
MOST_BYTES = 1 << 30  # of one request of a node
HOLD_NODE, HOLD_SERVER = 10.0, 0.5  # seconds that a question for news may be kept waiting
GATHER = 0.01  # seconds after a ring, in which more may come
TASK_TOKEN = b"flwr-task-token"
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


class Bell:
    """Lets requests wait until something new has arrived."""

    def __init__(self) -> None:
        self.rings = 0
        self.heard: dict[bytes, int] = {}
        self.waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """Say that something has arrived; end all waiting."""
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


class Gate:
    """Middleware in front of all of Flower's interfaces.

    Nodes may use the Fleet API, with each signed request once. All other interfaces are open to this machine only;
    starting runs and registering keys also needs the operator's token, from a file that only the operator can read.

    A request for messages is held for a moment if there are none, so that nobody has to ask often.
    """

    def __init__(self, app: Any, token: str = "", ready: threading.Event | None = None) -> None:
        self.app, self.token, self.ready = app, token, ready
        self.seen: dict[str, float] = {}
        self.down, self.up = Bell(), Bell()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, refuse it, or hold it until there is something new."""
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
        """Return status and reason if a request is refused, else None."""
        path, headers = scope["path"], dict(scope["headers"])
        if path.startswith("/v1/fleet/"):
            length = headers.get(b"content-length", b"")
            if not length.isdigit() or int(length) > MOST_BYTES:
                return 413, f"Content-Length is required, and at most {MOST_BYTES}"
            if self.ready is not None and not self.ready.is_set():
                return 503, "node keys are being registered; try again"
            signature = headers.get(b"flwr-signature")
            if signature is not None and not self._first_time(signature.decode("latin-1")):
                return 401, "replayed request: its signature was used before"
            return None
        if not _is_this_machine(scope.get("client")):
            return 403, "only available on the server itself"
        if path.startswith("/v1/control/"):
            given = headers.get(OPERATOR_HEADER.encode(), b"").decode("latin-1")
            if not hmac.compare_digest(given, self.token):
                return 403, "operator token required"
        return None

    def _first_time(self, signature: str) -> bool:
        """Return False if a signature was seen before; forget those too old to be accepted."""
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
    """Run the SuperLink until it is stopped.

    Flower's own state is kept in memory: ours is in the job's folder, and a database would take most of a round's time.

    Parameters
    ----------
    folder
        The server folder of the federation, with certificate and key.
    host, port
        Where to listen.
    token
        The operator's token.
    ready
        Set when the nodes' keys are registered; nodes are let in from then on.
    insecure
        Leave TLS out; nodes still sign their requests.
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
    """Let the kernel end this new process with its parent; Flower's would try to reach the parent for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def leave_with_parent() -> None:
    """End this process as soon as its parent is gone; all that matters is on disk."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def missing(problem: ImportError) -> CoterieError:
    """Return the error that says how to install Flower."""
    return CoterieError(f"a federation needs Flower ({problem}). Install it: pip install 'coterie[flower]'")


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

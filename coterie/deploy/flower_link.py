"""The SuperLink of a federation: Flower's own, behind a gate that shows nodes the Fleet API only."""

from __future__ import annotations

import dataclasses
import logging
import os
import ssl
import sys
import threading
from pathlib import Path
from typing import Any

from coterie._core import extras, systems
from coterie._core.errors import CoterieError
from coterie.deploy import flower_private as private
from coterie.deploy import keys
from coterie.deploy.gate import MOST_BYTES, Gate, Keys

KEEP_ALIVE = 30  # seconds that a connection may be idle; opening one costs more than a request
CONTROL = "/v1/control/"
APART = (
    "Control",
    "FleetEventLog",
    "RuntimeTracing",
)  # layers of operators' requests, and of logs that are off
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", **private.CHUNKS}


def serve(
    folder: Path,
    host: str,
    port: int,
    tokens: tuple[str, str],
    ready: threading.Event,
    nodes: Keys,
    insecure: bool = False,
    most_bytes: int = MOST_BYTES,
) -> None:
    """Run the SuperLink until it is stopped.

    Flower's own state is kept in memory: ours is in the job's folder, and a database would take most of a round's time.

    Parameters
    ----------
    folder
        The server folder of the federation, with certificate and key.
    host, port
        Where to listen.
    tokens
        Tokens of the operator and of observers.
    ready
        Set when the nodes' keys are registered; nodes are let in from then on.
    nodes
        Returns the keys of nodes that may enter, with the SHA-256 of their certificates.
    insecure
        Leave TLS out; nodes still sign their requests.
    most_bytes
        Largest request of a node.
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

        from coterie.deploy.patience import HEADER_BYTES, MOST_CONNECTIONS, PatientProtocol, PatientServer

        superlink, create_app = private.superlink, private.create_app
    except ImportError as problem:
        raise missing(problem) from None
    superlink.get_popen_detach_kwargs = systems.apart  # Flower's would try to reach a dead parent for ever
    config = dataclasses.replace(superlink._parse_superlink_lifespan_config(), enable_supernode_auth=True)
    app = create_app(config, superlink.SuperLinkLifespan)
    app.add_middleware(Shortcut, short=without(app, APART))
    app.add_middleware(
        Gate, token=tokens[0], observer=tokens[1], ready=ready, nodes=nodes, most_bytes=most_bytes
    )
    logging.getLogger("flwr").setLevel(logging.WARNING)
    server = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="asyncio",
        http=PatientProtocol,
        ws="none",
        log_level="error",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=HEADER_BYTES,
        limit_concurrency=MOST_CONNECTIONS,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_cert_reqs=ssl.CERT_NONE if insecure else ssl.CERT_OPTIONAL,
        ssl_ca_certs=None if insecure else str(folder / "ca.crt"),
    )
    PatientServer(server).run()


def without(app: Any, layers: tuple[str, ...]) -> Any:
    """Return what handles the requests of a web application, without layers whose names begin so."""
    every = app.user_middleware
    app.user_middleware = [layer for layer in every if not layer.cls.__name__.startswith(layers)]
    short = app.build_middleware_stack()
    app.user_middleware = every
    return short


class Shortcut:
    """Middleware that leads all but operators' requests past layers that do nothing for them, in half the time."""

    def __init__(self, app: Any, short: Any) -> None:
        self.app, self.short = app, short

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on."""
        long = scope["type"] != "http" or scope["path"].startswith(CONTROL)
        await (self.app if long else self.short)(scope, receive, send)


def leave_with_parent() -> None:
    """End this process as soon as its parent is gone; all that matters is on disk."""

    def watch() -> None:
        systems.wait_for_orphanhood()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def missing(problem: ImportError) -> CoterieError:
    """Return the error that says how to install the version of Flower that fits."""
    return extras.missing("flower", "a federation", f"Flower ({problem})")

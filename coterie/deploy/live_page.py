"""The page of a running federation, and its health, for whoever has the observer's token; on this machine only.

The page is one document without a request to anywhere else. It asks for `/live.json` every second and writes what it
gets as text, never as HTML: names and problems come from nodes.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import coterie
from coterie._core import files, systems
from coterie._core.errors import CoterieError, RunError, SettingError
from coterie._core.printable import printable
from coterie.deploy import live
from coterie.deploy.job import NOTES, PROGRESS, REQUEST

if TYPE_CHECKING:
    from coterie.deploy.federation_folder import FederationFolder
    from coterie.deploy.logs import Log

PAGE = Path(__file__).parent / "templates" / "live.html"
ADDRESS = "page.json"  # in the server's folder: where the page is
COOKIE = "coterie-observer"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
MOST_RUNS, MOST_NOTES, NOTE_BYTES = 12, 40, 16 << 10
STATUS_EVERY = 2.0  # seconds between questions to the SuperLink who is connected
MOST_CONNECTIONS = 50
ANSWERS_WITHIN = 15.0  # seconds for a server to say how it is

Statuses = Callable[[], dict[str, str]]


class Picture:
    """What there is to see of a federation.

    Parameters
    ----------
    folder
        The federation folder.
    nodes
        Returns the names of the nodes.
    statuses
        Returns the state of each connection, such as "online".
    """

    def __init__(self, folder: Path, nodes: Callable[[], Sequence[str]], statuses: Statuses) -> None:
        self.folder, self.nodes, self.statuses = folder, nodes, statuses
        self._asked, self._lock = -STATUS_EVERY, threading.Lock()
        self._known: dict[str, str] = {}

    def connections(self) -> dict[str, str]:
        """Return the state of every node's connection, as it was at most two seconds ago."""
        with self._lock:
            if time.monotonic() - self._asked > STATUS_EVERY:
                try:
                    told = self.statuses()
                except CoterieError:
                    told = {}
                self._known = {name: printable(told.get(name, "unknown"), 40) for name in self.nodes()}
                self._asked = time.monotonic()
            return self._known

    def health(self) -> dict[str, Any]:
        """Return whether the server answers, who is connected, and the state of the newest run."""
        connected = self.connections()
        online = sorted(name for name, state in connected.items() if state == "online")
        runs = self.runs(1)
        status = "ok" if connected and len(online) == len(connected) else "degraded"
        newest = {name: runs[0][name] for name in ("name", "state", "round", "rounds")} if runs else None
        away = sorted(set(connected) - set(online))
        return {
            "status": status,
            "version": coterie.__version__,
            "online": online,
            "away": away,
            "run": newest,
        }

    def runs(self, most: int = MOST_RUNS) -> list[dict[str, Any]]:
        """Return name, state and progress of the newest runs, newest first."""
        known = []
        for request in (self.folder / "jobs").glob(f"*/{REQUEST}"):
            try:
                known.append((request.stat().st_mtime, request.parent))
            except OSError:
                continue
        return [self._run(job) for _, job in sorted(known, reverse=True)[:most]]

    def _run(self, job: Path) -> dict[str, Any]:
        told = _read(job / PROGRESS)
        state = printable(told.get("state", "waiting"), 20)
        if state in ("gathering", "running") and not systems.is_alive(int(told.get("pid", 0))):
            state = "interrupted"
        asked = _read(job / REQUEST)
        return {
            "name": printable(job.name, 80),
            "algorithm": printable(asked.get("algorithm", {}).get("name", ""), 60),
            "secure": bool(asked.get("secure")),
            "state": state,
            "round": told.get("round", 0),
            "rounds": told.get("rounds", asked.get("plan", {}).get("rounds", 0)),
            "error": printable(told.get("error") or "", 500),
        }

    def whole(self, name: str | None = None) -> dict[str, Any]:
        """Return everything that the page shows, of the named or the newest run."""
        runs, connected = self.runs(), self.connections()
        chosen = next((run for run in runs if run["name"] == name), runs[0] if runs else None)
        job = None if chosen is None else self.folder / "jobs" / chosen["name"]
        seen = {} if job is None else _read(job / live.FILE)
        acted = seen.get("nodes", {})
        nodes = []
        for node in dict.fromkeys([*connected, *acted]):
            act = acted.get(node, {})
            nodes.append({**act, "name": printable(node, 80), "status": connected.get(node, "revoked")})
            nodes[-1]["problem"] = printable(act.get("problem", ""), 300)
        return {
            "federation": printable(self.folder.name, 80),
            "version": coterie.__version__,
            "runs": runs,
            "run": chosen,
            "seconds": seen.get("seconds"),
            "losses": seen.get("losses", []),
            "split": seen.get("split"),
            "privacy": seen.get("privacy"),
            "nodes": nodes,
            "notes": [] if job is None else _tail(job / NOTES),
        }


class LivePage:
    """The web application: `/`, `/live.json` and `/health`, for GET only, each with the observer's token.

    Parameters
    ----------
    picture
        What there is to see.
    tokens
        The tokens that let one look.
    """

    def __init__(self, picture: Picture, tokens: Sequence[str]) -> None:
        self.picture, self.tokens = picture, [token.encode() for token in tokens if token]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            status, kind, body, more = await asyncio.to_thread(self.answer, scope, headers)
            await _respond(send, status, kind, b"" if scope["method"] == "HEAD" else body, more)

    def answer(
        self, scope: Any, headers: dict[bytes, bytes]
    ) -> tuple[int, str, bytes, list[tuple[str, str]]]:
        """Return status, type, body and further headers."""
        path, query = scope["path"], parse_qs(scope["query_string"].decode("latin-1"))
        host = headers.get(b"host", b"").decode("latin-1").rpartition(":")[0]
        if host not in LOOPBACK:  # a web site whose name leads here must not read the page
            return 421, "text/plain", b"only available as 127.0.0.1", []
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "text/plain", b"this page only shows things", [("allow", "GET, HEAD")]
        given = query.get("token", [""])[0]
        if path == "/" and given and self._opens(given):  # keep the token out of the address from now on
            cookie = f"{COOKIE}={given}; HttpOnly; SameSite=Strict; Path=/"
            return 303, "text/plain", b"", [("location", "/"), ("set-cookie", cookie)]
        if not self._opens(_bearer(headers)) and not self._opens(_cookie(headers)):
            text = b"The observer's token is required. On the server's machine: coterie federate page DIR\n"
            return 401, "text/plain", text, [("www-authenticate", "Bearer")]
        if path == "/":
            nonce = secrets.token_urlsafe(16)
            page = PAGE.read_text(encoding="utf-8").replace("NONCE", nonce)
            return 200, "text/html", page.encode(), [("content-security-policy", _rules(nonce))]
        if path == "/live.json":
            return 200, "application/json", _json(self.picture.whole(query.get("run", [None])[0])), []
        if path == "/health":
            return 200, "application/json", _json(self.picture.health()), []
        return 404, "text/plain", b"there are /, /live.json and /health", []

    def _opens(self, given: str) -> bool:
        content = given.encode("utf-8", "replace")
        return not self.tokens or any([hmac.compare_digest(content, token) for token in self.tokens])


def serve(picture: Picture, tokens: Sequence[str], port: int) -> int:
    """Serve the page on 127.0.0.1 from a thread of its own; return the port.

    Parameters
    ----------
    picture
        What there is to see.
    tokens
        The tokens that let one look; none where the server has none.
    port
        Where to listen; 0 takes a free one. `OSError` is raised if it is taken.
    """
    import uvicorn

    from coterie.deploy.patience import HEADER_BYTES, PatientProtocol, PatientServer

    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(
        LivePage(picture, tokens),
        loop="asyncio",
        http=PatientProtocol,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        h11_max_incomplete_event_size=HEADER_BYTES,
        limit_concurrency=MOST_CONNECTIONS,
        server_header=False,
    )
    server = PatientServer(config)
    threading.Thread(target=server.run, args=([listener],), daemon=True).start()
    return int(listener.getsockname()[1])


def show(folder: FederationFolder, insecure: bool, log: Log, page: int | None) -> None:
    """Serve the page of the federation, unless it is not wanted."""
    if page == 0:
        return
    port, tokens = folder.port + 1 if page is None else page, (folder.observer, folder.token)
    picture = Picture(
        folder.path.resolve(),
        lambda: list(folder.nodes),
        lambda: dict(folder.operator(insecure, observe=bool(folder.observer)).nodes()),
    )
    try:
        serve(picture, tokens, port)
    except (OSError, OverflowError) as problem:
        reason = f"cannot listen on 127.0.0.1:{port}: {getattr(problem, 'strerror', None) or problem}"
        if page is not None:
            raise SettingError(f"--page {page}: {reason}") from None
        log(f"warning: there is no page, {reason}. Choose another port with --page PORT")
        return
    files.write_json(folder.path / "server" / ADDRESS, {"address": f"127.0.0.1:{port}"})
    log(f"page: http://127.0.0.1:{port}/, opened with: coterie federate page {folder.path}")


def page_address(folder: FederationFolder) -> str:
    """Return the address of the page of a running server, with the token that opens it."""
    path = folder.path / "server" / ADDRESS
    if not path.exists():
        raise RunError(f"{folder.path} has no page. Start the server: coterie federate server {folder.path}")
    if not folder.observer:
        raise RunError(f"{folder.path} has no observer's token; the page is for whoever has it")
    return f"http://{files.read_json(path)['address']}/?token={folder.observer}"


def health(folder: FederationFolder) -> dict[str, Any]:
    """Return what a running server says at /health; raise `RunError` if it does not answer."""
    address, _, token = page_address(folder).partition("?token=")
    asked = urllib.request.Request(f"{address}health", headers={"authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(asked, timeout=ANSWERS_WITHIN) as answer:
            found = json.loads(answer.read(1 << 20))
    except (OSError, ValueError) as problem:
        start = f"Start it: coterie federate server {folder.path}"
        raise RunError(f"the server at {address} does not answer ({problem}). {start}") from None
    return dict(found)


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON object that another process writes; {} if there is none."""
    try:
        found = files.read_json(path)
    except (CoterieError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def _tail(path: Path) -> list[str]:
    """Return the last notes, newest last."""
    try:
        with open(path, "rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - NOTE_BYTES))
            text = stream.read(NOTE_BYTES)
    except OSError:
        return []
    return [printable(line, 400) for line in text.decode("utf-8", "replace").splitlines()[-MOST_NOTES:]]


def _json(value: Any) -> bytes:
    return files.as_json(value).encode()


def _bearer(headers: dict[bytes, bytes]) -> str:
    kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def _cookie(headers: dict[bytes, bytes]) -> str:
    try:
        found = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def _rules(nonce: str) -> str:
    """Return what the page may do: its own script and style, and requests to its own server."""
    own = f"'nonce-{nonce}'"
    allowed = f"default-src 'none'; script-src {own}; style-src {own}; connect-src 'self'; img-src data:"
    return f"{allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


async def _respond(send: Any, status: int, kind: str, body: bytes, more: list[tuple[str, str]]) -> None:
    headers = [
        ("content-type", f"{kind}; charset=utf-8"),
        ("content-length", str(len(body))),
        ("cache-control", "no-store"),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        *more,
    ]
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": HTTPStatus(status).value, "headers": encoded})
    await send({"type": "http.response.body", "body": body})

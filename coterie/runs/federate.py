"""The folder of a federation, and the processes that are started from it: server, nodes, runs."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import secrets
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.data.federated import Roles
from coterie.errors import RunError, SettingError, nearest
from coterie.runs import files
from coterie.runs.federate_job import NOTES, PROGRESS, Request
from coterie.runtime import keys

CONFIG = "federation.toml"
NODE_CONFIG = "node.toml"
TOKEN = "operator.token"
PORT = 8765
STARTS_WITHIN = 90.0  # seconds for the SuperLink to start a run

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


@dataclass(frozen=True)
class FederationFolder:
    """What `coterie federate init` made, on the server's machine."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> FederationFolder:
        if not (path / CONFIG).exists():
            raise RunError(
                f"{path} is not the folder of a federation. Make one: coterie federate init {path}"
            )
        return cls(path)

    @property
    def config(self) -> dict[str, Any]:
        return files.read_toml(self.path / CONFIG)

    @property
    def port(self) -> int:
        return int(self.config["server"]["port"])

    @property
    def nodes(self) -> dict[str, list[str]]:
        """The clients that each node is expected to have."""
        return {name: list(clients) for name, clients in self.config["nodes"].items()}

    @property
    def public_keys(self) -> dict[str, Path]:
        return {name: self.path / "nodes" / name / "node.pub" for name in self.nodes}

    @property
    def roles(self) -> Roles:
        data = self.config["data"]
        return Roles.from_json(
            {name: data.get(name) for name in ("client", "target", "cluster", "task", "drop")}
        )

    @property
    def token(self) -> str:
        path = self.path / "server" / TOKEN
        keys.require_private(path)
        return path.read_text().strip()

    def job(self, name: str | None) -> Path:
        """The job of a run; without a name, the newest."""
        jobs = sorted((self.path / "jobs").glob("*/request.json"), key=lambda file: file.stat().st_mtime)
        known = [file.parent.name for file in jobs]
        if name is None:
            if not known:
                raise RunError(f"{self.path} has had no run yet. Start one: coterie federate run {self.path}")
            return self.path / "jobs" / known[-1]
        if name not in known:
            raise RunError(f"{self.path} has no run {name!r}.{nearest(name, known)}")
        return self.path / "jobs" / name

    def operator(self, insecure: bool = False) -> Any:
        """The way to this folder's SuperLink, on this machine."""
        flower = load_flower()
        authority = None if insecure else self.path / "server" / "ca.crt"
        return flower.Operator(f"127.0.0.1:{self.port}", self.token, authority)


def load_flower() -> Any:
    """The one module that needs Flower."""
    import importlib

    from coterie.runtime.flower_link import QUIET, missing

    os.environ.update(QUIET)
    try:
        return importlib.import_module("coterie.runtime.flower")
    except ImportError as problem:
        raise missing(problem) from None


def init(
    path: Path,
    nodes: Mapping[str, Sequence[str]],
    roles: Roles,
    hosts: Sequence[str] = (),
    port: int = PORT,
    days: float = keys.VALID_DAYS,
) -> FederationFolder:
    """A ready federation: authority, certificates, keys, scripts. An existing one gets the nodes it lacks."""
    if not nodes:
        raise SettingError("a federation needs nodes: --node NAME, once for each")
    for name in nodes:
        if not NAME.fullmatch(name):
            raise SettingError(f"--node {name!r}: use letters, digits, - and _ only")
    if (path / CONFIG).exists():
        return _add_nodes(FederationFolder(path), nodes)
    if path.exists() and any(path.iterdir()):
        raise RunError(f"{path} exists already and is not a federation. Choose another folder.")
    files.require_writable(path / CONFIG)
    keys.private_folder(path)
    os.chmod(path, 0o700)
    hosts = list(dict.fromkeys([*hosts, "localhost", "127.0.0.1"]))
    keys.make_authority(path / "ca", path.name, days)
    keys.make_server_certificate(path / "ca", path / "server", hosts, days)
    (path / "server" / "ca.crt").write_bytes((path / "ca" / "ca.crt").read_bytes())
    keys.write_private(path / "server" / TOKEN, secrets.token_hex(32).encode() + b"\n")
    flower = load_flower()
    keys.private_folder(path / "server" / "app")
    files.write_text(path / "server" / "app" / "pyproject.toml", flower.APP)
    _script(path / "server" / "start.sh", ["federate", "server", ".."])
    data = {**roles.to_json(), "drop": list(roles.drop)}
    config = {"server": {"host": hosts[0], "port": port}, "data": data, "nodes": {}}
    files.write_toml(path / CONFIG, config)
    folder = _add_nodes(FederationFolder(path), nodes)
    files.write_text(path / "README.md", _readme(folder))
    return folder


def _add_nodes(folder: FederationFolder, nodes: Mapping[str, Sequence[str]]) -> FederationFolder:
    config = folder.config
    for name, clients in nodes.items():
        if name in config["nodes"]:
            raise SettingError(f"{folder.path} has a node {name!r} already")
        place = folder.path / "nodes" / name
        keys.make_node_key(place, name)
        (place / "ca.crt").write_bytes((folder.path / "server" / "ca.crt").read_bytes())
        address = f"{config['server']['host']}:{config['server']['port']}"
        files.write_toml(place / NODE_CONFIG, {"name": name, "server": address})
        _script(place / "start.sh", ["federate", "node", ".", "--data", "TABLE.csv", "--client", name])
        config["nodes"][name] = list(clients) or [name]
    files.write_toml(folder.path / CONFIG, config)
    return folder


def _script(path: Path, words: Sequence[str]) -> None:
    line = shlex.join(["coterie", *words])
    files.write_text(path, f'#!/bin/sh\ncd "$(dirname "$0")" && exec {line} "$@"\n')
    path.chmod(0o700)


def _readme(folder: FederationFolder) -> str:
    nodes = ", ".join(folder.nodes)
    return f"""# Federation {folder.path.name}

| folder | goes to | secret in it |
|---|---|---|
| `ca/` | nobody: keep it offline, it makes new certificates | `ca.key` |
| `server/`, `federation.toml`, `nodes/*/node.pub` | the server's machine | `server.key`, `operator.token` |
| `nodes/NAME/` | the machine of that node, and nowhere else | `node.key` |

Copy a node's folder by a way that only its owner can read (scp, a USB stick), then delete `node.key` here.
Everywhere: `pip install "coterie[flower]"`.

1. On the server: `server/start.sh` (or `coterie federate server DIR`). Nodes must reach port {folder.port}.
2. On each node ({nodes}): edit `start.sh` to name its table, then start it.
3. On the server: `coterie federate run DIR --algorithm ditto --rounds 50`. Ctrl-C does not stop it; `coterie
   federate attach DIR` follows it again. The result is in `runs/`; each node's models are in its own `state/`.
"""


def require_loopback(host: str) -> None:
    """Without TLS nothing may leave this machine."""
    try:
        near = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        near = False
    if not near:
        raise SettingError(
            f"--insecure is for 127.0.0.1 only, not for {host}. Leave it out: TLS is ready to use."
        )


def serve(
    folder: FederationFolder, host: str, port: int | None, insecure: bool, log: Callable[[str], None]
) -> None:
    """Run the SuperLink, and register the keys of the nodes as soon as it listens."""
    from coterie.runtime import flower_link

    if insecure:
        require_loopback(host)
    elif port is not None and port != folder.port:
        raise SettingError(f"the nodes expect port {folder.port}; change it in {folder.path / CONFIG}")
    for secret in ("server.key", TOKEN):
        keys.require_private(folder.path / "server" / secret)
    require_free(host, folder.port)

    ready = threading.Event()

    def register() -> None:
        wait_for_port("127.0.0.1", folder.port, STARTS_WITHIN)
        folder.operator(insecure).register(folder.public_keys)
        ready.set()
        log(f"ready: {len(folder.nodes)} nodes may come to port {folder.port}")

    threading.Thread(target=register, daemon=True).start()
    flower_link.serve((folder.path / "server").resolve(), host, folder.port, folder.token, ready, insecure)


def serve_node(
    folder: Path,
    source: str,
    client: str | None,
    server: str | None,
    insecure: bool,
    log: Callable[[str], None],
    state: Path | None = None,
) -> None:
    """Answer the server for as long as this process lives."""
    from coterie.runs.site import Site
    from coterie.runtime.flower_node import Link

    config = files.read_toml(folder / NODE_CONFIG)
    address = server or str(config["server"])
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise SettingError(f"--server {address!r}: write host:port")
    if insecure:
        require_loopback(host)
    state = keys.private_folder((folder / "state" if state is None else state).absolute())
    signal.signal(signal.SIGTERM, _leave)
    with only_one(state):
        site = Site(source, state, client)
        site.check()
        authority = None if insecure else folder / "ca.crt"
        Link(address, folder / "node.key", authority, log).serve(site.answer)


def _leave(*signal_and_frame: object) -> None:
    """Sign out before the process ends."""
    raise SystemExit(0)


@contextmanager
def only_one(state: Path) -> Iterator[None]:
    """Two nodes on one state would overwrite each other."""
    with open(state / "lock", "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"{state} is in use by another node that is running") from None
        yield


def start(
    folder: FederationFolder,
    algorithm: Any,
    name: str | None,
    plan: Mapping[str, Any],
    insecure: bool = False,
    **more: Any,
) -> Path:
    """Ask the SuperLink for a run; its job."""
    from coterie.runs.folder import RunFolder

    name = name or f"{algorithm.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not NAME.fullmatch(name):
        raise SettingError(f"--name {name!r}: use letters, digits, - and _ only")
    out = (folder.path / "runs" / name).absolute()
    RunFolder.require_free(out)
    job = keys.private_folder((folder.path / "jobs" / name).absolute())
    Request(
        str(out),
        {"name": algorithm.name, "settings": algorithm.settings()},
        dict(plan),
        folder.roles.to_json(),
        folder.nodes,
        **more,
    ).write(job)
    submit(folder, [job], insecure)
    return job


def submit(folder: FederationFolder, jobs: Sequence[Path], insecure: bool = False) -> None:
    """Start jobs, or go on with them."""
    for job in jobs:
        told = progress(job)
        if told.get("state") in ("gathering", "running") and _is_alive(told["pid"]):
            attach = f"coterie federate attach {folder.path} --run {job.name}"
            raise RunError(f"the run {job.name} is going on. Follow it: {attach}")
    operator = folder.operator(insecure)
    operator.register(folder.public_keys)
    for job in jobs:
        (job / PROGRESS).unlink(missing_ok=True)
    number = operator.start(folder.path / "server" / "app", [job.absolute() for job in jobs])
    for job in jobs:
        files.write_json(job / "flower.json", {"run": number})


def follow(
    job: Path, watch: Callable[[dict[str, Any]], None], limit: float = STARTS_WITHIN
) -> dict[str, Any]:
    """Watch a run until it ends; its last progress. A run whose process is gone is an error."""
    began, told = time.monotonic(), {}
    while True:
        told = progress(job)
        watch(told)
        state = told.get("state", "waiting")
        if state == "finished":
            return told
        if state == "failed":
            raise RunError(f"the run failed: {told.get('error')}")
        if state != "waiting" and not _is_alive(told["pid"]) and progress(job) == told:
            resume = f"coterie federate run {job.parent.parent} --resume {job.name}"
            raise RunError(f"the run was interrupted after round {told['round']}. Go on with: {resume}")
        if state == "waiting" and time.monotonic() - began > limit:
            raise RunError(f"the SuperLink has not started the run within {limit:g} s; see what it prints")
        time.sleep(0.2)


def progress(job: Path) -> dict[str, Any]:
    """How far a run is; {} before it has started."""
    return files.read_json(job / PROGRESS) if (job / PROGRESS).exists() else {}


def notes(job: Path) -> list[str]:
    """What the server noted about nodes and answers."""
    path = job / NOTES
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def require_free(host: str, port: int) -> None:
    try:
        socket.create_server((host, port)).close()
    except OSError as problem:
        raise SettingError(f"port {port} of {host} cannot be used: {problem.strerror or problem}") from None


def wait_for_port(host: str, port: int, limit: float) -> None:
    """Return when somebody listens."""
    end = time.monotonic() + limit
    while True:
        try:
            socket.create_connection((host, port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise RunError(f"nobody listens on {host}:{port} after {limit:g} s") from None
            time.sleep(0.1)


def command(*words: object) -> list[str]:
    """A coterie command for a process of its own."""
    return [sys.executable, "-P", "-m", "coterie", *(str(word) for word in words)]

"""The federation folder, and what is started from it: server, nodes and runs."""

from __future__ import annotations

import dataclasses
import importlib
import ipaddress
import os
import secrets
import shutil
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

from coterie._core import extras, files, systems
from coterie._core.errors import RunError, SettingError, nearest
from coterie.algorithms import Algorithm
from coterie.data.federated import Roles
from coterie.deploy import audit, flower_link, keys, live_page, membership
from coterie.deploy import policy as policies
from coterie.deploy.audit import AuditLog
from coterie.deploy.flower_link import QUIET, missing
from coterie.deploy.flower_node import Link
from coterie.deploy.gate import MOST_BYTES
from coterie.deploy.identity import Identity
from coterie.deploy.job import NOTES, PROGRESS, JobRequest
from coterie.deploy.logs import JobWatcher, Log
from coterie.deploy.membership import CONFIG, NODE_CONFIG, Roster, require_name
from coterie.deploy.node_service import NodeService
from coterie.deploy.policy import Policy
from coterie.models.installed import install
from coterie.train.folder import RunFolder

TOKEN, OBSERVER = "operator.token", "observer.token"
PORT = 8765
FULL = 1 << 20  # bytes; a disk with less is full
STARTS_WITHIN = 90.0  # seconds for the SuperLink to start a run


@dataclass(frozen=True)
class FederationFolder:
    """A folder that `coterie federate init` created, on the server's machine."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> FederationFolder:
        """Open a federation folder; raise `RunError` if the path is not one."""
        if not (path / CONFIG).exists():
            raise RunError(f"{path} is not a federation folder. Create one: coterie federate init {path}")
        return cls(path)

    @property
    def config(self) -> dict[str, Any]:
        """Contents of federation.toml."""
        return files.read_toml(self.path / CONFIG)

    @property
    def port(self) -> int:
        """Port on which the server listens."""
        return int(self.config["server"]["port"])

    @property
    def nodes(self) -> dict[str, list[str]]:
        """Clients that each node is expected to have, by node."""
        return {name: list(clients) for name, clients in self.config["nodes"].items()}

    @property
    def public_keys(self) -> dict[str, Path]:
        """Public key files of the nodes, by node."""
        return {name: self.path / "nodes" / name / "node.pub" for name in self.nodes}

    @property
    def roles(self) -> Roles:
        """Which columns of the nodes' tables are used, and how."""
        data = self.config["data"]
        return Roles.from_json(
            {
                name: data.get(name)
                for name in ("client", "target", "cluster", "task", "drop", "keep", "groups")
            }
        )

    @property
    def kind(self) -> str:
        """What the nodes have: "table", "images" or "texts"."""
        return str(self.config["data"].get("kind", "table"))

    @property
    def token(self) -> str:
        """The operator's token; raise `SettingError` if others can read its file."""
        return self._token(TOKEN)

    @property
    def observer(self) -> str:
        """The observers' token, which starts and changes nothing; empty if there is none."""
        return self._token(OBSERVER) if (self.path / "server" / OBSERVER).exists() else ""

    def _token(self, name: str) -> str:
        path = self.path / "server" / name
        keys.require_private(path)
        return path.read_text(encoding="ascii").strip()

    def job(self, name: str | None) -> Path:
        """Return the job folder of a run, by default the newest."""
        jobs = sorted((self.path / "jobs").glob("*/request.json"), key=lambda file: file.stat().st_mtime)
        known = [file.parent.name for file in jobs]
        if name is None:
            if not known:
                raise RunError(f"{self.path} has no run yet. Start one: coterie federate run {self.path}")
            return self.path / "jobs" / known[-1]
        if name not in known:
            raise RunError(f"{self.path} has no run {name!r}.{nearest(name, known)}")
        return self.path / "jobs" / name

    def operator(self, insecure: bool = False, observe: bool = False) -> Any:
        """Return a connection to this folder's SuperLink on this machine, as its operator or as an observer."""
        flower = load_flower()
        authority = None if insecure else self.path / "server" / "ca.crt"
        return flower.Operator(f"127.0.0.1:{self.port}", self.observer if observe else self.token, authority)


def load_flower() -> Any:
    """Import the one module that needs Flower; raise `CoterieError` where Flower is not installed."""
    extras.require("flower", "a federation")
    os.environ.update(QUIET)
    try:
        return importlib.import_module("coterie.deploy.flower")
    except ImportError as problem:
        raise missing(problem) from None


def init(
    path: Path,
    nodes: Mapping[str, Sequence[str]],
    roles: Roles,
    hosts: Sequence[str] = (),
    port: int = PORT,
    days: float = keys.VALID_DAYS,
    kind: str = "table",
) -> FederationFolder:
    """Create a federation folder with certificates, keys and scripts, or add nodes to an existing one.

    Parameters
    ----------
    path
        The folder to create or extend.
    nodes
        Names of the nodes, each with the clients it is expected to have.
    roles
        Which columns of the nodes' tables are used, and how.
    hosts, port
        Host names and addresses under which nodes reach the server, and its port.
    days
        How long certificates are valid.
    kind
        What the nodes have: "table", "images" or "texts".
    """
    for name in nodes:
        require_name(name)
    flower = load_flower()  # before anything is written
    if (path / CONFIG).exists():
        return _add_nodes(FederationFolder(path), nodes)
    if path.exists() and any(path.iterdir()):
        raise RunError(f"{path} exists already and is not a federation. Choose another folder.")
    files.require_writable(path / CONFIG)
    systems.keep_private(keys.private_folder(path))
    hosts = list(dict.fromkeys([*hosts, "localhost", "127.0.0.1"]))
    keys.make_authority(path / "ca", path.name, days)
    keys.make_server_certificate(path / "ca", path / "server", hosts, days)
    (path / "server" / "ca.crt").write_bytes((path / "ca" / "ca.crt").read_bytes())
    for role in (TOKEN, OBSERVER):
        keys.write_private(path / "server" / role, secrets.token_hex(32).encode() + b"\n")
    keys.private_folder(path / "server" / "app")
    files.write_text(path / "server" / "app" / "pyproject.toml", flower.APP)
    _script(path / "server", ["federate", "server", ".."])
    data = {
        name: list(value) if isinstance(value, tuple) else value for name, value in roles.to_json().items()
    }
    data |= {} if kind == "table" else {"kind": kind}
    config = {"server": {"host": hosts[0], "port": port}, "data": data, "nodes": {}}
    files.write_toml(path / CONFIG, config)
    folder = _add_nodes(FederationFolder(path), nodes, days)
    files.write_text(path / "README.md", _readme(folder))
    return folder


def _add_nodes(
    folder: FederationFolder, nodes: Mapping[str, Sequence[str]], days: float = keys.VALID_DAYS
) -> FederationFolder:
    config = folder.config
    for name, clients in nodes.items():
        if name in config["nodes"]:
            raise SettingError(f"{folder.path} has a node {name!r} already")
        place = folder.path / "nodes" / name
        keys.make_node_key(place, name)
        keys.certify(folder.path / "ca", keys.load_node_key(place / "node.key")[1], name, place, days)
        (place / "ca.crt").write_bytes((folder.path / "server" / "ca.crt").read_bytes())
        address = f"{config['server']['host']}:{config['server']['port']}"
        files.write_toml(place / NODE_CONFIG, {"name": name, "server": address})
        _script(place, ["federate", "node", ".", "--data", "TABLE.csv", "--client", name])
        config["nodes"][name] = list(clients) or [name]
    files.write_toml(folder.path / CONFIG, config)
    return folder


def _script(folder: Path, words: Sequence[str]) -> None:
    name, content = systems.script(["coterie", *words])
    files.write_text(folder / name, content)
    (folder / name).chmod(0o700)


def _readme(folder: FederationFolder) -> str:
    return f"""# Federation {folder.path.name}

| folder | goes to | secret in it |
|---|---|---|
| `ca/` | nobody: keep it offline, it makes new certificates | `ca.key` |
| `server/`, `federation.toml`, `nodes/*/node.pub` and `.crt` | the server's machine | `server.key`, the tokens |
| `nodes/NAME/` | the machine of that node, and nowhere else | `node.key`, if it was made here |

Nodes make their own keys: `coterie federate join FOLDER NAME` at the node, `coterie federate sign DIR NAME.csr` here,
and send `nodes/NAME/` back. Where `init --node` made the keys, copy `nodes/NAME/` by a way that only its owner can
read, then delete `node.key` here. Everywhere: `pip install "coterie[flower]"`.

1. On the server: `server/start.sh` (or `coterie federate server DIR`). Nodes must reach port {folder.port}.
2. On each node: write its policy (`coterie federate policy FOLDER --data TABLE ...`) and read it, edit `start.sh` to
   name its table, then start it.
3. On the server: `coterie federate run DIR --algorithm ditto --rounds 50`. Ctrl-C does not stop it; `coterie
   federate attach DIR` follows it again. The result is in `runs/`; each node's models are in its own `state/`.
"""


def require_loopback(host: str) -> None:
    """Raise `SettingError` unless `host` is this machine: without TLS nothing may leave it."""
    try:
        near = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        near = False
    if not near:
        raise SettingError(
            f"--insecure is allowed on 127.0.0.1 only, not on {host}. Leave it out: the certificates for TLS are there."
        )


def serve(
    folder: FederationFolder,
    host: str,
    port: int | None,
    insecure: bool,
    log: Log,
    page: int | None = None,
) -> None:
    """Run the SuperLink until it is stopped, and register the nodes' keys once it listens.

    Parameters
    ----------
    folder
        The federation.
    host, port
        Where to listen; the port must be the one in federation.toml, which None means.
    insecure
        Leave TLS out, which is allowed on this machine only.
    log
        Receives a message when nodes may connect, and what happens in runs.
    page
        Port of the page on this machine; None takes the one after the server's, 0 serves none.
    """
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
        log(f"ready: {len(folder.nodes)} nodes may connect to port {folder.port}")

    for warning in membership.expiring(folder.path):
        log(f"warning: {warning}")
    membership.log(folder.path, what="server started", host=host, port=folder.port, insecure=insecure)
    threading.Thread(target=register, daemon=True).start()
    log.take_over()
    JobWatcher(folder.path.resolve() / "jobs", log).start()
    live_page.show(folder, insecure, log, page)
    most = int(folder.config["server"].get("most_megabytes", MOST_BYTES >> 20)) << 20
    flower_link.serve(
        (folder.path / "server").resolve(),
        host,
        folder.port,
        (folder.token, folder.observer),
        ready,
        Roster(folder.path.resolve()),
        insecure,
        most,
    )


def serve_node(
    folder: Path,
    source: str,
    client: str | None,
    server: str | None,
    insecure: bool,
    log: Callable[[str], None],
    state: Path | None = None,
    approve: bool = False,
    models: Sequence[Path] = (),
) -> None:
    """Run a node: answer the server for as long as this process lives.

    Parameters
    ----------
    folder
        The node's own folder, with its key and node.toml.
    source, client
        The node's table, images or texts, and whose they are where they do not say.
    server
        host:port of the server; None reads node.toml.
    insecure
        Leave TLS out, which is allowed on this machine only.
    log
        Receives messages about the connection.
    state
        Folder for the state of clients; by default `state` in the node's folder.
    approve
        Let every run wait for the owner's approval, whatever policy.toml says.
    models
        Python files with networks and folders of language models that runs may name, as far as the policy allows.
    """
    for path in models:
        install(path)
    policy = Policy.read(policy_path(folder))
    policy = dataclasses.replace(policy, approve=policy.approve or approve)
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
        written = AuditLog(state / audit.FILE)
        identity = Identity.read(folder, policy.members)
        service = NodeService(source, state, client, policy=policy, audit=written, log=log, identity=identity)
        service.check()
        certificate = folder / keys.CERTIFICATE
        remedy = f"Renew it: coterie federate join {folder} --renew"
        warning = keys.expiry_warning(certificate, remedy) if certificate.exists() else None
        if warning:
            log(f"warning: {warning}")
        authority = None if insecure else folder / "ca.crt"
        Link(address, folder / "node.key", authority, log).serve(service.answer)


def policy_path(folder: Path) -> Path:
    """Return the policy of a node; raise `SettingError` that says how to write one if there is none."""
    path = folder / policies.FILE
    if not path.exists():
        raise SettingError(
            f"{folder} has no {policies.FILE}, and a node answers nobody without one. Write it, and read it: coterie "
            f"federate policy {folder} --data TABLE --client COLUMN --target COLUMN"
        )
    return path


def require_new_policy(folder: Path) -> None:
    """Raise `SettingError` if a node has a policy: only its owner changes it."""
    if (folder / policies.FILE).exists():
        raise SettingError(f"{folder / policies.FILE} exists already. Edit it, or remove it first.")


def _leave(*signal_and_frame: object) -> None:
    """Sign out before the process ends."""
    raise SystemExit(0)


@contextmanager
def only_one(state: Path) -> Iterator[None]:
    """Lock a state folder: two nodes that share one would overwrite each other's files."""
    with systems.locked(state / "lock") as ours:
        if not ours:
            raise RunError(f"{state} is in use by another running node")
        yield


def start(
    folder: FederationFolder,
    algorithm: Algorithm,
    name: str | None,
    plan: Mapping[str, Any],
    insecure: bool = False,
    **more: Any,
) -> Path:
    """Start a run and return its job folder, which `follow` takes.

    Parameters
    ----------
    folder, algorithm
        The federation, and the algorithm to run.
    name
        Name of the run; None makes one from the algorithm and the time.
    plan
        Rounds and further arguments of `fit`.
    insecure
        Connect to the SuperLink without TLS.
    **more
        Further fields of `JobRequest`.
    """
    name = name or f"{algorithm.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    require_name(name, "--name")
    load_flower()  # before anything is written
    out = (folder.path / "runs" / name).absolute()
    RunFolder.require_free(out)
    job = keys.private_folder((folder.path / "jobs" / name).absolute())
    JobRequest(
        str(out),
        {"name": algorithm.name, "settings": algorithm.settings()},
        dict(plan),
        folder.roles.to_json(),
        folder.nodes,
        **{"data": folder.kind, **more},
    ).write(job)
    membership.log(folder.path, what="run", job=name, algorithm=algorithm.name)
    submit(folder, [job], insecure)
    return job


def submit(folder: FederationFolder, jobs: Sequence[Path], insecure: bool = False) -> None:
    """Ask the SuperLink to run jobs, or to continue them from their last checkpoints."""
    for job in jobs:
        told = progress(job)
        if told.get("state") in ("gathering", "running") and systems.is_alive(told["pid"]):
            attach = f"coterie federate attach {folder.path} --run {job.name}"
            raise RunError(f"the run {job.name} is still running. Follow it: {attach}")
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
    """Wait until a run ends and return its last progress.

    Parameters
    ----------
    job
        The job folder.
    watch
        Called with the progress about five times a second.
    limit
        Seconds within which the run must start.

    Raises
    ------
    RunError
        The run failed, was interrupted, or did not start in time.
    """
    began, told = time.monotonic(), {}
    while True:
        told = progress(job)
        watch(told)
        state = told.get("state", "waiting")
        if state == "finished":
            return told
        if state == "failed":
            raise RunError(f"the run failed: {told.get('error')}")
        if state != "waiting" and not systems.is_alive(told["pid"]) and progress(job) == told:
            resume = f"coterie federate run {job.parent.parent} --resume {job.name}"
            raise RunError(
                f"the run was interrupted after round {told['round']}.{_full(job)} Go on with: {resume}"
            )
        if state == "waiting" and time.monotonic() - began > limit:
            raise RunError(
                f"the SuperLink has not started the run within {limit:g} s; check its output.{_full(job)}"
            )
        time.sleep(0.2)


def _full(job: Path) -> str:
    """Return a sentence about a disk that is full, or nothing."""
    full = job.exists() and shutil.disk_usage(job).free < FULL
    return f" The disk with {job} is full: make room." if full else ""


def progress(job: Path) -> dict[str, Any]:
    """Return the progress of a run, {} before it starts."""
    return files.read_json(job / PROGRESS) if (job / PROGRESS).exists() else {}


def notes(job: Path) -> list[str]:
    """Return the server's notes about nodes and their replies."""
    path = job / NOTES
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def free_port() -> int:
    """Return a port of this machine that is not in use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def require_free(host: str, port: int) -> None:
    """Raise `SettingError` if the port cannot be listened on."""
    try:
        socket.create_server((host, port)).close()
    except OSError as problem:
        raise SettingError(f"cannot listen on {host}:{port}: {problem.strerror or problem}") from None


def wait_for_port(host: str, port: int, limit: float) -> None:
    """Wait until something listens on the port; raise `RunError` after `limit` seconds."""
    end = time.monotonic() + limit
    while True:
        try:
            socket.create_connection((host, port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise RunError(f"nothing listens on {host}:{port} after {limit:g} s") from None
            time.sleep(0.1)


def command(*words: object) -> list[str]:
    """Return the command line of a coterie command in a process of its own."""
    return [sys.executable, "-P", "-m", "coterie", *(str(word) for word in words)]

"""A node that is Flower's own SuperNode: a process for every message, and the app that the server names."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from coterie.runs import federate, files
from coterie.runtime import keys
from coterie.runtime.flower_link import QUIET


def serve(
    folder: Path, source: str, client: str | None, server: str | None, insecure: bool, state: Path | None
) -> None:
    """Become the SuperNode; this does not return."""
    address = server or str(files.read_toml(folder / federate.NODE_CONFIG)["server"])
    if insecure:
        federate.require_loopback(address.rpartition(":")[0])
        raise federate.SettingError("--stock needs TLS: Flower's SuperNode takes a key only with it")
    keys.require_private(folder / "node.key")
    state = keys.private_folder((folder / "state" if state is None else state).absolute())
    place = Path(source)
    config = {"data": str(place.absolute()) if place.exists() else source, "state": str(state)}
    config |= {"client": client} if client else {}
    words = ["flower-supernode", "--superlink", address, "--root-certificates", str(folder / "ca.crt")]
    words += ["--auth-supernode-private-key", str(folder / "node.key"), "--port", str(federate.free_port())]
    words += ["--node-config", " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())]
    home = str(Path(sys.executable).parent)
    path = f"{home}{os.pathsep}{os.environ.get('PATH', '')}"
    flower = str(keys.private_folder(state / "flower"))
    quick = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
    environment = {**os.environ, **QUIET, **quick, "PATH": path, "FLWR_HOME": flower}
    os.execve(f"{home}/flower-supernode", words, environment)

"""A node run by Flower's own SuperNode, which starts a process for every message."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from coterie._core import files, systems
from coterie._core.errors import SettingError
from coterie.deploy import federation_folder, keys
from coterie.deploy.flower_link import QUIET
from coterie.deploy.membership import NODE_CONFIG


def serve(
    folder: Path,
    source: str,
    client: str | None,
    server: str | None,
    insecure: bool,
    state: Path | None,
    models: Sequence[Path] = (),
) -> None:
    """Replace this process by Flower's SuperNode; this does not return.

    Parameters
    ----------
    folder
        The node's own folder, with its key and node.toml.
    source
        The node's table: a file, or the name of a bundled table.
    client
        Whose rows these are, where the table has no client column.
    server
        host:port of the server; None reads node.toml.
    insecure
        Refused: the SuperNode authenticates over TLS only.
    state
        Folder for the state of clients; by default `state` in the node's folder.
    models
        Python files with networks and folders of language models.
    """
    address = server or str(files.read_toml(folder / NODE_CONFIG)["server"])
    if insecure:
        federation_folder.require_loopback(address.rpartition(":")[0])
        raise SettingError("--stock needs TLS: Flower's SuperNode authenticates only over TLS")
    federation_folder.load_flower()
    keys.require_private(folder / "node.key")
    state = keys.private_folder((folder / "state" if state is None else state).absolute())
    place = Path(source)
    config = {"data": str(place.absolute()) if place.exists() else source, "state": str(state)}
    config |= {"client": client} if client else {}
    config |= {"models": os.pathsep.join(str(path.absolute()) for path in models)} if models else {}
    config |= {"policy": str(federation_folder.policy_path(folder).absolute())}
    words = ["flower-supernode", "--superlink", address, "--root-certificates", str(folder / "ca.crt")]
    words += [
        "--auth-supernode-private-key",
        str(folder / "node.key"),
        "--port",
        str(federation_folder.free_port()),
    ]
    words += ["--node-config", " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    flower = str(keys.private_folder(state / "flower"))
    quick = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
    environment = {**os.environ, **QUIET, **quick, "PATH": path, "FLWR_HOME": flower}
    systems.become(words, environment)

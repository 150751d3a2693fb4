"""A complete federation on one machine: a server and four hospitals, each in its own process."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from coterie._core import systems
from coterie.algorithms import Algorithm
from coterie.data import bundled, tables
from coterie.data.federated import Roles
from coterie.deploy import federation_folder
from coterie.deploy import policy as policies
from coterie.deploy.federation_folder import FederationFolder, command
from coterie.deploy.policy import Policy

STOPS_WITHIN = 10.0


@contextmanager
def hospitals(folder: Path | None, log: Callable[[str], None], **policy: Any) -> Iterator[FederationFolder]:
    """Start a server and a node per hospital, each with the strict policy, and stop them when the block ends.

    Parameters
    ----------
    folder
        Where to put the federation; None uses a temporary folder.
    log
        Receives messages about what was started.
    **policy
        Changes to the strict policy.

    Yields
    ------
    FederationFolder
        The running federation.
    """
    import polars

    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coterie-"))) / "hearts"
        frame = polars.read_csv(bundled.path("heart_disease"), infer_schema=False)
        names = sorted(frame["hospital"].unique())
        nodes = {name.replace(" ", "-"): [name] for name in names}
        roles = Roles("hospital", "sick")
        opened = federation_folder.init(folder, nodes, roles, port=federation_folder.free_port())
        server = command("federate", "server", folder, "--host", "127.0.0.1")
        stack.enter_context(process(server, folder / "server.log"))
        for node, (name,) in nodes.items():
            table = folder / "nodes" / node / f"{node}.csv"
            frame.filter(polars.col("hospital") == name).drop("hospital").write_csv(table)
            Policy.strict(tables.read(table), roles, **policy).write(table.parent / policies.FILE)
            words = command("federate", "node", table.parent, "--data", table, "--client", name)
            words += ["--server", f"127.0.0.1:{opened.port}"]
            stack.enter_context(process(words, table.parent / "node.log"))
        log(f"starting a server and {len(nodes)} nodes: {', '.join(names)}")
        federation_folder.wait_for_port("127.0.0.1", opened.port, federation_folder.STARTS_WITHIN)
        yield opened


def start(opened: FederationFolder, algorithm: Algorithm, rounds: int, **more: Any) -> Path:
    """Start a run with all hospitals and return its job folder."""
    plan = {"rounds": rounds, "select": "last", "checkpoint_every": 0, "evaluate_every": None}
    return federation_folder.start(opened, algorithm, None, plan, **more)


@contextmanager
def process(
    words: list[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that writes to a log file, and end it when the block or this process ends.

    Ctrl-C does not reach the process.
    """
    with open(log, "ab") as stream:
        running = subprocess.Popen(
            words,
            stdout=stream,
            stderr=stream,
            env=environment,
            **systems.apart(),
        )
    try:
        yield running
    finally:
        systems.end(running, STOPS_WITHIN)

"""A whole federation on one machine: a server and four hospitals, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from coterie.algorithms import Algorithm
from coterie.data import bundled
from coterie.data.federated import Roles
from coterie.runs import federate
from coterie.runs.federate import FederationFolder, command
from coterie.runtime.flower_link import die_with_parent

STOPS_WITHIN = 10.0


@contextmanager
def hospitals(folder: Path | None, log: Callable[[str], None]) -> Iterator[FederationFolder]:
    """The federation, running; its processes are stopped at the end."""
    import polars

    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coterie-"))) / "hearts"
        frame = polars.read_csv(bundled.path("heart_disease"), infer_schema=False)
        names = sorted(frame["hospital"].unique())
        nodes = {name.replace(" ", "-"): [name] for name in names}
        roles = Roles("hospital", "sick")
        opened = federate.init(folder, nodes, roles, port=federate.free_port())
        server = command("federate", "server", folder, "--host", "127.0.0.1")
        stack.enter_context(process(server, folder / "server.log"))
        for node, (name,) in nodes.items():
            table = folder / "nodes" / node / f"{node}.csv"
            frame.filter(polars.col("hospital") == name).drop("hospital").write_csv(table)
            words = command("federate", "node", table.parent, "--data", table, "--client", name)
            words += ["--server", f"127.0.0.1:{opened.port}"]
            stack.enter_context(process(words, table.parent / "node.log"))
        log(f"starting a server and {len(nodes)} nodes: {', '.join(names)}")
        federate.wait_for_port("127.0.0.1", opened.port, federate.STARTS_WITHIN)
        yield opened


def start(opened: FederationFolder, algorithm: Algorithm, rounds: int, **more: Any) -> Path:
    """A run with everybody."""
    plan = {"rounds": rounds, "select": "last", "checkpoint_every": 0, "evaluate_every": None}
    return federate.start(opened, algorithm, None, plan, **more)


@contextmanager
def process(
    words: list[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes to a file and does not outlive the block or this process; Ctrl-C does not reach it."""
    with open(log, "ab") as stream:
        running = subprocess.Popen(
            words,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            preexec_fn=die_with_parent,
            env=environment,
        )
    try:
        yield running
    finally:
        running.send_signal(signal.SIGCONT)
        running.terminate()
        try:
            running.wait(STOPS_WITHIN)
        except subprocess.TimeoutExpired:
            pass
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)  # and what it has started
        running.wait()

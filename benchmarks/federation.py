"""How many nodes and rounds a federation on one machine holds: seconds a round, and megabytes of every process.

    python -m benchmarks.federation nodes --nodes 200 --rounds 10
    python -m benchmarks.federation forks --nodes 20
    python -m benchmarks.federation rounds --rounds 10000 --nodes 3
    python -m benchmarks.federation rounds --rounds 10000 --in-process
    python -m benchmarks.federation network --nodes 4 --rounds 6

`nodes` starts a server and so many nodes, each a process of its own that runs what `coterie federate node` runs, with a
key, a certificate, a policy, a table, an audit log and state of its own. They are forks of a process that has imported
everything, so that they share the pages of Python and torch; shared pages are counted once (`Pss`). `forks` has no
server: such nodes read their tables and wait, which takes seconds. `rounds` starts a
server and such nodes, but no forks, and shows what each process has allocated as rounds go by; `--in-process` has the
job and three nodes in one process and no SuperLink, so that a round takes milliseconds. `network` compares FedAvg
with a network of 6.6 million parameters on nodes with its arithmetic in one process and its bytes over loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from coterie import models
from coterie.algorithms import make
from coterie.data.federated import Roles
from coterie.deploy import federation_folder, job
from coterie.deploy.demo import process
from coterie.deploy.federation_folder import FederationFolder, command, load_flower, serve_node
from coterie.deploy.in_process import InProcessTransport
from coterie.deploy.job import JobRequest
from coterie.deploy.node_service import NodeService
from coterie.deploy.policy import Policy
from coterie.engine.federation import Federation
from coterie.models.description import description
from coterie.train.fit import fit

ROWS = 40
ROLES = Roles("client", "y")
GROWS = "Anonymous"  # memory in which growth would be seen
OPEN = {"rounds": 10**6, "messages_per_run": 10**8, "messages_per_day": 10**8, "runs_per_day": 100}


def table(number: int) -> Any:
    """Return the rows of a node: ten numbers and a class."""
    import numpy
    import polars

    draw = numpy.random.default_rng(number)
    x = draw.normal(size=(ROWS, 10))
    y = (x[:, 0] + x[:, 1] * (number % 3) > draw.normal(size=ROWS)).astype(int)
    return polars.DataFrame({f"x{k}": x[:, k] for k in range(10)} | {"y": y})


def family(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += [int(word) for word in (task / "children").read_text().split()]
    return found


def megabytes(pid: int, kind: str = "Pss") -> float:
    """Return the memory of a process and of those that it started.

    `Pss` counts a page that several processes have once, `Anonymous` what was allocated, without files.
    """
    total = 0.0
    for one in family(pid):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) / 1024
    return total


def prepare(path: Path, count: int, **policy: Any) -> FederationFolder:
    """Return a federation of so many nodes, each with its table and policy."""
    names = [f"n{k:03d}" for k in range(count)]
    opened = federation_folder.init(
        path, {name: [name] for name in names}, ROLES, port=federation_folder.free_port()
    )
    for k, name in enumerate(names):
        rows, place = table(k), path / "nodes" / name
        rows.write_parquet(place / "rows.parquet")
        Policy.strict(rows, ROLES, **OPEN, **policy).write(place / "policy.toml")
    return opened


def hold(path: Path, names: list[str]) -> None:
    """Be these nodes, a process each, until this process ends."""
    load_flower()
    opened = FederationFolder.open(path)
    gc.collect()
    gc.freeze()  # collecting would write to pages that the processes share
    for name in names:
        if len(names) == 1 or os.fork() == 0:
            place = path / "nodes" / name
            address = f"127.0.0.1:{opened.port}"
            serve_node(place, str(place / "rows.parquet"), name, address, False, lambda text: None)
            os._exit(0)
    signal.pause()


@contextlib.contextmanager
def running(
    path: Path, count: int, together: bool, **policy: Any
) -> Iterator[tuple[FederationFolder, dict[str, int]]]:
    """Start a server and nodes, as forks of one process or not; yield the federation and the processes by name."""
    os.environ["PYTHONPATH"] = str(
        Path(__file__).parents[1]
    )  # processes run this tree, whatever is installed
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    opened = prepare(path, count, **policy)
    names = list(opened.nodes)
    with ExitStack() as stack:
        words = command("federate", "server", path, "--host", "127.0.0.1", "--page", "0")
        pids = {"server": stack.enter_context(process(words, path / "server.log", environment)).pid}
        federation_folder.wait_for_port("127.0.0.1", opened.port, 600.0)
        for k, some in enumerate([names] if together else [[name] for name in names]):
            held = [sys.executable, "-m", "benchmarks.federation", "hold", "--folder", str(path)]
            name = "nodes" if together else names[k]
            pids[name] = stack.enter_context(
                process([*held, "--names", *some], path / f"held-{k}.log", environment)
            ).pid
        operator = opened.operator(observe=True)
        end = time.monotonic() + 1200
        while sum(state == "online" for state in operator.nodes().values()) < count:
            if time.monotonic() > end:
                raise SystemExit(f"not all of {count} nodes came: {operator.nodes()}")
            time.sleep(1.0)
        yield opened, pids


def train(opened: FederationFolder, rounds: int, watch: Any, **more: Any) -> Path:
    """Run FedAvg on all nodes and return the job."""
    plan = {"rounds": rounds, "select": "last", "checkpoint_every": 0, "evaluate_every": 0}
    made = federation_folder.start(
        opened, make("fedavg"), "long", plan, deadline=900.0, patience=900.0, **more
    )
    federation_folder.follow(made, watch, limit=900.0)
    return made


def nodes(count: int, rounds: int, secure: bool) -> dict[str, Any]:
    """Measure a run with many nodes."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        with running(Path(folder) / "many", count, True) as (opened, pids):
            came = time.monotonic() - begun
            before = {name: megabytes(pid) for name, pid in pids.items()}
            marks = Marks(pids)
            started = time.monotonic()
            made = train(opened, rounds, marks, secure=secure)
            ended = time.monotonic() - started
            told = federation_folder.progress(made)
            result = json.loads((opened.path / "runs" / "long" / "result.json").read_text())
            return {
                "nodes": count,
                "secure sums": secure,
                "seconds until all were connected": round(came, 1),
                "seconds of the whole run": round(ended, 1),
                **marks.found(),
                "answers missed": len(result["left_out"]),
                "models at nodes": len(told["models_at"]),
                "processes of nodes": len(family(pids["nodes"])) - 1,
                "MB before the run": {name: round(value) for name, value in before.items()},
                "MB after the run": {name: round(megabytes(pid)) for name, pid in pids.items()},
            }


class Marks:
    """Seconds and processor seconds from the first to the last round that was seen."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.pids = pids
        self.seen: list[tuple[int, float, dict[str, float]]] = []

    def __call__(self, told: dict[str, Any]) -> None:
        """Look at a run's progress."""
        t = told.get("round", 0)
        if t and (not self.seen or t > self.seen[-1][0]):
            self.seen.append((t, float(told["seconds"]), processor_seconds(self.pids)))

    def found(self) -> dict[str, Any]:
        """Return what a round took."""
        (first, began, before), (last, ended, after) = self.seen[0], self.seen[-1]
        return {
            "rounds": last,
            "seconds a round": round((ended - began) / (last - first), 2),
            "processor seconds a round": {
                part: round((after[part] - before[part]) / (last - first), 2) for part in after
            },
        }


def forks(count: int) -> dict[str, Any]:
    """Measure forked nodes that have read their tables and wait, without a server."""
    load_flower()
    alone = megabytes(os.getpid())
    gc.collect()
    gc.freeze()
    ready, told = os.pipe()
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for k in range(count):
            children.append(os.fork())
            if children[-1] == 0:
                rows, place = table(k), Path(folder) / f"n{k}"
                NodeService(rows, place, f"n{k}", policy=Policy.strict(rows, ROLES, **OPEN)).check()
                os.write(told, b".")
                signal.pause()
        heard = 0
        while heard < count:
            heard += len(os.read(ready, count))
        whole = megabytes(os.getpid())
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return {
        "nodes": count,
        "MB of the parent": round(alone),
        "MB more for each node": round((whole - alone) / count, 1),
    }


def long_run(count: int, rounds: int, every: int, limit: float) -> list[dict[str, Any]]:
    """Measure memory by round, over a real SuperLink; a time limit in seconds stops it early."""
    seen: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        with running(Path(folder) / "long", count, False) as (opened, pids):
            end = time.monotonic() + limit

            def watch(told: dict[str, Any]) -> None:
                t = told.get("round", 0)
                if t and (not seen or t - seen[-1]["round"] >= every):
                    seen.append(
                        {"round": t} | {name: round(megabytes(pid, GROWS), 1) for name, pid in pids.items()}
                    )
                    print(seen[-1], flush=True)
                if time.monotonic() > end:
                    raise TimeoutError

            with contextlib.suppress(TimeoutError):
                train(opened, rounds, watch)
    return seen


def in_process(rounds: int, every: int, count: int = 3) -> list[dict[str, Any]]:
    """Measure memory by round where job and nodes are this process."""
    seen: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        services = {
            f"n{k}": NodeService(
                table(k), place / f"n{k}", f"n{k}", policy=Policy.strict(table(k), ROLES, **OPEN)
            )
            for k in range(count)
        }
        plan = {"rounds": rounds, "select": "last", "checkpoint_every": 0, "evaluate_every": 100}
        algorithm = make("ditto")
        made = place / "jobs" / "long"
        JobRequest(
            str(place / "runs" / "long"),
            {"name": algorithm.name, "settings": algorithm.settings()},
            plan,
            ROLES.to_json(),
            {name: [name] for name in services},
        ).write(made)
        state = job.Reporter.state

        def noted(reporter: job.Reporter, text: str, **more: Any) -> None:
            state(reporter, text, **more)
            t = more.get("round", 0)
            if t and t % every == 0:
                seen.append({"round": t, "MB": round(megabytes(os.getpid(), GROWS), 1)})
                print(seen[-1], flush=True)

        job.Reporter.state = noted  # type: ignore[method-assign]
        job.work(made, InProcessTransport(services))
        told = federation_folder.progress(made)
        if told["state"] != "finished":
            raise SystemExit(f"the run ended with {told}")
    return seen


def processor_seconds(pids: dict[str, int]) -> dict[str, float]:
    """Return the processor time of the server, of its job, and of all nodes, so far."""
    total = {"server": 0.0, "job": 0.0, "nodes": 0.0}
    for name, pid in pids.items():
        for one in family(pid):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
                words = Path(f"/proc/{one}/cmdline").read_text()
                part = "nodes" if name != "server" else "job" if "flwr-serverapp" in words else "server"
                total[part] += sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return total


def loopback_seconds(size: int, times: int) -> float:
    """Return how long so many messages of `size` bytes take over a loopback socket, one after the other."""
    content, taken = bytes(size), socket.create_server(("127.0.0.1", 0))

    def read() -> None:
        connection, _ = taken.accept()
        with connection:
            buffer = bytearray(1 << 20)
            while connection.recv_into(buffer):
                pass

    reader = threading.Thread(target=read)
    reader.start()
    began = time.monotonic()
    with socket.create_connection(taken.getsockname()) as sender:
        for _ in range(times):
            sender.sendall(content)
    reader.join()
    taken.close()
    return time.monotonic() - began


def network(count: int, rounds: int) -> dict[str, Any]:
    """Measure FedAvg with a network of 6.6 million parameters: nodes, one process, and the bytes alone."""
    import polars
    import torch

    model, algorithm = models.mlp((2560, 2560)), make("fedavg", lr=0.01, steps=5, batch=32)
    with tempfile.TemporaryDirectory() as folder:
        with running(Path(folder) / "network", count, False, models=("mlp",), guard=False) as (opened, pids):
            marks = Marks(pids)
            plan = {"rounds": rounds, "select": "last", "checkpoint_every": 0, "evaluate_every": 0}
            plan |= {"aggregate": "mean"}
            more = {"model": "mlp", "described": description(model), "deadline": 900.0, "patience": 900.0}
            made = federation_folder.start(opened, algorithm, "network", plan, **more)
            federation_folder.follow(made, marks, limit=900.0)
            missed = json.loads((opened.path / "runs" / "network" / "result.json").read_text())["left_out"]
    rows = polars.concat(
        [table(k).with_columns(polars.lit(f"n{k:03d}").alias("client")) for k in range(count)]
    )
    torch.set_num_threads(1)
    fed = Federation.from_table(rows, "client", "y", model=model)
    alone_at: list[tuple[float, float]] = []
    fit(
        fed,
        algorithm,
        rounds,
        evaluate_every=0,
        score_test=False,
        aggregate="mean",
        watch=lambda t, total: alone_at.append((time.monotonic(), time.process_time())),
    )
    alone = [(alone_at[-1][k] - alone_at[0][k]) / (rounds - 1) for k in (0, 1)]
    found, sent = marks.found(), loopback_seconds(fed.d * fed.dtype.itemsize, 2 * count)
    return {
        "parameters": fed.d,
        "MB of a model": round(fed.d * fed.dtype.itemsize / 1e6, 1),
        "answers missed": len(missed),
        **found,
        "seconds a round in one process": round(alone[0], 2),
        "processor seconds a round in one process": round(alone[1], 2),
        "seconds of its bytes over loopback": round(sent, 2),
        "ratio": round(found["seconds a round"] / (alone[0] + sent), 2),
    }


def main() -> None:
    """Measure what was asked for and print it as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("nodes", "forks", "rounds", "network", "hold"))
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--every", type=int, default=500, help="rounds between two looks at memory")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which a long run is stopped")
    parser.add_argument("--secure", action="store_true", help="secure sums in `nodes`")
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--names", nargs="*", default=[])
    asked = parser.parse_args()
    if asked.what == "hold":
        hold(asked.folder, asked.names)
    found: Any
    if asked.what == "nodes":
        found = nodes(asked.nodes, asked.rounds, asked.secure)
    elif asked.what == "network":
        found = network(asked.nodes, asked.rounds)
    elif asked.what == "forks":
        found = forks(asked.nodes)
    elif asked.in_process:
        found = in_process(asked.rounds, asked.every)
    else:
        found = long_run(asked.nodes, asked.rounds, asked.every, asked.limit)
    load = os.getloadavg()[0]
    print(json.dumps({"load": round(load, 1), "cores": os.cpu_count(), "found": found}, indent=1))


if __name__ == "__main__":
    main()

"""A real federation: one SuperLink and eight nodes in processes of their own, shared by the tests of a session."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    import polars

    from coterie.engine.federation import Federation

SIZES = (9, 14, 20, 31, 12, 40, 25, 18, 33, 10, 21)
HOLDS = {"n0": (0, 1), "n1": (2, 3), "n2": (4, 5), **{f"n{k - 3}": (k,) for k in range(6, 11)}}
THREE = ("n0", "n1", "n2")
EVERYBODY = tuple(HOLDS)
PATIENCE = 120.0


def client(k: int) -> str:
    return f"client {'fbdacekhijg'[k]}"


def table() -> polars.DataFrame:
    """Eleven clients in two groups with a binary target."""
    import polars

    from coterie._core import randomness

    total = sum(SIZES)
    owner = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    x = randomness.normal(randomness.slots(randomness.key(3, "x", torch.arange(total)), 2))
    noise = randomness.normal(randomness.key(4, "e", torch.arange(total)))
    score = x[:, 0] * (1 + owner % 2) - x[:, 1] + noise
    return polars.DataFrame(
        {
            "who": [client(k) for k in owner.tolist()],
            "group": [f"g{k % 2}" for k in owner.tolist()],
            "a": (100 * x[:, 0] + 7).numpy(),
            "b": [None if k % 7 == 3 else value for k, value in enumerate(x[:, 1].tolist())],
            "c": [("red", "green", "blue")[k % 3] for k in range(total)],
            "y": (score > 0).to(torch.long).numpy(),
        }
    )


class Live:
    """The federation's folder and its processes, by name."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        from coterie.data.federated import Roles
        from coterie.deploy import federation_folder

        self.frame, self.stack = table(), stack
        clients = {name: [client(k) for k in own] for name, own in HOLDS.items()}
        self.roles = Roles("who", "y", cluster="group")
        self.folder = federation_folder.init(path, clients, self.roles, port=federation_folder.free_port())
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name, own in clients.items():
            self.write_table(name, self.rows(own))

    def write_table(self, name: str, rows: polars.DataFrame) -> None:
        """Give a node its table, and a policy that allows small clients, all methods and many runs."""
        from coterie.algorithms import all_algorithms
        from coterie.deploy.policy import Policy

        limits = {"runs_per_day": 10_000, "messages_per_day": 10**6, "splits": 1000}
        few = {"min_rows": 1, "min_rows_per_statistic": 1, "guard": False}  # models are those of a local run
        rows.write_parquet(self.table(name))
        policy = Policy.strict(rows, self.roles, **few, **limits, settings={}, metrics=None)
        policy.allowing(list(all_algorithms())).write(self.table(name).parent / "policy.toml")

    def rows(self, clients: Sequence[str]) -> polars.DataFrame:
        """The rows of these clients; that of a single one has no client column."""
        import polars

        rows = self.frame.filter(polars.col("who").is_in(list(clients)))
        return rows if len(clients) > 1 else rows.drop("who")

    def table(self, name: str) -> Path:
        return self.folder.path / "nodes" / name / "rows.parquet"

    def start_server(self) -> None:
        from coterie.deploy import federation_folder

        words = federation_folder.command("federate", "server", self.folder.path, "--host", "127.0.0.1")
        self.start("server", words)
        federation_folder.wait_for_port("127.0.0.1", self.folder.port, PATIENCE)

    def start_node(self, name: str, *more: str) -> None:
        from coterie.deploy import federation_folder

        place = self.folder.path / "nodes" / name
        words = federation_folder.command("federate", "node", place, "--data", self.table(name))
        words += ["--server", f"127.0.0.1:{self.folder.port}"]
        if len(HOLDS[name]) == 1:
            words += ["--client", client(HOLDS[name][0])]
        self.start(name, [*words, *more])

    def start_shard(self, name: str) -> None:
        """A node whose table says who its many clients are."""
        from coterie.deploy import federation_folder

        place = self.folder.path / "nodes" / name
        words = federation_folder.command("federate", "node", place, "--data", self.table(name))
        self.start(name, [*words, "--server", f"127.0.0.1:{self.folder.port}"])

    def start(self, name: str, words: list[str]) -> None:
        from coterie.deploy.demo import process

        attackers = str(Path(__file__).parent)  # so that a server can be made to run an attacker's app
        paths = [attackers, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        log = self.folder.path / f"{name}.log"
        self.processes[name] = self.stack.enter_context(process(words, log, environment))

    def kill(self, name: str, how: int | None = None) -> None:
        how = signal.SIGKILL if how is None else how  # named here, because Windows has none
        os.killpg(self.processes[name].pid, how)
        if how == signal.SIGKILL:
            self.processes[name].wait()

    def log(self, name: str) -> str:
        return (self.folder.path / f"{name}.log").read_text(errors="replace")

    def job(self, name: str, algorithm: Any, rounds: int, nodes: Sequence[str] = THREE, **more: Any) -> Path:
        """A run that is asked for, not yet started."""
        from coterie._core.systems import private_folder
        from coterie.deploy.job import JobRequest

        place = self.folder.path / "jobs" / name
        assert not place.exists(), f"another test has a job {name!r}, which is over"
        job = private_folder(place)
        every = {key: more.pop(key, 0) for key in ("checkpoint_every", "evaluate_every")} | more.pop(
            "plan", {}
        )
        JobRequest(
            out=str(self.folder.path / "runs" / name),
            algorithm={"name": algorithm.name, "settings": algorithm.settings()},
            plan={"rounds": rounds, "select": "last", "aggregate": "mean", **every},
            nodes={node: self.folder.nodes[node] for node in nodes},
            **{"roles": self.roles.to_json(), "deadline": 20.0, "patience": PATIENCE, **more},
        ).write(job)
        return job

    def run(self, *jobs: Path, watch: Callable[[dict[str, Any]], None] = lambda told: None) -> None:
        """Start jobs and follow them to the end."""
        from coterie.deploy import federation_folder

        federation_folder.submit(self.folder, jobs)
        for job in jobs:
            federation_folder.follow(job, watch, limit=PATIENCE)

    def local(self, nodes: Sequence[str] = THREE, **options: Any) -> Federation:
        """The same clients in this process."""
        import polars

        from coterie.engine.federation import Federation

        clients = [client(k) for name in nodes for k in HOLDS[name]]
        rows = self.frame.filter(polars.col("who").is_in(clients))
        roles = {"cluster": "group"} if not options.pop("plain", False) else {"drop": ["group"]}
        return Federation.from_table(rows, "who", "y", **roles, **options)

    def models(self, job: Path, nodes: Sequence[str] = THREE) -> dict[str, torch.Tensor]:
        """The models on the disks of the nodes, by client."""
        from coterie._core import files
        from coterie.deploy.job import JobRequest

        found = {}
        for name in nodes:
            place = self.folder.path / "nodes" / name / "state" / JobRequest.read(job).run / "run" / "models"
            personal = files.read_tensors(place / "models.safetensors")[0]["personal"]
            found |= dict(zip(files.read_json(place / "model.json")["clients"], personal, strict=True))
        return found

    def result(self, job: Path) -> dict[str, Any]:
        from coterie._core import files

        return files.read_json(self.folder.path / "runs" / job.name / "result.json")

    def missed(self, job: Path) -> set[tuple[int, str]]:
        """(round, client) of answers that did not come."""
        return {(t, name) for t, name, _ in self.result(job)["left_out"]}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A whole federation is started only when asked for."""
    if "e2e" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.skip(reason="starts a federation: run with `make e2e`"))


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    pytest.importorskip("flwr", reason="a federation needs the extra 'flower'")
    with ExitStack() as stack:
        running = Live(tmp_path_factory.mktemp("live") / "federation", stack)
        running.start_server()
        for name in EVERYBODY:
            running.start_node(name)
        yield running


def wait_until(true: Callable[[], bool], limit: float = PATIENCE) -> None:
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """`until(lambda: ...)` waits for something to become true."""
    return wait_until

"""Processes that share a federation's clients: on this machine, under torchrun or SLURM, or on a Ray cluster.

All of them speak `torch.distributed` (gloo). The process that runs the method is worker 0; the others serve it.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coterie._core import extras
from coterie._core.errors import CoterieError, SettingError
from coterie.algorithms import Algorithm, make
from coterie.engine.federation import Federation
from coterie.engine.local_runtime import LocalRuntime
from coterie.engine.shard_worker import MakeAlgorithm, ShardWorker
from coterie.engine.sharded_runtime import ShardedRuntime
from coterie.engine.worker_links import Crew, ProcessLink, WorkerLost
from coterie.train.worker import SERVER, open_store, process_group, serve_process, serve_rank

if TYPE_CHECKING:
    from coterie.train.run import Run

BEGINS = 300.0  # seconds for a process to start
ENDS = 10.0  # seconds for a process to end
IS_WORKER = "COTERIE_WORKER"  # set in the environment of a process that serves
PORT = 29400  # of the first process, under SLURM


def crew_of(how: int | str, exact: bool = False) -> AbstractContextManager[Crew]:
    """Return the processes that `workers` of `fit` asks for, to be opened with `with`."""
    if IS_WORKER in os.environ:
        raise SettingError(
            "a worker imports the program that made the network: call `fit` under `if __name__ == '__main__':`"
        )
    if isinstance(how, int) or how.lstrip("-").isdigit():
        if int(how) < 1:
            raise SettingError(f"workers is {how}; give 1 or more processes")
        return _local(int(how), exact)
    kind, _, rest = how.partition(":")
    if kind == "ray":
        return _ray(rest, exact)
    if kind in ("torchrun", "slurm") and not rest:
        return _joined(_place(kind), exact)
    raise SettingError(
        f"workers is {how!r}; it is a number of processes, 'torchrun', 'slurm', 'ray:N' or 'ray:N@ADDRESS'"
    )


@contextmanager
def sharded(
    fed: Federation,
    how: int | str | Crew | None,
    exact: bool = False,
    algorithm: Algorithm | None = None,
) -> Iterator[Federation]:
    """Share the clients of a federation over processes inside the block.

    Parameters
    ----------
    fed
        The federation, with its clients in this process.
    how
        Number of processes on this machine, 'torchrun' or 'slurm' for those that these have started, 'ray:N' or
        'ray:N@ADDRESS' for a Ray cluster; None leaves everything in this process.
    exact
        Give the same bits whatever the number of processes is.
    algorithm
        An algorithm that is not installed where the other processes are; under torchrun they take it from their own
        call.

    Yields
    ------
    Federation
        The same federation, whose runtime is a `ShardedRuntime`. In a process of torchrun or SLURM that is not the
        first, nothing is yielded: the process serves the first one and then leaves the program.

    Examples
    --------
    >>> import coterie
    >>> fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
    >>> with sharded(fed, 1, exact=True) as spread:
    ...     run = coterie.fit(spread, "fedavg", rounds=2)
    >>> run.rounds
    2
    """
    if how is None and not exact:
        yield fed
        return
    home = fed.runtime
    if not isinstance(home, LocalRuntime):
        raise SettingError("workers share clients that are in this process; nodes elsewhere have their own")
    if not isinstance(how, Crew):
        serve_others(how, fed, algorithm)
    before = torch.get_num_threads()
    with ExitStack() as stack:
        crew = (
            how if isinstance(how, Crew) else stack.enter_context(crew_of(1 if how is None else how, exact))
        )
        torch.set_num_threads(1 if exact else max(1, before // crew.here))
        stack.callback(torch.set_num_threads, before)
        spread = fed.fresh()
        spread.runtime = ShardedRuntime.open(crew, home)
        yield spread


def come_home(run: Run) -> Run:
    """Bring the clients of a run, with what they keep, back to this process."""
    if isinstance(run.fed.runtime, ShardedRuntime):
        run.fed.runtime = run.fed.runtime.brought_home()
    return run


@dataclass(frozen=True)
class ProcessPlace:
    """One process among those that torchrun or SLURM has started."""

    rank: int
    count: int
    here: int
    address: str
    port: int


def _place(kind: str) -> ProcessPlace:
    """Return which process of torchrun or SLURM this is."""
    names = {
        "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
    }[kind]
    found = [os.environ.get(name) for name in names]
    if found[0] is None or found[1] is None:
        started = (
            "torchrun --nproc-per-node 4 -m coterie fit ..." if kind == "torchrun" else "srun coterie fit ..."
        )
        raise SettingError(
            f"workers is {kind!r}, but {names[0]} and {names[1]} are not set: start it with `{started}`"
        )
    address = os.environ.get("MASTER_ADDR") or first_host(os.environ)
    port = int(os.environ.get("MASTER_PORT") or PORT + int(os.environ.get("SLURM_JOB_ID", "0")) % 1000)
    return ProcessPlace(int(found[0]), int(found[1]), int(found[2] or 1), address, port)


def first_host(environment: Mapping[str, str]) -> str:
    """Return the first machine of a SLURM job.

    Examples
    --------
    >>> first_host({"SLURM_JOB_NODELIST": "gpu[07-09,12],login1"})
    'gpu07'
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    found = re.match(r"([^,\[]+)(?:\[([^],-]+))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes


def serve_others(
    how: int | str | None, fed: Federation | None = None, algorithm: Algorithm | None = None
) -> None:
    """In a process of torchrun or SLURM that is not the first, serve the first one and leave the program.

    Parameters
    ----------
    how
        `workers` of `fit`.
    fed
        The federation, whose model and augmentation are used if they cannot be sent.
    algorithm
        The algorithm, likewise.
    """
    if how not in ("torchrun", "slurm"):
        return
    place = _place(str(how))
    if place.rank == SERVER:
        return
    model, augment = (None, None) if fed is None else (fed.model, fed.runtime.rows("train").augment)
    with process_group(place.rank, place.count, f"tcp://{place.address}:{place.port}"):
        serve_process(place.rank, maker(algorithm), model=model, augment=augment)
    sys.exit(0)


def maker(algorithm: Algorithm | None) -> MakeAlgorithm:
    """Return `make`, which also knows an algorithm that is not installed."""

    def made(name: str, **settings: Any) -> Algorithm:
        if algorithm is not None and name == algorithm.name:
            return type(algorithm)(**settings)
        return make(name, **settings)

    return made


@contextmanager
def _joined(place: ProcessPlace, exact: bool) -> Iterator[Crew]:
    """Yield the processes that torchrun or SLURM has started; they serve until this process ends."""
    if not _open:
        group = process_group(place.rank, place.count, f"tcp://{place.address}:{place.port}")
        group.__enter__()
        links = [ProcessLink(rank) for rank in range(1, place.count)]
        _open.append(Crew(ShardWorker(make), links, exact, place.here))

        @atexit.register
        def close() -> None:
            _open.pop().close()

    crew = _open[0]
    crew.exact = exact
    yield crew


_open: list[Crew] = []  # the processes of torchrun or SLURM, which serve all calls of `fit`


@contextmanager
def _local(count: int, exact: bool) -> Iterator[Crew]:
    """Start processes on this machine and stop them at the end."""
    links: list[ProcessLink] = []
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        if count > 1:
            store = open_store("127.0.0.1", count)
            path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
            environment = {**os.environ, "PYTHONPATH": path, IS_WORKER: "1", **_loopback_only()}
            for rank in range(1, count):
                command = [
                    sys.executable,
                    "-m",
                    "coterie.train.worker",
                    str(rank),
                    str(count),
                    str(store.port),
                ]
                processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
            stack.callback(_stop, processes)
            _await(store, processes)
            stack.enter_context(_loopback())
            stack.enter_context(process_group(SERVER, count, store=store))
            links = [ProcessLink(rank, lost=_fate(process)) for rank, process in enumerate(processes, 1)]
        crew = Crew(ShardWorker(make), links, exact, count)
        yield crew
        crew.close()


def _loopback_only() -> dict[str, str]:
    """Return the environment in which gloo listens on this machine's own interface only."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names and "GLOO_SOCKET_IFNAME" not in os.environ else {}


@contextmanager
def _loopback() -> Iterator[None]:
    added = _loopback_only()
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _await(store: Any, processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all processes have started."""
    until = time.monotonic() + BEGINS
    while store.add("ready", 0) < len(processes):
        for rank, process in enumerate(processes, 1):
            if process.poll() is not None:
                raise WorkerLost(f"worker {rank} did not start{_fate(process)()}")
        if time.monotonic() > until:
            raise WorkerLost(f"the workers did not start within {BEGINS:.0f} s")
        time.sleep(0.02)


def _fate(process: subprocess.Popen[bytes]) -> Callable[[], str]:
    """Return a function that says how a process has ended."""

    def fate() -> str:
        try:
            code = process.wait(ENDS)
        except subprocess.TimeoutExpired:
            return f" (process {process.pid} does not answer)"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f" (process {process.pid}, {how})"

    return fate


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for processes to end, and end those that do not."""
    failed = sys.exc_info()[0] is not None
    for process in processes:
        try:
            process.wait(0 if failed else ENDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _ray(text: str, exact: bool) -> Iterator[Crew]:
    """Start processes on a Ray cluster: `text` is N or N@ADDRESS."""
    extras.require("ray", "a crew on a Ray cluster")
    import ray

    number, _, address = text.partition("@")
    if not number.isdigit() or int(number) < 1:
        raise SettingError(
            f"workers is 'ray:{text}'; give the number of processes, such as ray:8 or ray:8@auto"
        )
    count = int(number)
    with ExitStack() as stack:
        if not ray.is_initialized():
            here = (
                {} if address else {"include_dashboard": False, "num_cpus": max(count, os.cpu_count() or 1)}
            )
            ray.init(address=address or None, log_to_driver=False, **here)
            stack.callback(ray.shutdown)
        host = ray.util.get_node_ip_address()
        store = open_store(host, count)
        task = ray.remote(num_cpus=1, max_retries=0)(serve_rank)
        tasks = [task.remote(rank, count, host, store.port) for rank in range(1, count)]
        until = time.monotonic() + BEGINS
        while store.add("ready", 0) < count - 1:
            done, _ = ray.wait(tasks, timeout=0.1) if tasks else ([], [])
            if done or time.monotonic() > until:
                raise CoterieError(
                    f"not all of {count} workers started on the Ray cluster: has it so many CPUs?"
                )
        stack.enter_context(process_group(SERVER, count, store=store))
        links = [ProcessLink(rank, lost=lambda: " (a task of the Ray cluster)") for rank in range(1, count)]
        crew = Crew(ShardWorker(make), links, exact)
        yield crew
        crew.close()

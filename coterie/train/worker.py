"""A process that serves a sharded simulation; on one machine it is `python -m coterie.train.worker RANK COUNT PORT`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from coterie._core import systems
from coterie._core.errors import SettingError
from coterie.algorithms import make
from coterie.engine.shard_worker import MakeAlgorithm, ShardWorker
from coterie.engine.worker_links import ProcessLink, serve

SERVER = 0  # rank of the process that runs the method
TIMEOUT = timedelta(days=7)  # a phase may take long; a process that dies is noticed at once


@contextmanager
def process_group(rank: int, count: int, address: str | None = None, store: Any = None) -> Iterator[None]:
    """Open the process group of `torch.distributed` inside the block, unless one is open."""
    if dist.is_initialized():
        if store is not None:
            raise SettingError(
                "a torch.distributed process group is open in this process; use workers='torchrun'"
            )
        yield
        return
    where: dict[str, Any] = {"init_method": address} if store is None else {"store": store}
    dist.init_process_group("gloo", rank=rank, world_size=count, timeout=TIMEOUT, **where)
    try:
        yield
    finally:
        dist.destroy_process_group()


def serve_process(rank: int, make_algorithm: MakeAlgorithm = make, **own: Any) -> None:
    """Serve the server of this process's group until it closes the link."""
    serve(ShardWorker(make_algorithm, card=rank, **own), ProcessLink(SERVER))


def open_store(host: str, count: int, port: int = 0) -> TCPStore:
    """Return the store where `count` processes find each other; without a port it is opened here, for the others."""
    new = port == 0
    return TCPStore(host, port, count, is_master=new, wait_for_workers=not new, use_libuv=systems.has_libuv())


def serve_rank(rank: int, count: int, host: str, port: int) -> None:
    """Join the server at this address and serve it."""
    store = open_store(host, count, port)
    store.add("ready", 1)
    with process_group(rank, count, store=store):
        serve_process(rank)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then closes the link
    serve_rank(int(sys.argv[1]), int(sys.argv[2]), "127.0.0.1", int(sys.argv[3]))

"""The runtimes on which the conformance suite runs, each with the same small federation."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import polars
import torch
from torch import Tensor

from coterie import models
from coterie._core import randomness
from coterie.algorithms.base import Algorithm
from coterie.data.federated import Roles
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.in_process import InProcessTransport
from coterie.deploy.loopback import LoopbackRuntime
from coterie.deploy.node_service import NodeService
from coterie.deploy.transport import NodeCaller
from coterie.engine import local_runtime
from coterie.engine.aggregate import PLAIN
from coterie.engine.federation import Federation
from coterie.engine.local_runtime import LocalRuntime
from coterie.engine.protocol import Runtime
from coterie.engine.shard_worker import ShardWorker
from coterie.engine.sharded_runtime import ShardedRuntime
from coterie.engine.worker_links import Crew, DirectLink
from coterie.models.description import description
from coterie.train.run import Run

SIZES = (1, 2, 5, 9, 30, 14)  # rows of each client
L2 = 0.1
RUN = "conformance"
ROUNDS = 4


def federation(
    sizes: tuple[int, ...] = SIZES, model: models.Model | None = None, **options: Any
) -> Federation:
    """Return a small ragged federation with two clusters; the first client has one row."""
    x, y = _draw(sizes)
    parts = list(sizes)
    return Federation.from_arrays(
        torch.split(x, parts),
        torch.split(y, parts),
        model or models.linear(l2=L2),
        torch.arange(len(sizes)) % 2,
        **options,
    )


def table(sizes: tuple[int, ...] = SIZES) -> polars.DataFrame:
    """Return the rows of `federation` as a table with the columns client, group, a, b, c and y."""
    x, y = _draw(sizes)
    owner = [k for k, size in enumerate(sizes) for _ in range(size)]
    return polars.DataFrame(
        {
            "client": [f"client {k}" for k in owner],
            "group": [f"group {k % 2}" for k in owner],
            **{name: x[:, k].numpy() for k, name in enumerate("abc")},
            "y": y.numpy(),
        }
    )


def _draw(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    d, total = 3, torch.arange(sum(sizes))
    x = randomness.normal(randomness.slots(randomness.key(7, "conformance", total), d))
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    slope = randomness.normal(randomness.slots(randomness.key(8, "slope", torch.arange(len(sizes)) % 2), d))
    return x, (x * slope[owner]).sum(-1) + 0.1 * randomness.normal(randomness.key(9, "noise", total))


@dataclass(frozen=True)
class Host:
    """The federation of `table` on one runtime, and two things that the protocol does not offer.

    Attributes
    ----------
    fed : Federation
        The federation.
    homes : list of Runtime
        Runtimes that hold the clients' rows, so that a check can damage them.
    models : callable
        Returns the deployed models [n, d] of a run, wherever they are stored.
    """

    fed: Federation
    homes: list[Runtime]
    models: Callable[[Run], Tensor] = lambda run: run.personal


@dataclass(frozen=True)
class Options:
    """How rows are split, and how often clients drop out."""

    split: tuple[float, float, float] = (1.0, 0.0, 0.0)
    dropout: float = 0.0


def maker(algorithm: Algorithm) -> Callable[..., Algorithm]:
    """Return what stands in for `algorithms.make`, which does not know a plugin that is not installed."""
    return lambda name, **settings: type(algorithm)(**settings)


@functools.lru_cache(maxsize=16)
def _read(options: Options, loop: bool, own: Algorithm | None) -> Federation:
    """Return the federation of `table` with a linear model, or with the model of a method that has its own."""
    model = None if own is None else own.trial_model(ROUNDS)
    return Federation.from_table(
        table(), "client", "y", cluster="group", l2=L2, loop=loop, model=model, **vars(options)
    )


def _local(algorithm: Algorithm, options: Options, loop: bool = False) -> Federation:
    """Return a federation in this process with targets of its own, which a check may damage."""
    fed = _read(options, loop, algorithm if algorithm.trial_model(ROUNDS) is not None else None).fresh()
    splits = {split: fed.runtime.rows(split) for split in fed.rows}
    own = {split: dataclasses.replace(rows, y=rows.y.clone()) for split, rows in splits.items()}
    fed.runtime = fed.runtime.with_rows(own, fed.clusters)
    return fed


@contextmanager
def _stacked(algorithm: Algorithm, options: Options) -> Iterator[Host]:
    """All clients in one tensor operation: what the others are compared with."""
    fed = _local(algorithm, options)
    yield Host(fed, [fed.runtime])


@contextmanager
def chunks(algorithm: Algorithm, options: Options) -> Iterator[Host]:
    """Two clients at a time."""
    fed = _local(algorithm, options)
    with patch.object(local_runtime, "STACK_ELEMENTS", 2 * (4 * fed.d + 3 * algorithm.batch)):
        yield Host(fed, [fed.runtime])


@contextmanager
def _loop(algorithm: Algorithm, options: Options) -> Iterator[Host]:
    """One client after the other."""
    fed = _local(algorithm, options, loop=True)
    yield Host(fed, [fed.runtime])


@contextmanager
def _loopback(algorithm: Algorithm, options: Options) -> Iterator[Host]:
    """Three nodes that read and write bytes."""
    fed = _local(algorithm, options)
    runtime = LoopbackRuntime.of(fed, 3)
    fed.runtime = runtime
    yield Host(fed, [node.runtime for node in runtime.nodes])


@contextmanager
def _sharded(algorithm: Algorithm, options: Options) -> Iterator[Host]:
    """Three workers of a sharded simulation, two of which see packed messages only."""
    fed = _local(algorithm, options)
    workers = [ShardWorker(maker(algorithm)) for _ in range(3)]
    home = fed.runtime
    assert isinstance(home, LocalRuntime)
    fed.runtime = ShardedRuntime.open(Crew(workers[0], [DirectLink(worker) for worker in workers[1:]]), home)
    yield Host(
        fed, [block for worker in workers for shard in worker.shards.values() for block in shard.blocks]
    )


@contextmanager
def _remote(algorithm: Algorithm, options: Options) -> Iterator[Host]:
    """Three nodes with tables, state files and models of their own, as across a network."""
    frame = table()
    with tempfile.TemporaryDirectory() as folder:
        nodes = {}
        for k in range(3):
            mine = [f"client {i}" for i in range(k, len(SIZES), 3)]
            rows = frame.filter(polars.col("client").is_in(mine))
            nodes[f"node {k}"] = NodeService(rows, Path(folder) / str(k), make_algorithm=maker(algorithm))
        caller = NodeCaller(InProcessTransport(nodes))
        own = algorithm.trial_model(ROUNDS)
        model = None if own is None else description(own)
        request = RunRequest(Roles("client", "y", cluster="group"), split=options.split, l2=L2, model=model)
        plan = survey(caller, {name: [] for name in nodes}, request, RUN)
        fed = connect(caller, plan, algorithm, options.dropout)
        fed.aggregate = PLAIN  # as on the other runtimes, not the rule for nodes
        runs = {name: node.runs[RUN] for name, node in nodes.items()}

        def personal(run: Run) -> Tensor:
            found = torch.full((fed.n, fed.d), torch.nan, dtype=fed.dtype)
            for name, ids in plan.nodes.items():
                found[ids] = runs[name].models(run.deployed_round)
            return found

        yield Host(fed, [run.runtime for run in runs.values()], personal)


Open = Callable[[Algorithm, Options], AbstractContextManager[Host]]
RUNTIMES: dict[str, Open] = {
    "stacked": _stacked,
    "loop": _loop,
    "loopback": _loopback,
    "sharded": _sharded,
    "remote": _remote,
}

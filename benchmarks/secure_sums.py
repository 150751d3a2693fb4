"""Time of a round with secure aggregation, as a multiple of a plain one: 20 nodes in one process, d = 10^6.

    python benchmarks/secure_sums.py [--nodes 20] [--d 1000000] [--rounds 5]

All nodes compute in this process one after the other, so that the work of everybody counts, and the network nothing.
The phase takes one gradient step on a small table, which costs nothing next to a vector of a million numbers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import polars
import torch

from coterie import Algorithm, State, setting
from coterie.algorithms.base import Reveals
from coterie.conformance.runtimes import maker
from coterie.data.federated import Roles
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.in_process import InProcessTransport
from coterie.deploy.node_service import NodeService
from coterie.deploy.transport import NodeCaller
from coterie.engine.aggregate import Aggregate


@dataclass(frozen=True)
class Wide(Algorithm):
    """The mean of vectors of a given length (made for this benchmark, 2026)."""

    reveals: ClassVar[Reveals] = {"train": "model"}
    length: int = setting(1000, "numbers in an answer", low=1)

    def start(self, fed):
        return State(x=torch.zeros(self.length, dtype=fed.dtype))

    def round(self, fed, s, t):
        return State(x=fed.map(self.train, x=s.x).mean())

    def train(self, client, x):
        return x + client.size

    def deploy(self, client):
        return client.initial_model()

    def traffic(self, d):
        return {"train": (self.length, self.length)}


def seconds(nodes: int, d: int, rounds: int, secure: bool, aggregate: str | None = None) -> list[float]:
    """Return the seconds of every round."""
    algorithm = Wide(length=d)
    with tempfile.TemporaryDirectory() as folder:
        services = {}
        for k in range(nodes):
            frame = polars.DataFrame({"client": [f"c{k}"] * 8, "a": list(range(8)), "y": [k % 2, 1] * 4})
            services[f"n{k}"] = NodeService(frame, Path(folder) / str(k), make_algorithm=maker(algorithm))
        caller = NodeCaller(InProcessTransport(services))
        plan = survey(caller, {name: [] for name in services}, RunRequest(Roles("client", "y")), "benchmark1")
        fed = connect(caller, plan, algorithm, secure=secure)
        if aggregate is not None:
            fed.aggregate = Aggregate.parse(aggregate)
        state, took = algorithm.start(fed), []
        for t in range(1, rounds + 1):
            fed.enter_round(t, state)
            begun = time.perf_counter()
            state = algorithm.round(fed, state, t)
            took.append(time.perf_counter() - begun)
        assert torch.allclose(state.x, state.x[0])
    return took


def main() -> None:
    """Print the medians and their ratio; the first secure round includes the exchange of keys for 16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--d", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    size = (given.nodes, given.d, given.rounds)
    runs = [seconds(*size, False, "mean"), seconds(*size, False), seconds(*size, True)]
    mean, screened, secure = (sorted(times)[len(times) // 2] for times in runs)
    print(f"{given.nodes} nodes, d = {given.d:,}, seconds a round:")
    print(f"plain mean {mean:.2f}, screened mean (default) {screened:.2f}, secure {secure:.2f}")
    print(f"secure / plain {secure / mean:.2f}; first secure round, with keys for 16: {runs[2][0]:.2f} s")


if __name__ == "__main__":
    main()

"""Clients shared over processes: traffic and time of a round against one process, and a model for several machines.

    python benchmarks/workers.py [--clients 1000000] [--rows 10] [--features 20] [--workers 4] [--rounds 5]

FedAvg with full-batch steps on a linear model. Traffic is counted in the links. The time of a round on M machines is
modelled from processor times measured here: the phases of all clients divided by M, the server's own part, and M - 1
models down and sums up at the speed of a network that is assumed, with its latency.
Errors are relative to float64. Writes benchmarks/results/workers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from coterie import Federation, fit, models
from coterie.algorithms import make
from coterie.engine.worker_links import Crew
from coterie.train.workers import crew_of

RESULTS = Path(__file__).resolve().parent / "results"
NETWORK = 1.25e9  # bytes a second: 10 Gbit/s
LATENCY = 2e-4  # seconds of a message between two machines


def federation(clients: int, rows: int, features: int, dtype: torch.dtype = torch.float32) -> Federation:
    """Return clients of one size with noise around a common line."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * rows, features, generator=generator)
    y = x.sum(1) + torch.randn(clients * rows, generator=generator)
    names = [str(k) for k in range(clients)]
    sizes = torch.full((clients,), rows)
    x, y = x.to(dtype), y.to(dtype)
    return Federation.from_rows(x, y, sizes, model=models.linear(), names=names, dtype=dtype)


def seconds(fed: Federation, method: Any, rounds: int, crew: Crew | None) -> tuple[float, float, Any]:
    """Return time and processor time (of this process) of a round: those of more rounds less those of fewer."""
    took = []
    for count in (2, 2 + rounds):
        begun, used = time.perf_counter(), time.process_time()
        run = fit(fed, method, count, evaluate_every=0, workers=crew)
        took.append((time.perf_counter() - begun, time.process_time() - used))
    (short, short_used), (long, long_used) = took
    return (long - short) / rounds, (long_used - short_used) / rounds, run


def traffic(crew: Crew, fed: Federation, method: Any) -> float:
    """Return the bytes that cross all links in a round."""
    counts = []
    for rounds in (2, 6):
        before = sum(crew.sent) + sum(crew.received)
        fit(fed, method, rounds, evaluate_every=0, score_test=False, workers=crew)
        counts.append(sum(crew.sent) + sum(crew.received) - before)
    return (counts[1] - counts[0]) / 4


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--features", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machines", type=int, default=10)
    given = parser.parse_args()
    method = make("fedavg", lr=0.01, steps=5, batch=given.rows // 2)
    torch.set_num_threads(1)
    found: dict[str, Any] = {"settings": vars(given)}
    with crew_of(given.workers) as crew:
        small = federation(given.clients // 10, given.rows, given.features)
        found["bytes_per_round"] = {str(small.n): traffic(crew, small, method)}
        fed = federation(given.clients, given.rows, given.features)
        found["bytes_per_round"][str(fed.n)] = traffic(crew, fed, method)
        found["one_process_s"], found["one_process_cpu_s"], one = seconds(fed, method, given.rounds, None)
        before = list(crew.busy)
        found["workers_s"], found["server_cpu_s"], many = seconds(fed, method, given.rounds, crew)
        phases = [(after - then) / (4 + given.rounds) for after, then in zip(crew.busy, before, strict=True)]
    found["phases_cpu_s"] = phases  # of a round, by worker
    found["server_cpu_s"] -= phases[0]
    found["load"] = os.getloadavg()[0]
    found["speed_up"] = found["one_process_s"] / found["workers_s"]
    exact = fit(
        federation(given.clients, given.rows, given.features, torch.float64), method, 2 + given.rounds
    )
    for name, run in (("one_process", one), ("workers", many)):
        found[f"{name}_error"] = float(
            (run.personal[0] - exact.personal[0]).norm() / exact.personal[0].norm()
        )
    size = found["bytes_per_round"][str(fed.n)] / (given.workers - 1)
    others = given.machines - 1
    model = sum(phases) / given.machines + found["server_cpu_s"] + others * (size / NETWORK + 4 * LATENCY)
    found["model"] = {
        "machines": given.machines,
        "round_s": model,
        "speed_up": found["one_process_cpu_s"] / model,
    }
    print(json.dumps(found, indent=2))
    (RESULTS / "workers.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

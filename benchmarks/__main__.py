"""Run the foundation's benchmarks and print one table: `python -m benchmarks [--json FILE]`."""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads import PlainLoop, images, least_squares_federation, logistic_federation
from coterie import Federation, fit, models
from coterie.algorithms import make
from coterie.federation.build import from_rows


def seconds_per_round(fed: Federation, algorithm: Any, rounds: int) -> float:
    started = time.perf_counter()
    fit(fed, algorithm, rounds, evaluate_every=0)
    return (time.perf_counter() - started) / rounds


def against_plain_loop(repeats: int = 5) -> dict[str, Any]:
    """W1: softmax 784 -> 10, 100 ragged clients, 5 steps of batch 20, equal results checked first."""
    x, y, sizes = images()
    fed = logistic_federation(x, y, sizes)
    algorithm = make("fedavg", lr=0.05, steps=5, batch=20)
    loop = PlainLoop(fed, 0.05, 5, 20)
    for t in (1, 2):
        loop.round(t)
    ours = fit(fed, algorithm, 2, evaluate_every=0).state.x
    torch.testing.assert_close(ours, loop.x, rtol=1e-4, atol=1e-6)
    times: dict[str, list[float]] = {"coterie": [], "loop": []}
    for k in range(repeats):
        times["coterie"].append(seconds_per_round(fed, algorithm, 20))
        started = time.perf_counter()
        loop.round(3 + k)
        times["loop"].append(time.perf_counter() - started)
    ours_s, loop_s = (statistics.median(times[name]) for name in ("coterie", "loop"))
    return {"coterie_s": ours_s, "loop_s": loop_s, "ratio": loop_s / ours_s}


def fifty_thousand_rounds(rounds: int = 50_000) -> dict[str, Any]:
    """400 clients x 20 dimensions, full-batch least squares."""
    fed = least_squares_federation()
    started = time.perf_counter()
    fit(fed, make("fedavg", lr=0.05, steps=1, batch=0), rounds)
    return {"rounds": rounds, "seconds": time.perf_counter() - started}


def many_clients(clients: int, sampled: int = 1000, rounds: int = 20) -> dict[str, Any]:
    """Logistic FedAvg, 20 rows x 20 features per client, a fixed number of clients sampled per round."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * 20, 20, generator=generator)
    y = (x[:, 0] + torch.randn(len(x), generator=generator) > 0).float()
    names = [str(k) for k in range(clients)]
    fed = from_rows(
        x, y, torch.full((clients,), 20), model=models.logistic(), names=names, dtype=torch.float32
    )
    algorithm = make("fedavg", participation=sampled / clients, batch=10)
    ends: list[float] = []
    fit(fed, algorithm, rounds, evaluate_every=0, watch=lambda t, total: ends.append(time.perf_counter()))
    per_round = statistics.median(after - before for before, after in itertools.pairwise(ends))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"clients": clients, "sampled": sampled, "ms_per_round": 1000 * per_round, "peak_gb": peak}


def import_seconds() -> dict[str, Any]:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import coterie; coterie.Federation"], check=True)
    return {"seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="name of one benchmark")
    arguments = parser.parse_args()
    benchmarks = {
        "import": import_seconds,
        "W1 against a plain loop": against_plain_loop,
        "50,000 rounds": fifty_thousand_rounds,
        "10,000 clients": lambda: many_clients(10_000),
        "100,000 clients": lambda: many_clients(100_000),
    }
    results = {}
    for name, run in benchmarks.items():
        if arguments.only in (None, name):
            results[name] = run()
            print(name, {key: round(value, 4) for key, value in results[name].items()}, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

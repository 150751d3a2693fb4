"""Threshold clustering at size: `python -m benchmarks.threshold [--json FILE]`.

10,000 points x 1,000 dimensions x 20 clusters, and one round of PDL-TC with 500 clients. Wall-clock seconds depend on
who else is on the machine; processor seconds (all threads) do not, so both are given, with the load before the run.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from coterie import Federation, fit, models
from coterie.algorithms import make
from coterie.theory.threshold import threshold_cluster
from coterie.theory.threshold_starts import seed_weights


def timed(work: Callable[[], Any]) -> dict[str, float]:
    load = os.getloadavg()[0]
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return {
        "wall_s": time.perf_counter() - wall,
        "processor_s": time.process_time() - processor,
        "load_before": load,
    }


def many_points(count: int = 10_000, d: int = 1_000, k: int = 20, rule: str = "auto") -> dict[str, float]:
    """K-means++, five steps of K-means and eight passes, float32 points as networks give them."""
    draw = torch.Generator().manual_seed(0)
    means = 2 * torch.randn(k, d, generator=draw)
    points = means.repeat_interleave(count // k, 0) + torch.randn(count, d, generator=draw)
    seed_weights(points[:100], 2)
    return timed(lambda: threshold_cluster(points, k, rule=rule))


def many_clients(at: str, clients: int = 500, d: int = 400) -> dict[str, float]:
    """One round in which every client clusters all others around itself."""
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(2, d, generator=draw, dtype=torch.float64) for _ in range(clients)]
    fed = Federation.from_arrays(xs, [x[:, 0] for x in xs], models.linear())
    return timed(lambda: fit(fed, make("pdl-tc", at=at, rule="size", batch=0), 1, evaluate_every=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="name of one benchmark")
    arguments = parser.parse_args()
    benchmarks: dict[str, Callable[[], dict[str, float]]] = {
        "10,000 x 1,000 x 20, auto": many_points,
        "10,000 x 1,000 x 20, size": lambda: many_points(rule="size"),
        "PDL-TC, 500 clients, own points": lambda: many_clients("own"),
        "PDL-TC, 500 clients, common points": lambda: many_clients("common"),
    }
    results = {}
    for name, run in benchmarks.items():
        if arguments.only in (None, name):
            results[name] = run()
            print(name, {key: round(value, 2) for key, value in results[name].items()}, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

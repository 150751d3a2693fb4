"""Networks and stacks on one GPU: `python -m benchmarks.gpu [--json FILE] [--clients 8,80]`.

Needs torch with CUDA, numpy and safetensors. TFLOP/s count the products of forward and backward pass as torch does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from coterie import Federation, fit, models
from coterie.algorithms import make
from coterie.algorithms.cobo import PRINTED
from coterie.models.base import Model

BATCH = 128
WAYS: dict[str, dict[str, Any]] = {
    "looped, compiled, graph, streams": {"stacked": False, "compiled": True},
    "looped, graph, streams": {"stacked": False, "compiled": False},
    "stacked, compiled": {"stacked": True, "compiled": True},
    "stacked, eager": {"stacked": True, "compiled": False},
}


def seconds(function: Callable[[], Any], repeats: int = 10) -> float:
    """Median of one call, after three that do not count."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def images(clients: int, rows: int, shape: tuple[int, ...], classes: int, model: Model) -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * rows, *shape, generator=generator)
    y = torch.randint(0, classes, (len(x),), generator=generator)
    names = [str(k) for k in range(clients)]
    return Federation.from_rows(x, y, torch.full((clients,), rows), model=model, names=names, device="cuda")


def gradients(clients: int, work: float) -> Iterator[dict[str, Any]]:
    """ResNet-9 in bfloat16: the gradients of all clients, each way, and eagerly one after the other."""
    for way, options in {**WAYS, "looped, eager": {"stacked": False, "compiled": False}}.items():
        fed = images(clients, BATCH, (3, 32, 32), 10, models.resnet9(precision="bf16", classes=10, **options))
        rows, model = fed.runtime.train, fed.model
        w = fed.initial_model().repeat(clients, 1)
        x, y = rows.x.view(clients, BATCH, 3, 32, 32), rows.y.view(clients, BATCH)
        weight = torch.full((clients, BATCH), 1 / BATCH, device="cuda")
        looped = way == "looped, eager"
        compute = model.backends.looped if looped else model.grad  # type: ignore[attr-defined]
        took = seconds(lambda compute=compute, w=w, x=x, y=y, weight=weight: compute(w, x, y, weight))
        yield {
            "clients": clients,
            "way": way,
            "seconds": took,
            "rounds_per_second": 1 / took,
            "tflops": clients * work / took / 1e12,
        }


def flops() -> float:
    """Of a gradient of ResNet-9."""
    from torch.utils.flop_counter import FlopCounterMode

    x, y = torch.zeros(BATCH, 3, 32, 32), torch.zeros(BATCH).long()
    plain = models.resnet9(classes=10, stacked=False).fit_to(x, y)
    with FlopCounterMode(display=False) as counter:
        plain.grad(plain.initial(0, torch.float32), x, y, torch.full((BATCH,), 1 / BATCH))
    return float(counter.get_total_flops())


def rounds(fed: Federation, algorithm: Any, count: int = 20) -> dict[str, Any]:
    """Seconds per round in `fit`: what `count` more of them add, so that start and end do not count."""

    def whole(rounds: int) -> float:
        started = time.perf_counter()
        fit(fed, algorithm, rounds, evaluate_every=0)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    torch.cuda.reset_peak_memory_stats()
    whole(2 + count)  # compiles, measures, and captures graphs for the numbers of clients that it meets
    took = (whole(2 + count) - whole(2)) / count
    return {
        "seconds": took,
        "rounds_per_second": 1 / took,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


def inside_cobo(work: float, clients: int = 8) -> dict[str, Any]:
    """The same network inside CoBo: gradients of everybody and of both ends of the pairs that were drawn."""
    model = models.resnet9(precision="bf16", classes=10, stacked=False, compiled=True)
    fed = images(clients, 4 * BATCH, (3, 32, 32), 10, model)
    algorithm = make("cobo", lr=0.05, rho=1.0, gamma=0.01, batch=BATCH, **PRINTED)
    found = rounds(fed, algorithm)
    pairs = [sum(len(i) for i, _ in algorithm.pairs(fed, t, None)) for t in range(3, 23)]  # type: ignore[attr-defined]
    work *= clients + 2 * statistics.mean(pairs)
    return {"clients": clients, **found, "tflops": work / found["seconds"] / 1e12}


def stacks(clients: int = 10_000) -> Iterator[dict[str, Any]]:
    """W1 to W4 with many clients."""
    softmax, sampled = models.softmax(intercept=True), 0.02
    linear = images(clients, 60, (784,), 10, softmax)
    yield {"workload": "W1", **rounds(linear, make("fedavg", steps=5, batch=20))}
    yield {"workload": "W2", **rounds(linear, make("fedavg", steps=5, batch=20, participation=sampled))}
    yield {"workload": "W4", **rounds(linear, make("ditto", steps=5, batch=20))}
    del linear
    network = images(clients, 40, (28, 28), 62, models.cnn(classes=62))
    yield {"workload": "W3", **rounds(network, make("fedavg", steps=10, batch=20, participation=sampled))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--clients", default="8,80", help="of ResNet-9; empty: leave it out")
    parser.add_argument("--stacked", type=int, default=10_000, help="clients of W1 to W4; 0: leave them out")
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []

    def note(line: dict[str, Any]) -> None:
        found.append(line)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}, flush=True)
        if arguments.json:
            arguments.json.write_text(
                json.dumps(
                    {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "lines": found},
                    indent=2,
                )
                + "\n"
            )

    if arguments.clients:
        work = flops()
        for clients in map(int, arguments.clients.split(",")):
            for line in gradients(clients, work):
                note(line)
        note({"workload": "ResNet-9 inside CoBo", **inside_cobo(work)})
    if arguments.stacked:
        for line in stacks(arguments.stacked):
            note(line)


if __name__ == "__main__":
    main()

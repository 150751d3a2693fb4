"""What the machine can do: products of matrices and copies, measured in the same run as the workloads."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch


def fastest(function: Callable[[], Any], repeats: int = 5, calls: int = 1) -> float:
    """The least seconds of one call."""
    function()
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, (time.perf_counter() - started) / calls)
    return best


def limits() -> dict[str, float]:
    """GFLOP/s of large products (all cores), GB/s of a large copy, and seconds of the least that W1 and W5 need."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    a = torch.rand(1536, 1536)
    b = torch.rand(1 << 25)
    c = torch.empty_like(b)
    found = {
        "gemm_gflops": 2 * 1536**3 / fastest(lambda: a @ a) / 1e9,
        "copy_gb_s": 2 * b.numel() * 4 / fastest(lambda: c.copy_(b)) / 1e9,
    }
    torch.set_num_threads(1)
    found |= {
        "W1_products_s": _softmax_products() / (os.cpu_count() or 1),
        "W5_product_s": _least_squares_product(),
    }
    torch.set_num_threads(before)
    return found


def _softmax_products(clients: int = 100, steps: int = 5, batch: int = 20, stack: int = 25) -> float:
    """One core: the two products of every gradient of W1 and nothing else, on stacks that fit in the cache."""
    w, x, r = torch.rand(stack, 10, 785), torch.rand(stack, batch, 785), torch.rand(stack, 10, batch)
    return steps * clients / stack * (fastest(lambda: w @ x.mT, 10, 5) + fastest(lambda: r @ x, 10, 5))


def _least_squares_product(clients: int = 400, d: int = 20) -> float:
    """One core: A w - b of all clients of W5, which half of its iterations need."""
    a, w = torch.rand(clients, d, d, dtype=torch.float64), torch.rand(clients, 1, d, dtype=torch.float64)
    return fastest(lambda: torch.baddbmm(w, w, a, beta=-1), 10, 50)


def shares(
    limit: dict[str, float], seconds: dict[str, float], coins: float = 0.4547
) -> dict[str, dict[str, float]]:
    """How much of the limit W1 and W5 reach: of large products, and of the products at their shapes."""
    result = {}
    if "W1" in seconds:
        flops = 100 * 5 * 2 * 2 * 10 * 20 * 785
        result["W1"] = {
            "of large products": flops / seconds["W1"] / 1e9 / limit["gemm_gflops"],
            "of the products at its shapes": limit["W1_products_s"] / seconds["W1"],
        }
    if "W5" in seconds:
        flops = 2 * 400 * 20 * 20 * (1 - coins)
        result["W5"] = {
            "of large products": flops / seconds["W5"] / 1e9 / limit["gemm_gflops"],
            "of the products at its shapes": (1 - coins) * limit["W5_product_s"] / seconds["W5"],
        }
    return result


def description() -> dict[str, Any]:
    return {
        "processor": _model_name(),
        "cores": os.cpu_count(),
        "load": load(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def load() -> float:
    """How many processes wanted the cores in the last minute: above their number, seconds mean little."""
    return os.getloadavg()[0]


def _model_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()

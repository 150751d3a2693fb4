"""Federations and crews for tests of sharded runtimes; workers import the network from this file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie import Federation, models
from coterie.algorithms import make
from coterie.engine.shard_worker import ShardWorker
from coterie.engine.worker_links import Crew, DirectLink

SIZES = (6, 9, 14, 7, 11, 20, 8)
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"lr": 0.05, "batch": 4, "steps": 3},
    "ditto": {"lr": 0.05, "batch": 4, "steps": 3},
    "cobo": {"lr": 0.05, "batch": 4},
}
MODELS = ("glm", "cnn", "resnet")
BUFFERS = {"cobo": "personal"}  # it takes gradients, for which running statistics cannot be averaged


class Residual(nn.Module):
    """Two convolutions with batch normalisation around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.first, self.second = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.second(self.two(functional.relu(self.first(self.one(x)))))
        return functional.relu(x + inside)


def resnet() -> nn.Module:
    """Return a small residual network with batch normalisation."""
    stem = (nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(*stem, Residual(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def federation(
    kind: str, sizes: tuple[int, ...] = SIZES, buffers: str = "averaged", **options: Any
) -> Federation:
    """Return clients with rows for a generalised linear model, or small images for networks."""
    generator = torch.Generator().manual_seed(3)
    shape = (5,) if kind == "glm" else (1, 8, 8)
    xs = [torch.randn(size, *shape, generator=generator) for size in sizes]
    ys = [torch.randint(3, (size,), generator=generator) for size in sizes]
    made = {
        "glm": lambda: models.softmax(classes=3),
        "cnn": lambda: models.cnn(channels=(4, 8), hidden=16, classes=3),
        "resnet": lambda: models.network(resnet, buffers=buffers),
    }
    usual = {"split": (0.6, 0.2, 0.2), "clusters": [k % 2 for k in range(len(sizes))]}
    return Federation.from_arrays(xs, ys, made[kind](), **{**usual, **options})


def crew(count: int, exact: bool = False) -> Crew:
    """Return workers of which all but the first see packed messages only."""
    return Crew(ShardWorker(make), [DirectLink(ShardWorker(make)) for _ in range(count - 1)], exact)


def gap(one: Tensor, other: Tensor) -> float:
    """Return how far one tensor is from another, relative to its size."""
    return float((one - other).double().norm() / one.double().norm().clamp(min=1e-300))

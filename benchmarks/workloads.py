"""The six workloads: arrays, federation and algorithm, and the file from which every driver reads the same arrays.

The file holds all rows, who is asked in each round, and which rows every step draws, as the engine draws them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie import Federation, models
from coterie._core import randomness
from coterie.algorithms import make
from coterie.algorithms.base import Algorithm
from coterie.algorithms.cobo import PRINTED
from coterie.data.generate import hierarchical_linear
from coterie.models.base import Model
from coterie.models.glm import Glm


@dataclass(frozen=True)
class Workload:
    """A federation, an algorithm, how many rounds are timed at once, and the module the peers train."""

    name: str
    title: str
    federation: Callable[[], Federation]
    algorithm: Callable[[Federation], Algorithm]
    rounds: int
    module: str

    def write(self, folder: Path) -> Path:
        """The file for the drivers."""
        path = folder / f"{self.name}.npz"
        fed = self.federation()
        algorithm = self.algorithm(fed)
        arrays = describe(fed, algorithm, self.rounds)
        meta = {"name": self.name, "module": self.module, "rounds": self.rounds, **algorithm.settings()}
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(path, meta=json.dumps(meta), **arrays)
        return path


def describe(fed: Federation, algorithm: Algorithm, rounds: int) -> dict[str, Any]:
    """Rows, cohorts and draws as arrays."""
    rows = fed.runtime.train
    table = isinstance(fed.model, Glm) and fed.model.intercept
    arrays = {
        "x": (rows.x[:, :-1] if table else rows.x).numpy(),
        "y": rows.y.numpy(),
        "start": rows.start.numpy(),
        "size": rows.size.numpy(),
        "initial": as_module(fed.model, fed.initial_model()).numpy(),
    }
    if algorithm.name in ("fedavg", "ditto"):
        share = algorithm.settings()["participation"]
        cohorts = [fed.everyone if share == 1 else fed.sample(t, share) for t in range(1, rounds + 1)]
        arrays["cohorts"] = torch.stack([ids for ids in cohorts if ids is not None]).numpy()
        arrays["draws"] = np.stack([_draws(fed, algorithm, t, ids) for t, ids in enumerate(cohorts, 1)])
    elif algorithm.name == "cobo":
        pairs = [
            torch.stack(algorithm.pairs(fed, t, None)[0])  # type: ignore[attr-defined]
            for t in range(1, rounds + 1)
        ]
        arrays["pairs"] = torch.cat(pairs, 1).numpy()
        arrays["pairs_until"] = np.cumsum([part.shape[1] for part in pairs])
    else:
        state = algorithm.start(fed)
        arrays |= {name: value.numpy() for name, value in state.tensors().items()}
        arrays["clusters"] = fed.known_clusters().numpy()
        coins = [algorithm.toss(fed, t, len(state.steps))[0] for t in range(1, rounds + 1)]  # type: ignore[attr-defined]
        arrays["coins"] = np.array(coins)
    return arrays


def _draws(fed: Federation, algorithm: Algorithm, t: int, ids: Tensor | None) -> np.ndarray:
    """Rows [clients, draws, batch] of a round, counted from the first of the client."""
    assert ids is not None
    greeted = t == 1 and algorithm.begin is not None
    keys = randomness.fold(randomness.key(fed.seed, "train", t, int(greeted)), ids)
    batch, size = algorithm.batch, fed.runtime.train.size[ids].unsqueeze(-1)
    streams = [randomness.fold(keys, "personal"), keys] if algorithm.name == "ditto" else [keys]
    drawn = []
    for step in range(1, algorithm.settings()["steps"] + 1):
        for stream in streams:
            row = randomness.integers(randomness.slots(randomness.fold(stream, step), batch), size)
            drawn.append(torch.where(size <= batch, torch.arange(batch) % size, row))
    return torch.stack(drawn, 1).numpy()


def as_module(model: Model, flat: Tensor) -> Tensor:
    """Parameters [..., d] in the order of an nn.Module: weights, then biases."""
    if not isinstance(model, Glm) or not model.intercept:
        return flat
    table = flat.unflatten(-1, (model.outputs, model.columns))
    return torch.cat([table[..., :-1].flatten(-2), table[..., -1]], -1)


def images(
    clients: int, low: int, high: int, shape: tuple[int, ...], classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Ragged clients with numbers of this shape per row and labels, float32."""
    sizes = low + randomness.integers(randomness.key(1, "size", torch.arange(clients)), high - low + 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(int(sizes.sum()), *shape, generator=generator)
    return x, torch.randint(0, classes, (len(x),), generator=generator), sizes


def ragged(
    model: Model, clients: int, shape: tuple[int, ...] = (784,), classes: int = 10, low: int = 20
) -> Federation:
    x, y, sizes = images(clients, low, 100, shape, classes)
    return Federation.from_rows(x, y, sizes, model=model, names=[str(k) for k in range(clients)])


def digits() -> Federation:
    """80 clients with 22 images of 8 x 8 digits each, ten groups that swap pairs of labels."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.tensor(bunch.data[:1760], dtype=torch.float32) / 16
    group = torch.arange(1760) // 22 % 10
    y = (torch.tensor(bunch.target[:1760]) + group) % 10
    names = [str(k) for k in range(80)]
    return Federation.from_rows(x, y, torch.full((80,), 22), model=models.mlp(hidden=(64,)), names=names)


def least_squares() -> Federation:
    """The hierarchical linear model: 20 clusters of 20 clients, 20 features, 100 rows each, float64."""
    clients = hierarchical_linear(clusters=20, clients=20, features=20, rows=100)
    return Federation.from_clients(clients, models.linear())


def _softmax() -> Model:
    return models.softmax(intercept=True)


def _averaging(**settings: Any) -> Callable[[Federation], Algorithm]:
    chosen = {"lr": 0.05, "steps": 5, "batch": 20, "weighting": "uniform", **settings}
    return lambda fed: make("fedavg", **chosen)


def _loopless(fed: Federation) -> Algorithm:
    from coterie.algorithms import AsyncL2GD

    return AsyncL2GD.from_theory(fed, gamma=1.0, lambda_=1.0, coins="one")


WORKLOADS = {
    work.name: work
    for work in (
        Workload(
            "W1",
            "FedAvg, softmax 784 to 10, 100 ragged clients, 5 steps of 20 rows",
            lambda: ragged(_softmax(), 100),
            _averaging(),
            10,
            "linear",
        ),
        Workload(
            "W2",
            "FedAvg as W1, 20 of 1,000 clients",
            lambda: ragged(_softmax(), 1000),
            _averaging(participation=0.02),
            50,
            "linear",
        ),
        Workload(
            "W3",
            "FedAvg, CNN 32-64-128 on 28 x 28, 62 classes, 20 of 200 clients, 10 steps of 20 rows",
            lambda: ragged(models.cnn(), 200, (28, 28), 62),
            _averaging(participation=0.1, steps=10),
            1,
            "cnn",
        ),
        Workload(
            "W4",
            "Ditto on the clients of W1",
            lambda: ragged(_softmax(), 100),
            lambda fed: make("ditto", lr=0.05, lam=0.5, steps=5, batch=20),
            10,
            "linear",
        ),
        Workload(
            "W5",
            "L2GD, least squares, 400 clients, d = 20, 100 rows, 50,000 iterations",
            least_squares,
            _loopless,
            50_000,
            "least squares",
        ),
        Workload(
            "W6",
            "CoBo, 80 clients, MLP 64-64-10 on 8 x 8 digits",
            digits,
            lambda fed: make("cobo", lr=0.1, rho=1.0, gamma=0.01, **PRINTED),
            40,
            "mlp",
        ),
    )
}

"""The modules that PyTorch peers train, and their parameters as one vector."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from common import Problem
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def build(problem: Problem) -> nn.Module:
    """The module with the workload's initial parameters."""
    module = {"linear": _linear, "cnn": _cnn, "mlp": _mlp}[problem.module]()
    load(module, torch.from_numpy(problem.initial))
    return module


def load(module: nn.Module, flat: Tensor) -> None:
    torch.nn.utils.vector_to_parameters(flat.clone(), module.parameters())


def flat(module: nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()


class Rows:
    """The rows of all clients, and the minibatches of a round in the order in which they are drawn."""

    def __init__(self, problem: Problem) -> None:
        x, y = torch.from_numpy(problem.x), torch.from_numpy(problem.y)
        self.of = [(x[problem.rows(k)], y[problem.rows(k)]) for k in range(len(problem.size))]
        self.draws = torch.from_numpy(problem.draws)
        self.place = [{int(k): at for at, k in enumerate(ids)} for ids in problem.cohorts]

    def batches(self, t: int, client: int, every: slice = slice(None)) -> Iterable[Any]:
        """Round t = 0, 1, ...; `every` takes some of the round's draws.

        A DataLoader, as the libraries and their examples have it, or with BENCH_READY one gather per minibatch.
        """
        drawn = self.draws[t, self.place[t][client]][every]
        if os.environ.get("BENCH_READY"):
            x, y = self.of[client]
            return ((x[rows], y[rows]) for rows in drawn)
        return DataLoader(TensorDataset(*self.of[client]), batch_sampler=drawn.tolist())


def _linear() -> nn.Module:
    return nn.Linear(784, 10)


def _cnn() -> nn.Module:
    body = [nn.Unflatten(1, (1, 28)), nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()]
    dense = [nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 62)]
    return nn.Sequential(*body, nn.MaxPool2d(2), nn.Flatten(), *dense)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

"""Ten methods on one data set, timed one after the other, for the drivers of libraries that have them all."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout

import torch
from common import Problem
from torch import nn

METHODS = (
    "fedavg",
    "fedprox",
    "scaffold",
    "feddyn",
    "ditto",
    "apfl",
    "fedper",
    "fedrep",
    "fedbabu",
    "lg-fedavg",
)


class Tensors(Problem):
    """The problem with its rows as tensors: x [clients, rows, features] and y, x_test and y_test."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        for name in ("x", "y", "x_test", "y_test"):
            setattr(self, name, torch.from_numpy(getattr(self, name)))

    @property
    def clients(self) -> int:
        return len(self.x)

    def layers(self) -> tuple[nn.Module, nn.Linear]:
        """Return a body and a head, with the same numbers for everybody."""
        torch.manual_seed(1)
        width = self.width
        return nn.Sequential(nn.Linear(self.x.shape[-1], width), nn.ReLU()), nn.Linear(width, self.classes)


def time_all(train: Callable[[Tensors, str, int], float]) -> None:
    """Print a line for every method: seconds by the clock and of the processor, and the mean test accuracy.

    `train` takes the problem, a method and a number of rounds, and returns the accuracy. Everything that it does
    counts: making clients, training, and one test at the end.
    """
    problem, told = Tensors(sys.argv[1]), sys.stdout
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
        for method in METHODS:
            try:
                train(problem, method, 2)  # what is done once in a process
                start, used = time.perf_counter(), time.process_time()
                accuracy = train(problem, method, problem.rounds)
                seconds, used = time.perf_counter() - start, time.process_time() - used
                line = {"method": method, "seconds": seconds, "cpu": used, "accuracy": accuracy}
            except Exception as problem_found:  # a library that fails at one method goes on with the next
                line = {"method": method, "why": f"{type(problem_found).__name__}: {problem_found}"}
            print(json.dumps(line), file=told, flush=True)

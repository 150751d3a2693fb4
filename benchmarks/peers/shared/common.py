"""What all drivers share: arrays from a file, commands from standard input, JSON on standard output.

Nothing here imports more than numpy, so that it runs in every peer's own environment.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


class Problem:
    """A workload as read from its file; settings and arrays are attributes."""

    def __init__(self, path: str) -> None:
        with np.load(path) as file:
            self.__dict__.update(json.loads(str(file["meta"])))
            self.__dict__.update({name: file[name] for name in file.files if name != "meta"})
        self.path = path

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.path} has no {name}")

    def rows(self, client: int) -> slice:
        return slice(int(self.start[client]), int(self.start[client] + self.size[client]))


class Clock:
    """Seconds of each round: `tick` ends one and begins the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start()

    def start(self) -> None:
        self.last, self.started, self.cpu = time.perf_counter(), _cpu(), 0.0

    def tick(self, rounds: int = 1) -> None:
        """End a round, or `rounds` of them that were not told apart."""
        now = time.perf_counter()
        self.seconds.append((now - self.last) / rounds)
        self.cpu = (_cpu() - self.started) / (len(self.seconds) * rounds)
        self.last = now


Run = Callable[[Clock], dict[str, Any]]
"""Trains from the initial model for all rounds of the file; gives the arrays it ends with."""


def serve(prepare: Callable[[Problem], Run], choose_threads: bool = True) -> None:
    """Answer `go` with the seconds of one training, and with its arrays in a file where a path is given."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is not an answer

    def say(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    run = prepare(Problem(sys.argv[1]))
    say(startup=time.time() - float(os.environ.get("BENCH_STARTED", time.time())))
    if choose_threads:
        _choose_threads(run)
    for line in sys.stdin:
        _, _, path = line.strip().partition(" ")
        clock = Clock()
        result = run(clock)
        say(seconds=clock.seconds, cpu=clock.cpu, peak_mb=_peak())
        if path:
            np.savez(Path(path), **result)
            say(saved=path)


def _choose_threads(run: Run) -> None:
    """One thread or all of them, whichever is faster."""
    import torch

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        clock = Clock()
        run(clock)
        return min(clock.seconds)

    counts = [1, os.cpu_count() or 1]
    seconds(1)
    torch.set_num_threads(min(counts, key=seconds))


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


def _peak() -> float:
    """MB at the most, processes that have ended included; what the parent used before exec is not."""
    with open("/proc/self/status") as status:
        own = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return (own + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / 1e3


def torchvision_without_cuda() -> None:
    """Let torchvision be imported beside a torch without CUDA; PyPI has it for CUDA only, and no operator is used."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    _kept.append(library)
    while True:
        try:
            import torchvision  # noqa: F401

            return
        except RuntimeError as problem:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(problem))
            if missing is None:
                raise
            library.define(f"{missing[1]}(Tensor input) -> Tensor")
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]


_kept: list[Any] = []

"""Drivers as processes that stay, asked in turn, so that all of them meet the same noise."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.environments import BENCH, Peer

TOLERANCE = 2e-4  # of the largest parameter: float32 sums in another order
PATIENCE = 600.0  # seconds for one answer


class Failed(Exception):
    """A driver that ended or said nothing; its last words."""


class Driver:
    """One peer on one workload."""

    def __init__(self, peer: Peer, file: Path) -> None:
        self.peer = peer
        self.log = tempfile.TemporaryFile("w+")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.endswith("NUM_THREADS")},
            "BENCH_STARTED": str(time.time()),
            "PYTHONPATH": os.pathsep.join(map(str, peer.path)),
            **({"BENCH_READY": "1"} if peer.ready else {}),
        }
        self.process = subprocess.Popen(
            [str(peer.python), "-P", str(peer.driver), str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
            cwd=BENCH,
        )
        self.startup = float(self._answer()["startup"])
        self.rounds: list[list[float]] = []
        self.cpu: list[float] = []
        self.peak_mb = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()  # type: ignore[union-attr]
        self.log.close()

    def go(self) -> None:
        """One training; its seconds are remembered."""
        self._say("go")
        answer = self._answer()
        self.rounds.append(answer["seconds"])
        self.cpu.append(answer["cpu"])
        self.peak_mb = answer["peak_mb"]

    def result(self) -> dict[str, np.ndarray]:
        """What a training ends with."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "result.npz"
            self._say(f"go {path}")
            self._answer()
            self._answer()
            with np.load(path) as file:
                return {name: file[name] for name in file.files}

    def _say(self, line: str) -> None:
        try:
            print(line, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise Failed(self._last_words()) from None

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            self.process.wait()
            raise Failed(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().splitlines() if line.strip()]
        return lines[-1][-300:] if lines else f"ended with {self.process.returncode}"


def difference(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Largest difference of the common arrays, relative to the largest number."""
    worst = 0.0
    for name in found.keys() & expected.keys():
        scale = max(float(np.abs(expected[name]).max()), 1e-12)
        worst = max(worst, float(np.abs(found[name] - expected[name]).max()) / scale)
    return worst if found.keys() & expected.keys() else float("nan")

"""Run cells in processes of their own, several at a time; one thread each, so that digits do not depend on how many."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from coterie._core.errors import RunError
from coterie.leaderboard.plan import Job

Watch = Callable[[str, int, int], None]  # what was done, cells done, cells in all
STDERR_LINES = 8
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class _Worker:
    """A process that runs cells one after the other."""

    def __init__(self, folder: Path, data_files: str | None) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "coterie.leaderboard", str(folder), data_files or ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **ONE_THREAD},
            text=True,
        )

    def run(self, job: Job) -> str | None:
        """Run a cell; return None, or why the process ended before it was done."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(job.json()) + "\n")
            self.process.stdin.flush()
        except OSError:  # a broken pipe, which Windows calls an invalid argument
            pass  # the answer below is missing then
        if self.process.stdout.readline():
            return None
        code = self.process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()[-STDERR_LINES:]
        return f"{job.title} (exit code {code}):\n  " + "\n  ".join(lines)

    def end(self) -> None:
        """End the process, in the middle of a cell too: an unfinished one leaves no file."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    continue


def carry_out(
    jobs: Sequence[Job],
    folder: Path,
    data_files: str | None = None,
    workers: int = 1,
    watch: Watch | None = None,
) -> None:
    """Run all cells and write a file for each.

    Parameters
    ----------
    jobs
        The cells.
    folder
        Folder of the leaderboard.
    data_files
        Folder of data files.
    workers
        Processes.
    watch
        Called after each cell.

    Raises
    ------
    RunError
        If processes ended before their cells were done; all other cells are.
    """
    waiting, lock = deque(jobs), threading.Lock()
    failures: list[str] = []
    running: list[_Worker] = []
    stopped = threading.Event()
    done = 0

    def serve() -> None:
        nonlocal done
        worker: _Worker | None = None
        while not stopped.is_set():
            with lock:
                if not waiting:
                    break
                job = waiting.popleft()
                if worker is None:
                    worker = _Worker(folder, data_files)
                    running.append(worker)
            problem = worker.run(job)
            with lock:
                done += 1
                if problem is not None and not stopped.is_set():
                    failures.append(problem)
                    worker = None
                if watch is not None:
                    watch(job.title, done, len(jobs))

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(min(workers, len(jobs)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stopped.set()
        for worker in running:
            worker.end()
    if failures:
        raise RunError(
            f"{len(failures)} of {len(jobs)} cells were not done; the same command tries them again:\n"
            + "\n".join(failures[:3])
        )

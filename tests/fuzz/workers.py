"""Share tables over processes, and notice those that die or never answer."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.fuzz.commands import SECONDS, Findings, Fuzzer

PATIENCE = 20 * SECONDS  # for one table; a command that computes in Python is stopped after `SECONDS`


class Progress(Findings):
    """Findings of all processes so far."""

    _shown = 0

    def add(self, part: Findings) -> None:
        """Add the findings of one table."""
        self.tables += part.tables
        self.counts += part.counts
        self.faults += part.faults

    def new_faults(self) -> list[str]:
        """Return the faults that were not returned before."""
        self._shown, before = len(self.faults), self._shown
        return self.faults[before:]


@dataclass
class Worker:
    """A process, the pipe to it, and the table that it has."""

    process: BaseProcess
    pipe: Connection
    number: int = -1
    since: float = 0.0

    def give(self, number: int) -> None:
        """Hand it a table."""
        self.number, self.since = number, time.monotonic()
        self.pipe.send(number)

    def end(self) -> None:
        """Stop the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def fuzz(
    first: int,
    tables: int,
    workers: int,
    processes: int,
    pages: bool,
    show: Callable[[Progress], None],
) -> Progress:
    """Try tables in several processes and return what went wrong.

    Parameters
    ----------
    first, tables
        Number of the first table, and how many.
    workers
        Processes side by side.
    processes
        Every so many tables each command gets a process of its own; 0 for never.
    pages
        Write the page beside every run.
    show
        Called after every table.
    """
    found, numbers = Progress(), iter(range(first, first + tables))
    field = [_start(processes, pages) for _ in range(min(workers, tables))]
    idle = [worker for worker in field if not _give_next(worker, numbers)]
    busy = [worker for worker in field if worker not in idle]
    while busy:
        ready = multiprocessing.connection.wait([worker.pipe for worker in busy], timeout=5)
        for worker in list(busy):
            if worker.pipe in ready:
                part = _answer(worker)
            elif time.monotonic() - worker.since > PATIENCE:
                part = Findings(1, faults=[f"table {worker.number}: no answer in {PATIENCE} s"])
            else:
                continue
            found.add(part)
            show(found)
            busy.remove(worker)
            if worker.pipe not in ready or not worker.process.is_alive():
                worker.end()
                worker = _start(processes, pages)
            if _give_next(worker, numbers):
                busy.append(worker)
            else:
                worker.end()
    return found


def _answer(worker: Worker) -> Findings:
    try:
        part: Findings = worker.pipe.recv()
    except EOFError:
        worker.process.join()
        return Findings(1, faults=[f"table {worker.number}: the process died ({worker.process.exitcode})"])
    return part


def _give_next(worker: Worker, numbers: Iterator[int]) -> bool:
    number = next(numbers, None)
    if number is not None:
        worker.give(number)
    return number is not None


def _start(processes: int, pages: bool) -> Worker:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, processes, pages), daemon=True)
    process.start()
    there.close()
    return Worker(process, here)


def _work(pipe: Connection, processes: int, pages: bool) -> None:
    """Try the tables whose numbers come through the pipe."""
    import torch

    import coterie.cli.training

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not pages:
        coterie.cli.training.report_beside = lambda *_: None
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # commands may write into the current folder
        place = Path(folder) / "fuzz"
        place.mkdir()
        while True:
            try:
                number = pipe.recv()
            except EOFError:
                return
            fuzzer = Fuzzer(place)
            fuzzer.try_table(number, processes=bool(processes) and number % processes == 7)
            pipe.send(fuzzer.found)

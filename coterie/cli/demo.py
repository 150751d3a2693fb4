"""The command `demo`: two tables, one where collaborating pays and one where it does not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from coterie.cli import console
from coterie.data import bundled
from coterie.report.comparison_tables import comparison_tables
from coterie.report.page import write_report
from coterie.select.compare import compare
from coterie.train.folder import RunFolder

ROUNDS, BUDGET = 50, 4


class Example(NamedTuple):
    """A bundled table, the roles of its columns, folds of its rows, and what it is, in words."""

    table: str
    client: str
    target: str
    folds: int
    words: str


EXAMPLES = (
    Example(
        "clinics", "clinic", "readmitted", 3, "40 small clinics: who will be readmitted? (generated data)"
    ),
    Example("heart_disease", "hospital", "sick", 1, "4 hospitals: who has heart disease? (UCI, real data)"),
)


def demo(
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder for results; runs/demo-… if not given")
    ] = None,
    only: Annotated[str, typer.Option(hidden=True)] = "",
    rounds: Annotated[int, typer.Option(hidden=True)] = ROUNDS,
    budget: Annotated[int, typer.Option(hidden=True)] = BUDGET,
) -> None:
    """Let methods compete on two bundled tables: small clinics gain much from each other, large hospitals little."""
    place = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S") if out is None else out
    if only:
        _show(next(example for example in EXAMPLES if example.table == only), place, rounds, budget)
        return
    RunFolder.require_free(place)
    first, *others = EXAMPLES
    alone = (os.cpu_count() or 1) == 1
    if not alone:  # the tables share the cores
        torch.set_num_threads(max(1, torch.get_num_threads() // len(EXAMPLES)))
    with ExitStack() as stack:
        beside = [] if alone else [stack.enter_context(_beside(one, place, rounds, budget)) for one in others]
        _show(first, place, rounds, budget)
        for example in others if alone else ():
            _show(example, place, rounds, budget)
        for process in beside:
            shown, said = process.communicate()
            sys.stderr.write(said)
            sys.stdout.write(shown)
            if process.returncode:
                raise typer.Exit(process.returncode)


def _show(example: Example, place: Path, rounds: int, budget: int) -> None:
    """Compare on one table; print the results and write the report."""
    folder = place / example.table
    RunFolder.require_free(folder)
    with console.progress() as watch:
        found = compare(
            bundled.path(example.table),
            example.client,
            example.target,
            algorithms=["auto"],
            seeds=1,
            rounds=rounds,
            folds=example.folds,
            budget=budget,
            refit="none",
            out=folder,
            watch=watch,
        )
    table = comparison_tables(found, console.width())[0]
    table.caption = None
    page = write_report([folder])
    console.show("", example.words, table, found.verdict(), f"Report: {page}")


@contextmanager
def _beside(example: Example, place: Path, rounds: int, budget: int) -> Iterator[subprocess.Popen[str]]:
    """Start a process of the same command for one table, which ends with the block."""
    command = [sys.executable, "-m", "coterie", "demo", "--out", str(place), "--only", example.table]
    command += ["--rounds", str(rounds), "--budget", str(budget)]
    environment = {**os.environ, "COLUMNS": str(console.width()), "PYTHONIOENCODING": "utf-8"}
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()

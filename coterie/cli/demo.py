"""The command `demo`: two tables, one where collaborating pays and one where it does not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, NamedTuple

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
) -> None:
    """Let methods compete on two bundled tables: small clinics gain much from each other, large hospitals little."""
    place = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S") if out is None else out
    RunFolder.require_free(place)
    for example in EXAMPLES:
        folder = place / example.table
        with console.progress() as watch:
            found = compare(
                bundled.path(example.table),
                example.client,
                example.target,
                algorithms=["auto"],
                seeds=1,
                rounds=ROUNDS,
                folds=example.folds,
                budget=BUDGET,
                out=folder,
                watch=watch,
            )
        table = comparison_tables(found, console.width())[0]
        table.caption = None
        page = write_report([folder])
        console.show("", example.words, table, found.verdict(), f"Report: {page}")

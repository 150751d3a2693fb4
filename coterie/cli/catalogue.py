"""Commands that say what there is: the methods, and the experiments of the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.arguments import (
    JsonOption,
    require_place,
    write_json,
)
from coterie.report import console


def algorithms(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="one method, with its hyperparameters")
    ] = None,
    json: JsonOption = None,
) -> None:
    """List the methods, or explain one."""
    from coterie.algorithms import all_algorithms, find
    from coterie.report.tables import algorithm_page, algorithms_table, describe_algorithm

    require_place(json)
    if name is None:
        known = list(all_algorithms().values())
        console.show(algorithms_table(known))
        write_json(json, [describe_algorithm(cls) for cls in known])
    else:
        console.show(*algorithm_page(find(name)))
        write_json(json, describe_algorithm(find(name)))


def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="experiment; without it, what exists is listed")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a small version: fewer seeds and rounds")] = False,
    check: Annotated[bool, typer.Option("--check", help="exit with 1 if a row is not ok")] = False,
    json: JsonOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder for table, plot and settings")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="runs at a time; the number of cores if not given")
    ] = None,
) -> None:
    """Repeat an experiment of the papers and show its numbers beside ours."""
    from coterie.report.tables import experiments_table
    from coterie.runs import experiments

    if name is None:
        console.show(experiments_table(experiments.experiments()))
        return
    with console.progress() as watch:
        result = experiments.reproduce(name, quick=quick, out=out, jobs=jobs, watch=watch)
    console.show(result.table())
    write_json(json, result.json())
    if check and not result.ok:
        raise typer.Exit(1)

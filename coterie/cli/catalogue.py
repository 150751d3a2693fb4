"""Commands that list and explain the methods, and reproduce the experiments of the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.algorithms import all_algorithms, find
from coterie.cli import console
from coterie.cli.arguments import (
    JsonOption,
    require_place,
    write_json,
)
from coterie.experiments import spec
from coterie.experiments.reproduce import reproduce as run_experiment
from coterie.report.catalogue_tables import (
    algorithm_page,
    algorithms_table,
    describe_algorithm,
    experiments_table,
)


def algorithms(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="method to explain; all are listed if not given")
    ] = None,
    json: JsonOption = None,
) -> None:
    """List the methods, or explain one and its hyperparameters."""
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
        str | None, typer.Argument(metavar="NAME", help="experiment to run; all are listed if not given")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="run a small version: fewer seeds and rounds")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="exit with code 1 if a row is not ok")] = False,
    json: JsonOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="folder for table, plots and settings; results/NAME if not given"
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="jobs run in parallel; the number of cores if not given"),
    ] = None,
) -> None:
    """Reproduce an experiment of a paper and show its numbers beside ours."""
    if name is None:
        console.show(experiments_table(spec.experiments()))
        return
    with console.progress() as watch:
        result = run_experiment(name, quick=quick, out=out, jobs=jobs, watch=watch)
    console.show(result.table())
    write_json(json, result.json())
    if check and not result.ok:
        raise typer.Exit(1)

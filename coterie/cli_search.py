"""The command that searches for settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli_arguments import (
    ClientOption,
    ClusterOption,
    DropOption,
    JsonOption,
    RoundsOption,
    TableArgument,
    TargetOption,
    TaskOption,
    assignments,
    find_table,
    require_place,
    write_json,
)
from coterie.report import console


def register(app: typer.Typer) -> None:
    """Add the command of this file to the `coterie` command."""
    app.command(
        epilog="Example: coterie tune heart_disease --client hospital --target sick --algorithm ditto --out tuning"
    )(tune)


def tune(
    table: TableArgument,
    client: ClientOption,
    target: TargetOption,
    algorithm: Annotated[str, typer.Option(metavar="NAME", help="method whose settings are searched")],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="folder for the study; a search that is there goes on")
    ],
    trials: Annotated[int, typer.Option(min=1, metavar="N", help="settings tried in all")] = 30,
    rounds: RoundsOption = 100,
    sampler: Annotated[
        str, typer.Option(metavar="NAME", help="tpe (between declared values) or grid")
    ] = "tpe",
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="trials at the same time, in processes")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="hyperparameter that is not searched, such as steps=1"
        ),
    ] = None,
    cluster: ClusterOption = None,
    task: TaskOption = None,
    drop: DropOption = None,
    seed: Annotated[int, typer.Option(metavar="N", help="decides the split and every draw")] = 0,
    json: JsonOption = None,
) -> None:
    """Search a method's settings on validation rows with Optuna: pruned, resumable, in parallel.

    Test rows are not read. The last line is the command that trains with what was found.
    """
    from coterie.algorithms import make
    from coterie.report.tables import search_table as as_table
    from coterie.runs.search import search_table

    require_place(json)
    method = make(algorithm, **assignments(settings or []))
    source = find_table(table)
    data = {
        "source": source,
        "client": client,
        "target": target,
        "cluster": cluster,
        "task": task,
        "drop": tuple(drop or ()),
        "seed": seed,
    }
    with console.progress() as watch:
        found = search_table(
            out, method, data, trials=trials, rounds=rounds, sampler=sampler, jobs=jobs, watch=watch
        )
    console.show(as_table(found))
    usual = make(algorithm).settings()
    changed = {name: value for name, value in found.algorithm.settings().items() if value != usual[name]}
    options = " ".join(f"--set {name}={value}" for name, value in changed.items())
    console.show(
        f"coterie fit {table} --client {client} --target {target} --algorithm {algorithm} "
        f"{options} --rounds {rounds} --select best --seed {seed} --out RUN"
    )
    write_json(json, found.json())

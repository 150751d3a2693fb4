"""Commands for before training: which method to use, and what a communication budget allows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli import console
from coterie.cli.arguments import (
    ClientOption,
    DropOption,
    JsonOption,
    KeepOption,
    L2Option,
    SeedOption,
    TableArgument,
    TargetOption,
    TaskOption,
    find_table,
    require_place,
    write_json,
)
from coterie.engine.federation import Federation
from coterie.report.advice import advice_tables
from coterie.report.budget import plan_plot, plan_tables
from coterie.report.plots import save_plot
from coterie.select import plan as plans
from coterie.select.advise import advise as give_advice


def advise(
    table: TableArgument,
    client: ClientOption,
    target: TargetOption,
    task: TaskOption = None,
    drop: DropOption = None,
    keep: KeepOption = None,
    seed: SeedOption = 0,
    probe: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="rounds of a short training run that checks the advice; 0 skips it"
        ),
    ] = 30,
    json: JsonOption = None,
) -> None:
    """Recommend a method and a penalty before training, from local statistics and a few federated sums."""
    require_place(json)
    fed = Federation.from_table(
        find_table(table), client, target, task=task, drop=drop or (), keep=keep or (), seed=seed
    )
    console.notes(fed.table.warnings)
    advice = give_advice(fed, probe)
    console.show(*advice_tables(advice))
    write_json(json, advice.json())


def plan(
    table: TableArgument,
    client: ClientOption,
    target: TargetOption,
    accuracy: Annotated[float, typer.Option(metavar="X", help="wanted gap to the loss of the best mixture")],
    rounds: Annotated[int | None, typer.Option(metavar="N", help="budget of communication rounds")] = None,
    budget_mb: Annotated[
        float | None,
        typer.Option("--budget-mb", metavar="MB", help="budget of megabytes, up and down together"),
    ] = None,
    solver: Annotated[str, typer.Option(metavar="NAME", help="dgd, diana, ef21 or scaffnew")] = "dgd",
    compressor: Annotated[
        str, typer.Option(metavar="NAME", help="compressor for diana, such as rand-3, or ef21, such as top-3")
    ] = "identity",
    l2: L2Option = 0.1,
    task: TaskOption = None,
    drop: DropOption = None,
    keep: KeepOption = None,
    seed: SeedOption = 0,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="write a web page with the theoretical bound and the measured curve"
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Plan FLIX for a communication budget: how personal models must be, and how many rounds they take."""
    for place in (json, plot):
        require_place(place)
    fed = Federation.from_table(
        find_table(table), client, target, task=task, drop=drop or (), keep=keep or (), seed=seed, l2=l2
    )
    console.notes(fed.table.warnings)
    chosen = plans.plan(fed, accuracy, rounds=rounds, megabytes=budget_mb, solver=solver, encoding=compressor)
    console.show(*plan_tables(chosen, l2))
    write_json(json, chosen.json())
    if plot is not None:
        save_plot(plot, plan_plot(chosen, *plans.measure(fed, chosen, max(chosen.rounds, 2))))

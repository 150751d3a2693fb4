"""Commands for before training: what is in the table, which method, and what a budget allows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.arguments import (
    ClientOption,
    ClusterOption,
    DropOption,
    JsonOption,
    L2Option,
    SeedOption,
    TableArgument,
    TargetOption,
    TaskOption,
    find_table,
    require_place,
    write_json,
)
from coterie.report import console


def describe(
    table: TableArgument,
    client: ClientOption,
    target: TargetOption,
    cluster: ClusterOption = None,
    task: TaskOption = None,
    drop: DropOption = None,
    json: JsonOption = None,
) -> None:
    """Clients, columns, missing values and what will be predicted."""
    from coterie.data import tables
    from coterie.report.tables import description_tables

    require_place(json)
    source = find_table(table)
    frame = tables.read(source)
    spec = tables.check(
        frame, client, target, cluster=cluster, drop=drop or (), task=task, source=str(source)
    )
    description = tables.describe(frame, spec)
    console.notes(spec.warnings)
    console.show(*description_tables(description))
    write_json(json, description)


def advise(
    table: TableArgument,
    client: ClientOption,
    target: TargetOption,
    task: TaskOption = None,
    drop: DropOption = None,
    seed: SeedOption = 0,
    probe: Annotated[
        int, typer.Option(min=0, metavar="N", help="rounds of a probe for classes; 0 leaves it out")
    ] = 30,
    json: JsonOption = None,
) -> None:
    """Which method, and how much pull towards the others? From local statistics and a few federated sums."""
    from coterie.data.load import load_table
    from coterie.report.advice import advice_tables
    from coterie.theory.advisor import advise as give_advice

    require_place(json)
    fed = load_table(find_table(table), client, target, task=task, drop=drop or (), seed=seed)
    console.notes(fed.table.warnings)
    advice = give_advice(fed, probe)
    console.show(*advice_tables(advice))
    write_json(json, advice.json())


def plan(
    table: TableArgument,
    client: ClientOption,
    target: TargetOption,
    accuracy: Annotated[
        float, typer.Option(metavar="X", help="wanted distance from the best mixture's loss")
    ],
    rounds: Annotated[int | None, typer.Option(metavar="N", help="budget in communication rounds")] = None,
    budget_mb: Annotated[
        float | None,
        typer.Option("--budget-mb", metavar="MB", help="budget in megabytes, up and down together"),
    ] = None,
    solver: Annotated[str, typer.Option(metavar="NAME", help="dgd or diana")] = "dgd",
    compressor: Annotated[str, typer.Option(metavar="NAME", help="for diana, such as rand-3")] = "identity",
    l2: L2Option = 0.1,
    task: TaskOption = None,
    drop: DropOption = None,
    seed: SeedOption = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="web page with theory's bound and the measured curve")
    ] = None,
    json: JsonOption = None,
) -> None:
    """How personal must models be for a communication budget? The alpha, rounds and certificates of FLIX."""
    from coterie.data.load import load_table
    from coterie.report.budget import plan_plot, plan_tables
    from coterie.report.plots import save_plot
    from coterie.runs import plan as plans

    for place in (json, plot):
        require_place(place)
    fed = load_table(find_table(table), client, target, task=task, drop=drop or (), seed=seed, l2=l2)
    console.notes(fed.table.warnings)
    chosen = plans.plan(fed, accuracy, rounds=rounds, megabytes=budget_mb, solver=solver, encoding=compressor)
    console.show(*plan_tables(chosen, l2))
    write_json(json, chosen.json())
    if plot is not None:
        save_plot(plot, plan_plot(chosen, *plans.measure(fed, chosen, max(chosen.rounds, 2))))

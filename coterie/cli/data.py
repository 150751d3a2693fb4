"""Look at a table before training, and list data sets that are ready to use."""

from __future__ import annotations

from typing import Annotated

import typer

from coterie.cli import console
from coterie.cli.arguments import (
    ClientOption,
    ClusterOption,
    DropOption,
    EventOption,
    JsonOption,
    KeepOption,
    TableArgument,
    TargetOption,
    TaskOption,
    find_table,
    grouping_columns,
    require_place,
    write_json,
)
from coterie.data import recipes as known_recipes
from coterie.data import tables
from coterie.data.describe import describe as describe_table
from coterie.report.catalogue_tables import description_tables, recipe_card, recipes_table

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Look at a table before training.",
    epilog="Example: coterie data describe heart_disease --client hospital --target sick",
)


@app.callback()
def data() -> None:
    """Look at a table before training."""


@app.command(epilog="Example: coterie data describe heart_disease --client hospital --target sick")
def describe(
    table: TableArgument,
    client: ClientOption,
    target: TargetOption,
    event: EventOption = None,
    cluster: ClusterOption = None,
    task: TaskOption = None,
    drop: DropOption = None,
    keep: KeepOption = None,
    json: JsonOption = None,
) -> None:
    """Show clients, columns, missing values and the target of a table."""
    require_place(json)
    source = find_table(table)
    frame = tables.read(source)
    spec = tables.check(
        frame,
        client,
        target,
        cluster=grouping_columns(cluster),
        drop=drop or (),
        keep=keep or (),
        task=task,
        source=str(source),
        event=event,
    )
    description = describe_table(frame, spec)
    console.notes(spec.warnings)
    console.show(*description_tables(description))
    write_json(json, description)


@app.command(epilog="Example: coterie data recipes digits-rotated")
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="data set to describe; all are listed if not given")
    ] = None,
) -> None:
    """List the data sets that are ready to use, or show the card of one."""
    if name is None:
        console.show(recipes_table(list(known_recipes.all_recipes().values())))
    else:
        console.show(recipe_card(known_recipes.find(name)))

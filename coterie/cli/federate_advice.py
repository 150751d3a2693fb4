"""Recommend a method to clients whose rows are on nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie._core.errors import SettingError
from coterie.cli.arguments import (
    DeltaOption,
    EpsilonOption,
    JsonOption,
    L2Option,
    SeedOption,
    privacy_of,
    require_place,
)
from coterie.cli.federate_follow import follow
from coterie.deploy import federation_folder
from coterie.select.survey import Survey
from coterie.train.private import as_plan


def advise(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder written by `federate init`")],
    name: Annotated[str | None, typer.Option(metavar="NAME", help="name of the folder in runs/")] = None,
    seed: SeedOption = 0,
    l2: L2Option = None,
    deadline: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="time limit for a node to answer a call")
    ] = 60.0,
    wait: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="time limit for nodes to appear at the start")
    ] = 60.0,
    secure: Annotated[
        bool, typer.Option("--secure", help="secure aggregation: the server learns sums over clients only")
    ] = False,
    epsilon: EpsilonOption = None,
    delta: DeltaOption = 1e-5,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="run without TLS, on 127.0.0.1 only; keys are still checked")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Recommend a method and a penalty to the clients of nodes; each node gets its clients' own advice."""
    require_place(json)
    opened = federation_folder.FederationFolder.open(folder)
    if opened.kind != "table":
        raise SettingError(f"advice on nodes is for tables; these nodes have {opened.kind}")
    privacy = privacy_of(epsilon, delta, "row")
    job = federation_folder.start(
        opened,
        Survey(),
        name,
        {"rounds": 0, **as_plan(privacy)},
        insecure,
        seed=seed,
        l2=l2,
        deadline=deadline,
        patience=wait,
        secure=secure,
    )
    follow(folder, job, json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: coterie federate advise hearts --secure")(advise)

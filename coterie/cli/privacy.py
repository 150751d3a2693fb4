"""The command that shows what privacy costs in accuracy."""

from __future__ import annotations

from typing import Annotated

import typer

from coterie._core.errors import SettingError
from coterie.cli import console
from coterie.cli.arguments import (
    ClientOption,
    ClusterOption,
    DeltaOption,
    DropOption,
    JsonOption,
    RoundsOption,
    TableArgument,
    TargetOption,
    TaskOption,
    find_table,
    grouping_columns,
    require_place,
    write_json,
)
from coterie.engine.federation import Federation
from coterie.engine.privacy import Privacy
from coterie.report.tables import privacy_table
from coterie.select.privacy_curve import privacy_curve


def privacy(
    table: TableArgument,
    client: ClientOption,
    target: TargetOption,
    algorithms: Annotated[
        str, typer.Option(metavar="NAMES", help="methods to train, with commas")
    ] = "fedavg,ditto",
    epsilons: Annotated[
        str, typer.Option(metavar="NUMBERS", help="prices to train at, with commas")
    ] = "1,2,4,8",
    delta: DeltaOption = 1e-5,
    unit: Annotated[
        str, typer.Option(metavar="WHAT", help="what is protected: a 'row', or a 'client' with all its rows")
    ] = "row",
    cluster: ClusterOption = None,
    task: TaskOption = None,
    rounds: RoundsOption = 50,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="splits and repetitions")] = 3,
    drop: DropOption = None,
    json: JsonOption = None,
) -> None:
    """Show what differential privacy costs in accuracy: methods trained at several values of epsilon."""
    require_place(json)
    try:
        prices = [float(part) for part in epsilons.split(",") if part.strip()]
    except ValueError:
        raise SettingError(f"--epsilons {epsilons!r}: give numbers with commas, such as 1,2,4") from None
    source = find_table(table)

    def federation(seed: int, budget: Privacy | None) -> Federation:
        return Federation.from_table(
            source,
            client,
            target,
            cluster=grouping_columns(cluster),
            task=task,
            drop=drop or (),
            seed=seed,
            privacy=budget,
        )

    with console.progress() as watch:
        curve = privacy_curve(
            federation,
            [name.strip() for name in algorithms.split(",") if name.strip()],
            prices,
            delta=delta,
            unit=unit,
            rounds=rounds,
            seeds=seeds,
            watch=watch,
        )
    console.show(privacy_table(curve))
    write_json(json, curve.json())

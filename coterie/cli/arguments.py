"""Arguments and options that several commands share, and checks of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie._core import files
from coterie._core.errors import DataError, SettingError, nearest
from coterie.data import bundled
from coterie.engine.privacy import Privacy

TableArgument = Annotated[
    str,
    typer.Argument(
        metavar="TABLE",
        help="CSV file (plain or compressed), Parquet file, or bundled table such as heart_disease",
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="run folder written by `coterie fit`")]
ClientOption = Annotated[str, typer.Option(metavar="COLUMN", help="column with the client of each row")]
TargetOption = Annotated[str, typer.Option(metavar="COLUMN", help="column to predict")]
ClusterOption = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="column with the known cluster of the client")
]
TaskOption = Annotated[
    str | None,
    typer.Option(metavar="TASK", help="classification or regression; inferred from the target if not given"),
]
DropOption = Annotated[
    list[str] | None, typer.Option(metavar="COLUMN", help="column to ignore (may be repeated)")
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="also write the result to this file")
]
L2Option = Annotated[
    float | None,
    typer.Option("--l2", min=0, metavar="X", help="ridge penalty; the model then has no intercept"),
]
SeedOption = Annotated[int, typer.Option(metavar="N", help="seed of the split and of every random draw")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="hyperparameter, such as lam=0.3 (may be repeated)"),
]
StateMemoryOption = Annotated[
    float | None,
    typer.Option(
        "--state-memory",
        min=0,
        metavar="MB",
        help="memory for client state; the rest is kept on disk",
    ),
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        "--metric", metavar="NAME", help="what validation rows choose by and tables show, such as auc or mae"
    ),
]
AggregateOption = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="how answers are averaged: mean, clip, median, trimmed, geometric-median; limits cap and screen",
    ),
]
EpsilonOption = Annotated[
    float | None,
    typer.Option(metavar="X", help="differential privacy: noise so that the whole run costs at most this"),
]
DeltaOption = Annotated[
    float, typer.Option(metavar="X", help="differential privacy: probability left out of the guarantee")
]
UnitOption = Annotated[
    str,
    typer.Option(metavar="WHAT", help="what --epsilon protects: a 'client' with all its rows, or a 'row'"),
]
RoundsOption = Annotated[int, typer.Option(min=1, metavar="N", help="communication rounds")]


def privacy_of(epsilon: float | None, delta: float, unit: str) -> Privacy | None:
    """Return what a run may cost, or None without --epsilon."""
    return None if epsilon is None else Privacy(epsilon, delta, unit)


def find_table(table: str) -> str | Path:
    """Return the path of a table: the file itself, or the bundled table of that name."""
    path = Path(table)
    if path.exists() or path.suffix:
        return table
    if table in bundled.names():
        return bundled.path(table)
    raise DataError(f"{table}: no such file or bundled table.{nearest(table, bundled.names())}")


def require_place(path: Path | None, other_than: str | Path = "") -> None:
    """Raise SettingError, before any work is done, if an output file cannot be written or is the input."""
    if path is None:
        return
    if path.is_dir():
        raise SettingError(f"{path} is a folder; name a file to write")
    if path.exists() and other_than and path.samefile(other_than):
        raise SettingError(f"{path} is the table itself; name another file to write")
    files.require_writable(path)


def assignments(pairs: list[str]) -> dict[str, str]:
    """Parse the values of `--set`, each of the form name=value."""
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise SettingError(f"--set {pair!r}: write name=value, for example --set lr=0.1")
        if name in values:
            raise SettingError(f"--set {pair!r}: {name} is set twice; set it once")
        values[name] = value
    return values


def write_json(path: Path | None, value: Any) -> None:
    """Write a value as JSON, if there is a path."""
    if path is not None:
        files.write_json(path, value)

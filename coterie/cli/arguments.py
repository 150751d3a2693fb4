"""What the commands take: arguments and options that several of them share, and their first checks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.errors import DataError, SettingError, nearest

TableArgument = Annotated[
    str,
    typer.Argument(
        metavar="TABLE", help="CSV (plain or compressed), Parquet, or a bundled set such as heart_disease"
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="run folder that `coterie fit` made")]
ClientOption = Annotated[str, typer.Option(metavar="COLUMN", help="column that names the client of a row")]
TargetOption = Annotated[str, typer.Option(metavar="COLUMN", help="column to predict")]
ClusterOption = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="column that names the client's known cluster")
]
TaskOption = Annotated[
    str | None,
    typer.Option(metavar="TASK", help="classification or regression; guessed from the target if not given"),
]
DropOption = Annotated[
    list[str] | None, typer.Option(metavar="COLUMN", help="column to leave out (may be repeated)")
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="also write the result to this file")
]
L2Option = Annotated[
    float | None,
    typer.Option(
        "--l2", min=0, metavar="X", help="ridge of this strength instead of the usual model; no intercept"
    ),
]
SeedOption = Annotated[int, typer.Option(metavar="N", help="decides the split and every draw")]
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
        help="what clients keep beyond this lies on disk",
    ),
]
RoundsOption = Annotated[int, typer.Option(min=1, metavar="N", help="communication rounds")]


def find_table(table: str) -> str | Path:
    """A path, or the bundled table of that name."""
    from coterie.data import bundled

    path = Path(table)
    if path.exists() or path.suffix:
        return table
    if table in bundled.names():
        return bundled.path(table)
    raise DataError(f"{table}: no such file or bundled table.{nearest(table, bundled.names())}")


def require_place(path: Path | None, other_than: str | Path = "") -> None:
    """Refuse, before any work is done, an output file that cannot be written or is the input."""
    from coterie.runs import files

    if path is None:
        return
    if path.is_dir():
        raise SettingError(f"{path} is a folder; name a file to write")
    if path.exists() and other_than and path.samefile(other_than):
        raise SettingError(f"{path} is the table itself; name another file to write")
    files.require_writable(path)


def assignments(pairs: list[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise SettingError(f"--set {pair!r}: write name=value, for example --set lr=0.1")
        if name in values:
            raise SettingError(f"--set {pair!r}: {name} was set before; set it once")
        values[name] = value
    return values


def write_json(path: Path | None, value: Any) -> None:
    if path is not None:
        from coterie.runs import files

        files.write_json(path, value)

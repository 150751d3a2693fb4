"""Arguments and options that several commands share, and checks of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie._core import files
from coterie._core.errors import DataError, SettingError, nearest
from coterie.data import bundled
from coterie.engine.late import Lateness
from coterie.engine.privacy import Privacy
from coterie.models.table_models import TABLE_MODELS

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
EventOption = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="survival: --target is a time, and this says whether the event happened then (1, yes) or not (0, no)",
    ),
]
TimeOption = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="date or number that orders rows: the earliest train, later validate, the latest test",
    ),
]
ClusterOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN",
        help="column with the known cluster of the client; several are grouping columns of rows, and A:B pairs two",
    ),
]
TaskOption = Annotated[
    str | None,
    typer.Option(metavar="TASK", help="classification or regression; inferred from the target if not given"),
]
DropOption = Annotated[
    list[str] | None, typer.Option(metavar="COLUMN", help="column to ignore (may be repeated)")
]
KeepOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN", help="column to use although it looks like an identifier (may be repeated)"
    ),
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
WorkersOption = Annotated[
    str | None,
    typer.Option(
        "--workers",
        metavar="N",
        help="share the clients over N processes, or those of torchrun, slurm or ray:N",
    ),
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        "--metric", metavar="NAME", help="what validation rows choose by and tables show, such as auc or mae"
    ),
]
ModelOption = Annotated[
    str, typer.Option("--model", metavar="NAME", help=f"what every client trains: {', '.join(TABLE_MODELS)}")
]
ClassWeightsOption = Annotated[
    str | None,
    typer.Option(
        "--class-weights",
        metavar="WEIGHTS",
        help="of rows in training: balanced (rare classes count for more), or numbers such as yes=5,no=1",
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option("--device", metavar="NAME", help="where to compute: cpu, cuda, or auto for a GPU if any"),
]
SplitOption = Annotated[
    str,
    typer.Option(
        "--split", metavar="A,B,C", help="shares of training, validation and test rows, such as 0.6,0.2,0.2"
    ),
]
FoldsOption = Annotated[
    int | None,
    typer.Option(
        "--folds",
        metavar="K",
        help="test every row once, in K folds; 1: one split. By default 5 where clients have few rows",
    ),
]
RefitOption = Annotated[
    str,
    typer.Option(
        "--refit",
        metavar="ROWS",
        help="after choosing, train again on 'validation' (with training rows; the default) or 'all' rows, or 'none'",
    ),
]
AggregateOption = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="how answers are averaged: mean, clip, median, trimmed, geometric-median; limits cap and screen",
    ),
]
BufferOption = Annotated[
    int | None,
    typer.Option(
        "--buffer", min=0, metavar="K", help="answers that end a round; the others are used in later ones"
    ),
]
StalenessOption = Annotated[
    int | None,
    typer.Option(
        "--staleness", min=0, metavar="ROUNDS", help="oldest answer that is used in a later round (10)"
    ),
]
DelaysOption = Annotated[
    str | None,
    typer.Option(
        "--delays",
        metavar="KIND",
        help="simulate late clients: exponential:MEAN, slow:SHARE:ROUNDS or fixed:R1,R2,... in rounds",
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
ModelsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--models",
        metavar="PATH",
        help="Python file with your networks, or folder of a language model (may be repeated)",
    ),
]
RoundsOption = Annotated[int, typer.Option(min=1, metavar="N", help="communication rounds")]


def known_and_groups(given: list[str] | None) -> tuple[str | None, tuple[str, ...]]:
    """Return the column of known clusters, if one was named with --cluster, or the grouping columns.

    One that is named twice is a grouping column: nodes do not compare their tables, so none can tell by itself.
    """
    names = tuple(dict.fromkeys(given or ()))
    return (names[0], ()) if len(given or ()) == 1 else (None, names)


def grouping_columns(given: list[str] | None) -> str | list[str] | None:
    """Return the columns that were named with --cluster, a single one by itself."""
    return given[0] if given and len(given) == 1 else given or None


def lateness_of(buffer: int | None, staleness: int | None, delays: str | None = None) -> Lateness | None:
    """Return how late answers may come by these options; None if rounds wait for all."""
    given = {"buffer": buffer, "staleness": staleness, "delays": delays}
    told = {name: value for name, value in given.items() if value is not None}
    return Lateness(**told) if told else None  # type: ignore[arg-type]  # checked by the command line


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


def shares(text: str) -> tuple[float, ...]:
    """Parse the value of `--split`."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise SettingError(f"--split {text!r}: write three shares, such as 0.6,0.2,0.2") from None


def named_assignments(pairs: list[str], names: list[str]) -> dict[str, dict[str, str]]:
    """Parse the values of `--set` for several methods, each of the form method.name=value."""
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for pair in pairs:
        method, dot, rest = pair.strip().partition(".")
        if not dot or "=" in method:
            raise SettingError(f"--set {pair!r}: write method.name=value, for example --set ditto.lam=0.3")
        if method not in found:
            raise SettingError(f"--set {pair!r}: no method {method!r} here.{nearest(method, names)}")
        setting = assignments([rest])
        if found[method].keys() & setting.keys():
            raise SettingError(f"--set {pair!r}: it is set twice; set it once")
        found[method] |= setting
    return found


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


def class_weights(text: str | None) -> str | dict[str, float] | None:
    """Parse the value of `--class-weights`: a word, or a number for each class."""
    if text is None or "=" not in text:
        return text
    try:
        return {name.strip(): float(value) for name, value in (one.rsplit("=", 1) for one in text.split(","))}
    except ValueError:
        raise SettingError(f"--class-weights {text!r}: write balanced, or such as yes=5,no=1") from None


def model_settings(pairs: list[str]) -> dict[str, Any]:
    """Parse the values of `--set-model`: numbers, true or false, lists such as 16,32, or text."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    return {
        name: [value(part) for part in text.split(",")] if "," in text else value(text)
        for name, text in assignments(pairs).items()
    }


def truth(text: str) -> bool:
    """Return the value of `--set theory=true`."""
    if text.lower() not in ("true", "yes", "1", "false", "no", "0"):
        raise SettingError(
            f"--set theory={text}: write theory=true, for steps and probabilities from the theory"
        )
    return text.lower() in ("true", "yes", "1")


def method_for(model: str, algorithm: str | None, usual: str = "ditto") -> str:
    """Return the method asked for, or the usual one; raise `SettingError` if it cannot train the model."""
    if model != "trees":
        return algorithm or usual
    if algorithm == "auto":
        raise SettingError("auto lets trees race beside linear models by itself; leave out --model trees")
    if algorithm not in (None, "trees"):
        raise SettingError(f"{algorithm} does not grow trees; leave out --algorithm, or --model trees")
    return "trees"


def write_json(path: Path | None, value: Any) -> None:
    """Write a value as JSON, if there is a path."""
    if path is not None:
        files.write_json(path, value)

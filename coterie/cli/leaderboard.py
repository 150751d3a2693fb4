"""Compare all methods on many data sets under equal budgets."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from coterie._core.errors import SettingError
from coterie.cli import console
from coterie.cli.arguments import ClusterOption, DropOption, JsonOption, TaskOption, require_place, write_json
from coterie.leaderboard import board as boards
from coterie.leaderboard.entries import own_method, own_table
from coterie.leaderboard.plan import PLAN, Budget, Plan
from coterie.leaderboard.tables import data_table, overall_table

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Compare all methods on many data sets under equal budgets.",
    epilog="Example: coterie leaderboard run --out leaderboard --workers 2",
)
SECONDS = 30.0  # between two lines of progress where there is no terminal
FolderArgument = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="folder written by `coterie leaderboard run`")
]
FilesOption = Annotated[
    Path | None, typer.Option("--files", metavar="FOLDER", help="folder with files that some data sets need")
]
WorkersOption = Annotated[int, typer.Option(min=1, metavar="N", help="processes that run cells")]


@app.callback()
def leaderboard() -> None:
    """Compare all methods on many data sets under equal budgets."""


@app.command(epilog="Example: coterie leaderboard run --out leaderboard --data heart,clinics --rounds 20")
def run(
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="folder for cells, leaderboard.json and the page")
    ],
    methods: Annotated[
        str | None, typer.Option(metavar="NAMES", help="methods, with commas; all if not given")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="data sets, with commas; all whose files are there if not given"),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="partitions and splits; 3 if not given")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, metavar="N", help="rounds; 50 if not given")] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="settings tried per method; 6 if not given")
    ] = None,
    files: FilesOption = None,
    workers: WorkersOption = 1,
    json: JsonOption = None,
) -> None:
    """Run methods x data sets x seeds; the same command goes on where a run was stopped."""
    require_place(json)
    usual = _budget_of(out)
    budget = Budget(rounds or usual.rounds, trials or usual.trials, seeds or usual.seeds)
    with _progress() as watch:
        found = boards.run(
            out,
            methods=_names(methods),
            data=_names(data),
            budget=budget,
            data_files=files,
            workers=workers,
            watch=watch,
        )
    _tell(found, json)


@app.command(epilog="Example: coterie leaderboard add leaderboard --method mine.py")
def add(
    to: Annotated[
        Path, typer.Argument(metavar="LEADERBOARD", help="folder of a leaderboard, or a leaderboard.json")
    ],
    method: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Python file with a subclass of Algorithm (may be repeated)"),
    ] = None,
    table: Annotated[Path | None, typer.Option(metavar="FILE", help="table of yours, CSV or Parquet")] = None,
    client: Annotated[str | None, typer.Option(metavar="COLUMN", help="its column with the client")] = None,
    target: Annotated[str | None, typer.Option(metavar="COLUMN", help="its column to predict")] = None,
    cluster: ClusterOption = None,
    task: TaskOption = None,
    drop: DropOption = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="name of the table; its file's if not given")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="what clients train on it: linear or mlp")
    ] = "linear",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="folder for the results; needed for a leaderboard.json"),
    ] = None,
    files: FilesOption = None,
    workers: WorkersOption = 1,
    json: JsonOption = None,
) -> None:
    """Add a method or a table of yours and compare it with the stored results, under the same budget."""
    require_place(json)
    if model not in ("linear", "mlp"):
        raise SettingError(f"--model {model}: clients of a leaderboard train linear or mlp")
    if table is not None and (client is None or target is None):
        raise SettingError("--table needs its columns: --client COLUMN --target COLUMN")
    sets = []
    if table is not None:
        options = {"cluster": cluster, "drop": drop or [], "task": task}
        sets.append(own_table(table, str(client), str(target), name, model, **options))
    with _progress() as watch:
        found = boards.add(
            to,
            methods=[own_method(path) for path in method or []],
            data=sets,
            out=out,
            data_files=files,
            workers=workers,
            watch=watch,
        )
    _tell(found, json)


@app.command(epilog="Example: coterie leaderboard cell leaderboard ditto heart 0")
def cell(
    folder: FolderArgument,
    method: Annotated[str, typer.Argument(metavar="METHOD", help="name of the method")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="name of the data set")],
    seed: Annotated[int, typer.Argument(metavar="SEED", help="number of the seed")],
) -> None:
    """Run one cell again, alone, and compare it with the stored one; exit with code 1 if a digit differs."""
    differs = boards.recheck(folder, method, data, seed)
    if not differs:
        console.show(f"{method} on {data} with seed {seed}: the same digits.")
        return
    for field, (before, after) in differs.items():
        console.show(f"{field}: stored {before!r}, now {after!r}")
    raise typer.Exit(1)


@app.command(epilog="Example: coterie leaderboard show leaderboard --data heart")
def show(
    folder: Annotated[Path, typer.Argument(metavar="LEADERBOARD", help="folder, or a leaderboard.json")],
    data: Annotated[str | None, typer.Option(metavar="NAME", help="one data set; all if not given")] = None,
) -> None:
    """Print the table of a leaderboard."""
    result = boards.read(folder)
    console.show(overall_table(result) if data is None else data_table(result, data))


def _budget_of(out: Path) -> Budget:
    """Return the budget of a leaderboard that is there, or the usual one."""
    return Plan.load(out).budget if (out / PLAN).exists() else Budget()


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _tell(found: boards.Board, json: Path | None) -> None:
    console.show(overall_table(found.result), f"Page: {found.page}")
    write_json(json, found.result)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on terminals, and elsewhere a line now and then with the time that is left."""
    if sys.stderr.isatty():
        with console.progress() as watch:
            yield watch
        return
    started = told = time.monotonic()
    first: int | None = None

    def say(what: str, done: int, total: int) -> None:
        nonlocal told, first
        first = done - 1 if first is None else first
        now = time.monotonic()
        if now - told >= SECONDS or done == total:
            left = (total - done) * (now - started) / max(1, done - first)
            console.notes([f"{done} of {total} cells, about {left / 60:.0f} min left ({what})"])
            told = now

    yield say

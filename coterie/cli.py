"""The `coterie` command. Thin: it parses, shows progress, prints, and leaves the work to the library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.errors import CoterieError, SettingError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Personalized federated learning: every client gets the best model it can have.",
)
data_app = typer.Typer(no_args_is_help=True, help="Look at a table before training.")
app.add_typer(data_app, name="data")

TableArgument = Annotated[str, typer.Argument(help="CSV (plain or compressed), Parquet, or a bundled set such as heart_disease")]
ClientOption = Annotated[str, typer.Option(help="column that names the client of a row")]
TargetOption = Annotated[str, typer.Option(help="column to predict")]
ClusterOption = Annotated[str | None, typer.Option(help="column that names the client's known cluster")]
TaskOption = Annotated[str | None, typer.Option(help="classification or regression; guessed from the target if not given")]
DropOption = Annotated[list[str] | None, typer.Option(help="column to leave out (may be repeated)")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="also write the result to this file")]
RoundsOption = Annotated[int, typer.Option(min=1, help="communication rounds")]


@app.command(epilog="Example: coterie compare heart_disease --client hospital --target sick")
def compare(
    table: TableArgument,
    client: ClientOption,
    target: TargetOption,
    cluster: ClusterOption = None,
    task: TaskOption = None,
    algorithms: Annotated[str, typer.Option(help="methods beside local, fedavg and fine-tuned, with commas")] = "ditto",
    seeds: Annotated[int, typer.Option(min=1, help="splits and repetitions")] = 3,
    rounds: RoundsOption = 100,
    budget: Annotated[int, typer.Option(min=1, help="settings tried per method")] = 8,
    drop: DropOption = None,
    json: JsonOption = None,
    out: Annotated[Path | None, typer.Option(help="folder for models, metrics and per-client results")] = None,
) -> None:
    """Does collaborating help? Compare methods on your table, client by client."""
    from coterie.report.tables import comparison_table
    from coterie.runs.compare import compare as run_comparison

    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    with _progress() as watch:
        comparison = run_comparison(
            _source(table),
            client,
            target,
            cluster=cluster,
            task=task,
            drop=drop or (),
            algorithms=names,
            seeds=seeds,
            rounds=rounds,
            budget=budget,
            out=out,
            watch=watch,
        )
    _warn(comparison.warnings)
    _print(comparison_table(comparison))
    _print(comparison.verdict())
    _write_json(json, comparison.json())
    if out is not None:
        _print(f"Written to {out}")


@app.command(epilog="Example: coterie fit heart_disease --client hospital --target sick --algorithm ditto --set lam=0.3 --out runs/heart")
def fit(
    table: TableArgument,
    client: ClientOption,
    target: TargetOption,
    out: Annotated[Path, typer.Option(help="run folder to make")],
    algorithm: Annotated[str, typer.Option(help="method; `coterie algorithms` lists them")] = "ditto",
    settings: Annotated[list[str] | None, typer.Option("--set", help="hyperparameter, name=value (may be repeated)")] = None,
    cluster: ClusterOption = None,
    task: TaskOption = None,
    rounds: RoundsOption = 100,
    seed: int = 0,
    drop: DropOption = None,
    dropout: Annotated[float, typer.Option(help="share of clients away in each call (simulation)")] = 0.0,
    select: Annotated[str, typer.Option(help="deploy the 'last' models or the 'best' by validation loss")] = "last",
    checkpoint_every: Annotated[int, typer.Option(min=0, help="rounds between checkpoints; 0 goes by time")] = 0,
) -> None:
    """Train one method and save a model per client."""
    from coterie.algorithms import make
    from coterie.data.load import load_table
    from coterie.runs.fit import fit as train

    method = make(algorithm, **_assignments(settings or []))
    fed = load_table(
        _source(table), client, target, cluster=cluster, task=task, drop=drop or (), seed=seed, dropout=dropout
    )
    _warn(fed.table.warnings)
    with _progress() as watch:
        run = train(
            fed, method, rounds, out, select=select, checkpoint_every=checkpoint_every, watch=_rounds(watch, method.name)
        )
    _finished(run)


@app.command(epilog="Example: coterie resume runs/heart")
def resume(
    run: Annotated[Path, typer.Argument(help="run folder")],
    anyway: Annotated[bool, typer.Option(help="go on although threads, device or versions differ")] = False,
) -> None:
    """Go on with an interrupted run; the result is the same as without the interruption."""
    from coterie.runs.fit import resume as go_on

    with _progress() as watch:
        finished = go_on(run, anyway=anyway, watch=_rounds(watch, run.name))
    _finished(finished)


@app.command(epilog="Example: coterie predict runs/heart new.csv --out predictions.csv")
def predict(
    run: Annotated[Path, typer.Argument(help="run folder")],
    table: TableArgument,
    out: Annotated[Path | None, typer.Option(help="CSV or Parquet file; printed if not given")] = None,
) -> None:
    """Predict new rows, each with its client's model; an unknown client gets the common model and a warning."""
    from coterie.runs import files
    from coterie.runs.predict import Predictor

    predictions = Predictor.load(run)(_source(table))
    if out is None:
        typer.echo(predictions.write_csv(), nl=False)
        return
    write = predictions.write_parquet if out.suffix in (".parquet", ".pq") else predictions.write_csv
    files.write_with(out, write)
    unknown = predictions["warning"].is_not_null().sum()
    _print(f"{len(predictions)} predictions written to {out}" + (f", {unknown} by the common model" if unknown else ""))


@app.command(epilog="Example: coterie algorithms ditto")
def algorithms(
    name: Annotated[str | None, typer.Argument(help="one method, with its hyperparameters")] = None,
    json: JsonOption = None,
) -> None:
    """List the methods, or explain one."""
    from coterie.algorithms import all_algorithms, find
    from coterie.report.tables import algorithm_page, algorithms_table, describe_algorithm

    if name is None:
        _print(algorithms_table(list(all_algorithms().values())))
        _write_json(json, [describe_algorithm(cls) for cls in all_algorithms().values()])
    else:
        _print(algorithm_page(find(name)))
        _write_json(json, describe_algorithm(find(name)))


@data_app.command(epilog="Example: coterie data describe heart_disease --client hospital --target sick")
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

    source = _source(table)
    frame = tables.read(source)
    spec = tables.check(frame, client, target, cluster=cluster, drop=drop or (), task=task, source=str(source))
    description = tables.describe(frame, spec)
    _warn(spec.warnings)
    for part in description_tables(description):
        _print(part)
    _write_json(json, description)


@app.command(epilog="Example: coterie reproduce known-clusters/baselines --check")
def reproduce(
    name: Annotated[str | None, typer.Argument(help="experiment; without it, what exists is listed")] = None,
    quick: Annotated[bool, typer.Option(help="a small version: fewer seeds and rounds")] = False,
    check: Annotated[bool, typer.Option(help="exit with 1 if a row is not ok")] = False,
    json: JsonOption = None,
    out: Annotated[Path | None, typer.Option(help="folder for table, plot and settings")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="runs at a time; the number of cores if not given")] = None,
) -> None:
    """Repeat an experiment of the papers and show its numbers beside ours."""
    from coterie.report.tables import experiments_table
    from coterie.runs import experiments

    if name is None:
        _print(experiments_table(experiments.experiments()))
        return
    with _progress() as watch:
        result = experiments.reproduce(name, quick=quick, out=out, jobs=jobs, watch=watch)
    _print(result.table())
    _write_json(json, result.json())
    if check and not result.ok:
        raise typer.Exit(1)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: what the user can put right is printed in one message, with exit code 2."""
    try:
        app(args=arguments)
    except CoterieError as problem:
        _error(str(problem))
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)


def _source(table: str) -> Any:
    """A path, or the bundled table of that name."""
    from coterie.data import bundled

    return bundled.path(table) if not Path(table).exists() and table in bundled.names() else table


def _assignments(pairs: list[str]) -> dict[str, str]:
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise SettingError(f"--set {pair!r}: write name=value, for example --set lr=0.1")
        values[name.strip()] = value.strip()
    return values


def _print(what: Any) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(what, highlight=False)


def _error(message: str) -> None:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True).print(f"[bold red]Error:[/] {_plain(message)}", highlight=False)


def _warn(warnings: list[str]) -> None:
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True)
    for warning in warnings:
        console.print(f"[yellow]Note:[/] {_plain(warning)}", highlight=False)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def watch(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield watch


def _rounds(watch: Callable[[str, int, int], None], what: str) -> Callable[[int, int], None]:
    return lambda t, rounds: watch(what, t, rounds)


def _finished(run: Any) -> None:
    from coterie.report.tables import run_table

    _print(run_table(run))
    _print(f"Run folder: {run.folder}")


def _write_json(path: Path | None, value: Any) -> None:
    if path is not None:
        from coterie.runs import files

        files.write_json(path, value)


if __name__ == "__main__":
    main()

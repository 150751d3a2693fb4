"""The `coterie` command. Thin: it parses, shows progress, prints, and leaves the work to the library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie import __version__, cli_models, cli_search
from coterie.cli_arguments import (
    ClientOption,
    ClusterOption,
    DropOption,
    JsonOption,
    L2Option,
    RoundsOption,
    RunArgument,
    TableArgument,
    TargetOption,
    TaskOption,
    assignments,
    find_table,
    require_place,
    write_json,
)
from coterie.cli_federate import app as federate_app
from coterie.errors import CoterieError, SettingError
from coterie.report import console

if TYPE_CHECKING:
    from coterie.runs.run import Run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Personalized federated learning: every client gets the best model it can have.",
    epilog="Example: coterie compare heart_disease --client hospital --target sick",
)
data_app = typer.Typer(
    no_args_is_help=True,
    help="Look at a table before training.",
    epilog="Example: coterie data describe heart_disease --client hospital --target sick",
)
app.add_typer(data_app, name="data")
app.add_typer(federate_app, name="federate")
cli_models.register(app)
cli_search.register(app)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog="Example: coterie compare heart_disease --client hospital --target sick --json result.json"
)
def compare(
    table: TableArgument,
    client: ClientOption,
    target: TargetOption,
    cluster: ClusterOption = None,
    task: TaskOption = None,
    algorithms: Annotated[
        str, typer.Option(metavar="NAMES", help="methods beside local, fedavg and fine-tuned, with commas")
    ] = "ditto",
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="splits and repetitions")] = 3,
    rounds: RoundsOption = 100,
    budget: Annotated[int, typer.Option(min=1, metavar="N", help="settings tried per method")] = 8,
    drop: DropOption = None,
    json: JsonOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder for models, metrics and per-client results")
    ] = None,
) -> None:
    """Does collaborating help? Compare methods on your table, client by client."""
    from coterie.report.tables import comparison_tables
    from coterie.runs.compare import compare as run_comparison

    require_place(json)
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    with console.progress() as watch:
        comparison = run_comparison(
            find_table(table),
            client,
            target,
            cluster=cluster,
            task=task,
            drop=drop or (),
            algorithms=list(dict.fromkeys(names)),
            seeds=seeds,
            rounds=rounds,
            budget=budget,
            out=out,
            watch=watch,
        )
    console.notes(comparison.warnings)
    console.show(*comparison_tables(comparison, console.width()), comparison.verdict())
    write_json(json, comparison.json())
    if out is not None:
        console.show(f"Written to {out}")
        cli_models.report_beside(out)


@app.command(epilog="Example: coterie advise heart_disease --client hospital --target sick")
def advise(
    table: TableArgument,
    client: ClientOption,
    target: TargetOption,
    task: TaskOption = None,
    drop: DropOption = None,
    seed: Annotated[int, typer.Option(metavar="N", help="decides the split and every draw")] = 0,
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


@app.command(epilog="Example: coterie fit heart_disease --client hospital --target sick --out heart")
def fit(
    table: TableArgument,
    client: ClientOption,
    target: TargetOption,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="run folder to make")],
    algorithm: Annotated[
        str, typer.Option(metavar="NAME", help="method; `coterie algorithms` lists them; auto: let them race")
    ] = "ditto",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="hyperparameter, such as lam=0.3 (may be repeated)"),
    ] = None,
    cluster: ClusterOption = None,
    task: TaskOption = None,
    rounds: RoundsOption = 100,
    seed: Annotated[int, typer.Option(metavar="N", help="decides the split and every draw")] = 0,
    drop: DropOption = None,
    dropout: Annotated[
        float, typer.Option(metavar="SHARE", help="share of clients away in each call (simulation)")
    ] = 0.0,
    select: Annotated[
        str, typer.Option(metavar="WHICH", help="deploy the 'last' models or the 'best' by validation loss")
    ] = "last",
    checkpoint_every: Annotated[
        int, typer.Option(min=0, metavar="N", help="rounds between checkpoints; 0 goes by time")
    ] = 0,
    budget_mb: Annotated[
        float | None,
        typer.Option("--budget-mb", metavar="MB", help="flix: as many rounds as fit, instead of --rounds"),
    ] = None,
    l2: L2Option = None,
    track: Annotated[
        str | None, typer.Option(metavar="NAME", help="also write for tensorboard or mlflow")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Train one method and save a model per client."""
    from coterie.algorithms import make
    from coterie.data.load import load_table
    from coterie.runs.fit import fit as train
    from coterie.runs.plan import rounds_within_budget

    method = "auto" if algorithm == "auto" else make(algorithm, **assignments(settings or []))
    if isinstance(method, str) and (settings or budget_mb is not None):
        raise SettingError("auto chooses the settings by itself; leave out --set and --budget-mb")
    require_place(json)
    fed = load_table(
        find_table(table),
        client,
        target,
        cluster=cluster,
        task=task,
        drop=drop or (),
        seed=seed,
        dropout=dropout,
        l2=l2,
    )
    console.notes(fed.table.warnings)
    if budget_mb is not None and not isinstance(method, str):
        rounds = rounds_within_budget(method, fed, budget_mb)
    with _resumable(out), console.progress() as watch:
        run = train(
            fed,
            method,
            rounds,
            out,
            select=select,
            checkpoint_every=checkpoint_every,
            watch=_rounds(watch, algorithm),
            track=track,
        )
    if run.choice is not None:
        console.show(run.choice.text())
    _finished(run, json)


@app.command(
    epilog="Example: coterie plan heart_disease --client hospital --target sick --accuracy 0.001 --rounds 10"
)
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
    seed: Annotated[int, typer.Option(metavar="N", help="decides the split and every draw")] = 0,
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


@app.command(epilog="Example: coterie resume runs/heart")
def resume(
    run: RunArgument,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="go on although threads, device or versions differ")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Go on with an interrupted run; the result is the same as without the interruption."""
    from coterie.runs.fit import resume as go_on

    require_place(json)
    with _resumable(run), console.progress() as watch:
        finished = go_on(run, anyway=anyway, watch=_rounds(watch, run.name))
    _finished(finished, json)


@app.command(epilog="Example: coterie predict runs/heart new.csv --out predictions.csv")
def predict(
    run: RunArgument,
    table: TableArgument,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV or Parquet file; printed as CSV if not given")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Predict new rows, each with its client's model.

    A client that was not in training gets the common model and a warning.
    """
    from coterie.report.tables import prediction_notes
    from coterie.runs import files
    from coterie.runs.predict import Predictor

    source = find_table(table)
    for place in (out, json):
        require_place(place, other_than=source)
    if out is not None and out.suffix not in (".csv", ".parquet", ".pq"):
        raise SettingError(f"--out {out}: give it a name that ends in .csv or .parquet")
    predictor = Predictor.load(run)
    predictions = predictor(source)
    console.notes(prediction_notes(predictions, predictor.client_column))
    write_json(json, predictions.to_dicts())
    if out is None:
        typer.echo(predictions.write_csv(), nl=False)
        return
    files.write_with(out, predictions.write_csv if out.suffix == ".csv" else predictions.write_parquet)
    console.show(f"{len(predictions)} predictions written to {out}")


@app.command(epilog="Example: coterie algorithms ditto")
def algorithms(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="one method, with its hyperparameters")
    ] = None,
    json: JsonOption = None,
) -> None:
    """List the methods, or explain one."""
    from coterie.algorithms import all_algorithms, find
    from coterie.report.tables import algorithm_page, algorithms_table, describe_algorithm

    require_place(json)
    if name is None:
        known = list(all_algorithms().values())
        console.show(algorithms_table(known))
        write_json(json, [describe_algorithm(cls) for cls in known])
    else:
        console.show(*algorithm_page(find(name)))
        write_json(json, describe_algorithm(find(name)))


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


@app.command(epilog="Example: coterie reproduce known-clusters/baselines --check")
def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="experiment; without it, what exists is listed")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a small version: fewer seeds and rounds")] = False,
    check: Annotated[bool, typer.Option("--check", help="exit with 1 if a row is not ok")] = False,
    json: JsonOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder for table, plot and settings")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="runs at a time; the number of cores if not given")
    ] = None,
) -> None:
    """Repeat an experiment of the papers and show its numbers beside ours."""
    from coterie.report.tables import experiments_table
    from coterie.runs import experiments

    if name is None:
        console.show(experiments_table(experiments.experiments()))
        return
    with console.progress() as watch:
        result = experiments.reproduce(name, quick=quick, out=out, jobs=jobs, watch=watch)
    console.show(result.table())
    write_json(json, result.json())
    if check and not result.ok:
        raise typer.Exit(1)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: what the user can put right is printed in one message, with exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        app(args=arguments)
    except CoterieError as problem:
        console.error(str(problem))
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as problem:
        console.error(f"{problem.filename or 'a file'}: {problem.strerror or problem}")
        sys.exit(2)


def _rounds(watch: Callable[[str, int, int], None], what: str) -> Callable[[int, int], None]:
    return lambda t, rounds: watch(what, t, rounds)


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Say, when the user stops a run, how to go on with it."""
    try:
        yield
    except KeyboardInterrupt:
        if (folder / "config.toml").exists():
            console.notes([f"Stopped. Go on with: coterie resume {folder}"])
        raise


def _finished(run: Run, json: Path | None) -> None:
    from coterie.report.tables import run_notes, run_summary, run_table

    console.notes(run_notes(run))
    console.show(run_table(run), f"Run folder: {run.folder}")
    if run.folder is not None:
        cli_models.report_beside(run.folder)
    write_json(json, run_summary(run))


if __name__ == "__main__":
    main()

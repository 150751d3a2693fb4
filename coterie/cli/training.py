"""Commands that train: one method, several side by side, the search for settings, and going on after a stop."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie import models
from coterie._core.errors import DataError, SettingError
from coterie.algorithms import from_the_theory, make
from coterie.cli import console
from coterie.cli.arguments import (
    AggregateOption,
    BufferOption,
    ClassWeightsOption,
    ClientOption,
    ClusterOption,
    DelaysOption,
    DeltaOption,
    DeviceOption,
    DropOption,
    EpsilonOption,
    EventOption,
    FoldsOption,
    JsonOption,
    KeepOption,
    L2Option,
    MetricOption,
    ModelOption,
    RefitOption,
    RoundsOption,
    RunArgument,
    SeedOption,
    SetOption,
    SplitOption,
    StalenessOption,
    StateMemoryOption,
    TableArgument,
    TargetOption,
    TaskOption,
    TimeOption,
    UnitOption,
    WorkersOption,
    assignments,
    class_weights,
    find_table,
    grouping_columns,
    lateness_of,
    method_for,
    named_assignments,
    privacy_of,
    require_place,
    shares,
    truth,
    write_json,
)
from coterie.cli.models import report_beside
from coterie.engine.federation import Federation
from coterie.engine.worker_links import WorkerLost
from coterie.models.trees import with_loss_of
from coterie.report.comparison_tables import comparison_tables, drift_notes
from coterie.report.tables import certified, run_notes, run_summary, run_table
from coterie.report.tables import search_table as as_table
from coterie.report.weights import save_weights
from coterie.select.auto import ChosenRun, journal_of
from coterie.select.compare import compare as run_comparison
from coterie.select.entrants import BASELINES
from coterie.select.fit import fit as train
from coterie.select.plan import rounds_within_budget
from coterie.select.tune import search_table
from coterie.train.adapters import keep_adapters
from coterie.train.fit import resume as go_on
from coterie.train.run import Run
from coterie.train.workers import serve_others

SPLIT_TEXT = "0.6,0.2,0.2"


def compare(
    table: TableArgument,
    client: ClientOption,
    target: TargetOption,
    event: EventOption = None,
    time: TimeOption = None,
    cluster: ClusterOption = None,
    task: TaskOption = None,
    algorithms: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="methods beside local, fedavg and fine-tuned, with commas"),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="METHOD.NAME=VALUE", help="hyperparameter of a method, such as ditto.lam=0.3"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="splits of the rows")] = 1,
    folds: FoldsOption = None,
    split: SplitOption = SPLIT_TEXT,
    seed: SeedOption = 0,
    refit: RefitOption = "validation",
    rounds: RoundsOption = 100,
    budget: Annotated[int, typer.Option(min=1, metavar="N", help="settings tried per method")] = 8,
    metric: MetricOption = None,
    model: ModelOption = "linear",
    weights: ClassWeightsOption = None,
    device: DeviceOption = "cpu",
    drop: DropOption = None,
    keep: KeepOption = None,
    guard: Annotated[
        bool,
        typer.Option(
            "--guard", help="clients keep their own model where validation rows speak against a method"
        ),
    ] = False,
    json: JsonOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder for models, metrics and per-client results")
    ] = None,
) -> None:
    """Compare methods on your table, client by client, and say whether collaborating helps."""
    require_place(json)
    if model == "trees":  # beside linear models, which the other methods train
        algorithms, model = f"{algorithms or ''},trees", "linear"
    names = list(dict.fromkeys(name.strip() for name in (algorithms or "ditto").split(",") if name.strip()))
    given = named_assignments(settings or [], [*BASELINES, *names])
    with console.progress() as watch:
        comparison = run_comparison(
            find_table(table),
            client,
            target,
            cluster=grouping_columns(cluster),
            event=event,
            time=time,
            task=task,
            drop=drop or (),
            keep=keep or (),
            algorithms=names,
            settings={name: values for name, values in given.items() if values},
            seeds=seeds,
            folds=folds,
            split=shares(split),
            seed=seed,
            refit=refit,
            rounds=rounds,
            budget=budget,
            out=out,
            watch=watch,
            metric=metric,
            model=model,
            class_weights=class_weights(weights),
            device=device,
            guard=guard,
        )
    console.notes(comparison.warnings)
    console.show(*comparison_tables(comparison, console.width()), comparison.verdict())
    if guard:
        console.show("\n".join(f"Guard: {text}" for text in comparison.guard_sentences()))
    console.notes(drift_notes(comparison))
    write_json(json, comparison.json())
    if out is not None:
        console.show(f"Written to {out}")
        report_beside(out)


def fit(
    table: TableArgument,
    client: ClientOption,
    target: TargetOption,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="run folder to make")],
    algorithm: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="ditto if not given; `coterie algorithms` lists all; auto: let them race"
        ),
    ] = None,
    settings: SetOption = None,
    event: EventOption = None,
    time: TimeOption = None,
    cluster: ClusterOption = None,
    task: TaskOption = None,
    rounds: RoundsOption = 100,
    seed: SeedOption = 0,
    split: SplitOption = SPLIT_TEXT,
    refit: RefitOption | None = None,
    drop: DropOption = None,
    keep: KeepOption = None,
    dropout: Annotated[
        float, typer.Option(metavar="SHARE", help="share of clients away in each call (simulation)")
    ] = 0.0,
    select: Annotated[
        str, typer.Option(metavar="WHICH", help="deploy the 'last' models or the 'best' on validation rows")
    ] = "last",
    metric: MetricOption = None,
    model: ModelOption = "linear",
    weights: ClassWeightsOption = None,
    device: DeviceOption = "cpu",
    checkpoint_every: Annotated[
        int, typer.Option(min=0, metavar="N", help="rounds between checkpoints; 0 goes by time")
    ] = 0,
    budget_mb: Annotated[
        float | None,
        typer.Option(
            "--budget-mb",
            metavar="MB",
            help="flix: as many rounds as fit, instead of --rounds; auto: the race is cut short",
        ),
    ] = None,
    budget_seconds: Annotated[
        float | None,
        typer.Option("--budget-seconds", metavar="S", help="auto: the race is cut short after so many"),
    ] = None,
    accuracy: Annotated[
        float | None,
        typer.Option(metavar="X", help="flix: stop once the loss is proved to be this close to its minimum"),
    ] = None,
    l2: L2Option = None,
    aggregate: AggregateOption = None,
    epsilon: EpsilonOption = None,
    delta: DeltaOption = 1e-5,
    unit: UnitOption = "client",
    state_memory: StateMemoryOption = None,
    workers: WorkersOption = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="the same bits whatever the number of workers is")
    ] = False,
    buffer: BufferOption = None,
    staleness: StalenessOption = None,
    delays: DelaysOption = None,
    track: Annotated[
        str | None, typer.Option(metavar="NAME", help="also write for tensorboard, mlflow or wandb")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="say which fast paths computed what")] = False,
    ensemble: Annotated[
        bool, typer.Option("--ensemble/--no-ensemble", help="auto: average finalists where that is better")
    ] = True,
    json: JsonOption = None,
) -> None:
    """Train one method and save a model per client."""
    serve_others(workers)
    given = assignments(settings or [])
    from_theory, algorithm = truth(given.pop("theory", "false")), method_for(model, algorithm)
    method = "auto" if algorithm == "auto" else make(algorithm, **given)
    races = isinstance(method, str)
    if races and (settings or state_memory is not None):
        raise SettingError("auto chooses by itself; leave out --set and --state-memory")
    if not races and budget_mb is not None and refit not in (None, "none"):
        raise SettingError("--budget-mb is for one training, and --refit trains again; leave one of them out")
    if budget_mb is not None and accuracy is not None:
        raise SettingError(
            "--budget-mb and --accuracy both say when to stop; give one, and --rounds as a limit"
        )
    require_place(json)
    privacy, late = privacy_of(epsilon, delta, unit), lateness_of(buffer, staleness, delays)
    if late is not None and not isinstance(method, str):
        late.require(method)
    own = None if isinstance(method, str) else method.own_model(rounds)
    fed = Federation.from_table(
        find_table(table),
        client,
        target,
        cluster=grouping_columns(cluster),
        event=event,
        time=time,
        task=task,
        drop=drop or (),
        keep=keep or (),
        split=shares(split),
        seed=seed,
        dropout=dropout,
        l2=l2,
        model=model if own is None else with_loss_of(own, model),
        class_weights=class_weights(weights),
        device=device,
        privacy=privacy,
    )
    console.notes(fed.table.warnings)
    if from_theory:
        method = from_the_theory(algorithm, fed, given)
    if budget_mb is not None and not isinstance(method, str):
        rounds = rounds_within_budget(method, fed, budget_mb)
        console.notes(
            ["Models are trained on training rows only: training again would cost the budget twice."]
        )
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
            state_memory=state_memory,
            metric=metric,
            refit=refit or ("validation" if races or (budget_mb is None and privacy is None) else "none"),
            target=accuracy,
            aggregate=aggregate,
            privacy=privacy,
            workers=workers,
            exact=exact,
            late=late,
            ensemble=ensemble,
            budget_mb=budget_mb if races else None,
            budget_seconds=budget_seconds,
        )
    if accuracy is not None:
        console.notes([certified(run, accuracy)])
    if isinstance(run, ChosenRun) and run.choice is not None:
        console.show(run.choice.text())
    _finished(run, json)
    if explain:
        console.show(run.explain())


def adapters(
    texts: Annotated[
        Path,
        typer.Argument(
            metavar="TEXTS", help="folder with a folder or file of text per client, or a table of documents"
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="run folder to make, with adapters/CLIENT in it")
    ],
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="folder with safetensors, a .gguf file, smollm2, or a name")
    ] = "smollm2",
    algorithm: Annotated[str, typer.Option(metavar="NAME", help="method")] = "cobo",
    settings: SetOption = None,
    rounds: RoundsOption = 100,
    rank: Annotated[int, typer.Option(min=1, metavar="N", help="of the adapters")] = 4,
    clip: Annotated[
        float, typer.Option(metavar="LENGTH", help="longer gradients are shortened to it; 0: none is")
    ] = 1.0,
    context: Annotated[int, typer.Option(min=2, metavar="N", help="tokens in a row")] = 512,
    tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="at most so many of a client")
    ] = None,
    client: Annotated[str | None, typer.Option(metavar="COLUMN", help="of a table: the client")] = None,
    text: Annotated[str | None, typer.Option(metavar="COLUMN", help="of a table: the document")] = None,
    select: Annotated[
        str, typer.Option(metavar="WHICH", help="deploy the 'last' adapters or the 'best' by validation loss")
    ] = "best",
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Teach a language model the texts of every client: an adapter each, from those who help each other.

    Steps are lr=0.1 on batch=8 rows unless --set says otherwise; cobo has its weights on the simplex and rho=0.01.
    """
    import torch

    usual: dict[str, Any] = {"lr": 0.1, "batch": 8}
    if algorithm == "cobo":
        usual |= {"rho": 0.01, "domain": "simplex"}
    method = make(algorithm, **(usual | assignments(settings or [])))
    require_place(json)
    source = str(Path(model).resolve()) if Path(model).exists() else model
    fed = Federation.from_texts(
        texts,
        models.causal_lm(source, lora_rank=rank, precision="auto", compiled="auto", clip=clip or None),
        client=client,
        text=text,
        context=context,
        tokens=tokens,
        seed=seed,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    if select == "best" and not fed.has_rows("validation"):
        raise DataError(
            f"{texts}: no client has a document left to validate on. Whole documents go to training, validation or "
            "test; give clients about ten each (files, or parts between blank lines), or deploy the last adapters: "
            "--select last"
        )
    with _resumable(out), console.progress() as watch:
        run = train(fed, method, rounds, out, select=select, watch=_rounds(watch, algorithm))
    _finished(run, json)


def resume(
    run: RunArgument,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="go on although threads, device or versions differ")
    ] = False,
    state_memory: StateMemoryOption = None,
    workers: WorkersOption = None,
    json: JsonOption = None,
) -> None:
    """Go on with an interrupted run; the result is the same as without the interruption."""
    serve_others(workers)
    require_place(json)
    with _resumable(run), console.progress() as watch:
        finished = go_on(
            run, anyway=anyway, watch=_rounds(watch, run.name), state_memory=state_memory, workers=workers
        )
    _finished(finished, json)


def tune(
    table: TableArgument,
    client: ClientOption,
    target: TargetOption,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="folder for the study; a search that is there goes on")
    ],
    algorithm: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="method whose settings are searched; ditto if not given"),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, metavar="N", help="settings tried in all")] = 30,
    rounds: RoundsOption = 100,
    sampler: Annotated[
        str, typer.Option(metavar="NAME", help="tpe (between declared values) or grid")
    ] = "tpe",
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="trials at the same time, in processes")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="hyperparameter that is not searched, such as steps=1"
        ),
    ] = None,
    metric: MetricOption = None,
    model: ModelOption = "linear",
    weights: ClassWeightsOption = None,
    device: DeviceOption = "cpu",
    event: EventOption = None,
    cluster: ClusterOption = None,
    task: TaskOption = None,
    drop: DropOption = None,
    keep: KeepOption = None,
    seed: SeedOption = 0,
    split: SplitOption = SPLIT_TEXT,
    json: JsonOption = None,
) -> None:
    """Search a method's settings on validation rows with Optuna: pruned, resumable, in parallel.

    Test rows are not read. The last line is the command that trains with what was found.
    """
    require_place(json)
    algorithm = method_for(model, algorithm)
    method = make(algorithm, **assignments(settings or []))
    source = find_table(table)
    data = {
        "source": source,
        "client": client,
        "target": target,
        "cluster": grouping_columns(cluster),
        **({} if event is None else {"event": event}),
        "task": task,
        "drop": tuple(drop or ()),
        "keep": tuple(keep or ()),
        "split": shares(split),
        "seed": seed,
        "model": model,
        **({} if weights is None else {"class_weights": class_weights(weights)}),
        "device": device,
    }
    with console.progress() as watch:
        found = search_table(
            out,
            method,
            data,
            trials=trials,
            rounds=rounds,
            sampler=sampler,
            jobs=jobs,
            watch=watch,
            metric=metric,
        )
    console.show(as_table(found))
    usual = make(algorithm).settings()
    changed = {name: value for name, value in found.algorithm.settings().items() if value != usual[name]}
    by = f"--metric {metric} " if metric else ""
    kind = f"--model {model} " if model != "linear" else ""
    kind += f"--class-weights {weights} " if weights else ""
    kind += f"--event {event} " if event else ""
    options = " ".join(f"--set {name}={value}" for name, value in changed.items())
    console.show(
        f"coterie fit {table} --client {client} --target {target} --algorithm {algorithm} "
        f"{options} {kind}--rounds {rounds} --select best {by}--seed {seed} --out RUN"
    )
    write_json(json, found.json())


def _rounds(watch: Callable[[str, int, int], None], what: str) -> Callable[[int, int], None]:
    return lambda t, rounds: watch(what, t, rounds)


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Say, when the user stops a run or a worker dies, how to go on with it."""
    try:
        yield
    except (KeyboardInterrupt, WorkerLost):
        if (folder / "config.toml").exists():
            console.notes([f"Stopped. Go on with: coterie resume {folder}"])
        elif journal_of(folder).exists():
            console.notes(["Stopped. The same command goes on where the race is."])
        raise


def _finished(run: Run, json: Path | None) -> None:
    console.notes(run_notes(run))
    console.show(run_table(run), f"Run folder: {run.folder}")
    if run.folder is not None:
        if run.fed.texts is not None:
            console.show(f"Adapters: {keep_adapters(run)}")
        if importlib.util.find_spec("plotly") is not None:
            title = f"{run.algorithm.name}: weights between clients"
            save_weights(run.folder / "weights.html", run.history, run.fed.names, run.fed.clusters, title)
        report_beside(run.folder)
    write_json(json, run_summary(run))

"""Train where the data are, with a server and a node on every machine that holds rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie._core import files
from coterie._core.errors import SettingError, nearest
from coterie._core.files import read_toml
from coterie.algorithms import make
from coterie.cli import console, federate_trust
from coterie.cli.arguments import (
    AggregateOption,
    ClientOption,
    ClusterOption,
    DeltaOption,
    DropOption,
    EpsilonOption,
    JsonOption,
    KeepOption,
    L2Option,
    ModelOption,
    RoundsOption,
    SeedOption,
    SetOption,
    TargetOption,
    TaskOption,
    UnitOption,
    assignments,
    known_and_groups,
    privacy_of,
    require_place,
    write_json,
)
from coterie.cli.models import report_beside
from coterie.data.federated import Roles
from coterie.deploy import demo as demonstration
from coterie.deploy import federation_folder, stock_node
from coterie.deploy.federation_plan import promised
from coterie.deploy.membership import NODE_CONFIG
from coterie.deploy.policy import Policy
from coterie.engine.aggregate import Aggregate
from coterie.models.table_models import TABLE_MODELS
from coterie.train.private import as_plan

app = typer.Typer(
    no_args_is_help=True,
    help="Train where the data are, with a server and a node on every machine that holds rows.",
    epilog="Example: coterie federate demo",
)

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="folder written by `federate init`")]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="run without TLS, on 127.0.0.1 only; keys are still checked")
]
AlgorithmOption = Annotated[str, typer.Option(metavar="NAME", help="method; `coterie algorithms` lists them")]
DeadlineOption = Annotated[
    float, typer.Option(min=0.1, metavar="SECONDS", help="time limit for a node to answer a call")
]


def _log(text: str) -> None:
    """Print a line of the server's or the demo's log."""
    typer.echo(text)


@app.command(
    epilog="Example: coterie federate init hearts --node cleveland --node hungary --client hospital --target sick "
    "--host server.example.org"
)
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder to create, or to add nodes to")],
    node: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=CLIENT,...]",
            help="make the key of a node here, too; nodes that `join` make their own",
        ),
    ] = None,
    client: ClientOption = "client",
    target: TargetOption = "target",
    cluster: ClusterOption = None,
    task: TaskOption = None,
    drop: DropOption = None,
    keep: KeepOption = None,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="host name or address of the server (may be repeated)"),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="port of the server")] = 8765,
) -> None:
    """Set up a federation: certificates, a key for every node, start scripts and a README."""
    nodes: dict[str, list[str]] = {}
    for text in node or ():
        name, _, clients = text.partition("=")
        nodes[name] = [part for part in clients.split(",") if part]
    known, groups = known_and_groups(cluster)
    roles = Roles(client, target, known, task, tuple(drop or ()), tuple(keep or ()), groups)
    made = federation_folder.init(folder, nodes, roles, host or (), port)
    console.show(f"{made.path}: {len(made.nodes)} nodes. {made.path / 'README.md'} says what to copy where.")


@app.command(epilog="Example: coterie federate server hearts")
def server(
    folder: FolderArgument,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="address to listen on")] = "0.0.0.0",
    insecure: InsecureOption = False,
) -> None:
    """Run the server (Flower's SuperLink), with TLS and node keys, until it is stopped."""
    opened = federation_folder.FederationFolder.open(folder)
    listen = "127.0.0.1" if insecure and host == "0.0.0.0" else host
    federation_folder.serve(opened, listen, None, insecure, _log)


@app.command(epilog="Example: coterie federate node nodes/cleveland --data cleveland.csv --client cleveland")
def node(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder of the node, nodes/NAME")],
    data: Annotated[str, typer.Option(metavar="FILE", help="table with the rows of this node")] = "",
    client: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="client these rows belong to; read from the client column if not given"
        ),
    ] = None,
    server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="the server, if different from node.toml")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder for the state and models of the clients")
    ] = None,
    stock: Annotated[
        bool, typer.Option("--stock", help="use Flower's SuperNode, which starts a process for every message")
    ] = False,
    approve: Annotated[
        bool,
        typer.Option("--approve", help="let every run wait for `federate approve`, whatever the policy says"),
    ] = False,
    show_policy: Annotated[
        bool, typer.Option("--show-policy", help="explain the node's policy in plain words, and stop")
    ] = False,
    insecure: InsecureOption = False,
) -> None:
    """Run a node. Its rows and its clients' models stay on this machine; its policy says what else does."""
    if show_policy:
        console.show(*Policy.read(federation_folder.policy_path(folder)).explain())
        return
    if not data:
        raise SettingError("--data FILE: name the table with the rows of this node")
    name = read_toml(folder / NODE_CONFIG)["name"]

    def log(text: str) -> None:
        typer.echo(f"{name}: {text}")

    if stock:
        stock_node.serve(folder, data, client, server, insecure, state)
    else:
        federation_folder.serve_node(folder, data, client, server, insecure, log, state, approve)


@app.command(epilog="Example: coterie federate run hearts --algorithm ditto --rounds 50 --set lam=0.3")
def run(
    folder: FolderArgument,
    algorithm: AlgorithmOption = "ditto",
    settings: SetOption = None,
    rounds: RoundsOption = 100,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="name of the run folder")] = None,
    seed: SeedOption = 0,
    select: Annotated[
        str, typer.Option(metavar="WHICH", help="models to deploy: 'last', or 'best' by validation loss")
    ] = "last",
    l2: L2Option = None,
    model: ModelOption = "linear",
    deadline: DeadlineOption = 60.0,
    wait: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="time limit for nodes to appear at the start")
    ] = 60.0,
    checkpoint_every: Annotated[
        int, typer.Option(min=0, metavar="N", help="rounds between checkpoints; 0 checkpoints by time")
    ] = 0,
    evaluate_every: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="rounds between evaluations; about twenty in all if not given"),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="NAME", help="continue this interrupted run instead of starting one")
    ] = None,
    secure: Annotated[
        bool, typer.Option("--secure", help="secure aggregation: the server learns sums of answers only")
    ] = False,
    aggregate: AggregateOption = None,
    epsilon: EpsilonOption = None,
    delta: DeltaOption = 1e-5,
    unit: UnitOption = "client",
    detach: Annotated[bool, typer.Option("--detach", help="start the run and return")] = False,
    insecure: InsecureOption = False,
    json: JsonOption = None,
) -> None:
    """Start a run on the server's machine and follow it. Ctrl-C leaves it running; `attach` follows it again."""
    require_place(json)
    opened = federation_folder.FederationFolder.open(folder)
    if resume is not None:
        job = opened.job(resume)
        federation_folder.submit(opened, [job], insecure)
    else:
        method = make(algorithm, **assignments(settings or []))
        if model not in TABLE_MODELS:
            raise SettingError(f"no model {model!r} for tables.{nearest(model, TABLE_MODELS)}")
        if select not in ("last", "best"):
            raise SettingError(f"--select {select!r}: choose 'last' or 'best'")
        plan = {
            "rounds": rounds,
            "select": select,
            "checkpoint_every": checkpoint_every,
            "evaluate_every": evaluate_every,
        }
        if aggregate is not None:
            plan["aggregate"] = str(Aggregate.parse(aggregate))
        plan |= as_plan(promised(privacy_of(epsilon, delta, unit), secure))
        job = federation_folder.start(
            opened,
            method,
            name,
            plan,
            insecure,
            seed=seed,
            l2=l2,
            model=model,
            deadline=deadline,
            patience=wait,
            secure=secure,
        )
    if detach:
        console.show(f"Started {job.name}. Follow it: coterie federate attach {folder}")
        return
    _follow(folder, job, json)


@app.command(epilog="Example: coterie federate attach hearts")
def attach(
    folder: FolderArgument,
    name: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="run to follow; the newest if not given")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Follow a run in progress, or show the result of a finished one."""
    require_place(json)
    _follow(folder, federation_folder.FederationFolder.open(folder).job(name), json)


@app.command(epilog="Example: coterie federate demo --algorithm ditto --rounds 20")
def demo(
    folder: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="folder to create; a temporary one if not given"),
    ] = None,
    algorithm: AlgorithmOption = "ditto",
    settings: SetOption = None,
    rounds: RoundsOption = 20,
    json: JsonOption = None,
) -> None:
    """Run a whole federation on this machine: a server, four hospitals as nodes, TLS, keys and a run."""
    require_place(json)
    method = make(algorithm, **assignments(settings or []))
    with demonstration.hospitals(folder, _log) as opened:
        _log(f"federation in {opened.path}")
        job = demonstration.start(opened, method, rounds)
        _follow(opened.path, job, json)
        for place in sorted(opened.path.glob("nodes/*/state/*/run/models")):
            console.show(f"Models of a node, which only it holds: {place}")


def _follow(folder: Path, job: Path, json: Path | None) -> None:
    """Show progress until the run ends, then its summary."""
    shown = 0
    try:
        with console.progress() as bar:

            def watch(told: dict[str, Any]) -> None:
                nonlocal shown
                fresh = federation_folder.notes(job)[shown:]
                shown += len(fresh)
                console.notes(fresh)
                if told:
                    here = f", {told['here']} of {told['nodes']} nodes" if told.get("here") else ""
                    bar(f"{job.name}: {told['state']}{here}", told["round"], told["rounds"])

            federation_folder.follow(job, watch)
    except KeyboardInterrupt:
        console.notes([f"The run continues. Follow it: coterie federate attach {folder} --run {job.name}"])
        raise typer.Exit(130) from None
    summary = job / "summary.txt"
    if summary.exists():
        console.show(summary.read_text(encoding="utf-8").rstrip())
    out = files.read_json(job / "request.json")["out"]
    console.show(f"Run folder: {out}")
    report_beside(Path(out))
    if json is not None:
        write_json(json, files.read_json(job / "summary.json"))


federate_trust.register(app)

"""`coterie federate`: the same methods where the data are, on machines that hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.arguments import (
    ClientOption,
    ClusterOption,
    DropOption,
    JsonOption,
    L2Option,
    RoundsOption,
    SeedOption,
    SetOption,
    TargetOption,
    TaskOption,
    assignments,
    require_place,
    write_json,
)
from coterie.cli.models import report_beside
from coterie.errors import SettingError
from coterie.report import console

app = typer.Typer(
    no_args_is_help=True,
    help="Train where the data are: a server, and a node on every machine that holds rows.",
    epilog="Example: coterie federate demo",
)

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="folder that `federate init` made")]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="without TLS; for 127.0.0.1 only, keys are still checked")
]
AlgorithmOption = Annotated[str, typer.Option(metavar="NAME", help="method; `coterie algorithms` lists them")]
DeadlineOption = Annotated[
    float, typer.Option(min=0.1, metavar="SECONDS", help="how long a node is waited for in a call")
]


def _log(text: str) -> None:
    typer.echo(text)


@app.command(
    epilog="Example: coterie federate init hearts --node cleveland --node hungary --client hospital --target sick "
    "--host server.example.org"
)
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder to make, or to add nodes to")],
    node: Annotated[
        list[str],
        typer.Option(metavar="NAME[=CLIENT,...]", help="a node, and its clients if not one of its name"),
    ],
    client: ClientOption = "client",
    target: TargetOption = "target",
    cluster: ClusterOption = None,
    task: TaskOption = None,
    drop: DropOption = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="name or address by which nodes reach the server (may be repeated)"
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="the server's port")] = 8765,
) -> None:
    """Make a federation: certificates, a key for every node, start scripts, and what to copy where."""
    from coterie.data.federated import Roles
    from coterie.runs import federate

    nodes: dict[str, list[str]] = {}
    for text in node:
        name, _, clients = text.partition("=")
        nodes[name] = [part for part in clients.split(",") if part]
    roles = Roles(client, target, cluster, task, tuple(drop or ()))
    made = federate.init(folder, nodes, roles, host or (), port)
    console.show(
        f"{made.path}: {len(made.nodes)} nodes. Read {made.path / 'README.md'} for what to copy where."
    )


@app.command(epilog="Example: coterie federate server hearts")
def server(
    folder: FolderArgument,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="address to listen on")] = "0.0.0.0",
    insecure: InsecureOption = False,
) -> None:
    """Run the server (Flower's SuperLink) until it is stopped. TLS and the keys of nodes are on."""
    from coterie.runs import federate

    opened = federate.FederationFolder.open(folder)
    listen = "127.0.0.1" if insecure and host == "0.0.0.0" else host
    federate.serve(opened, listen, None, insecure, _log)


@app.command(epilog="Example: coterie federate node nodes/cleveland --data cleveland.csv --client cleveland")
def node(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="the node's own folder, nodes/NAME")],
    data: Annotated[str, typer.Option(metavar="FILE", help="table with this node's rows")],
    client: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="whose rows these are; without it, the client column says so"),
    ] = None,
    server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="the server, if not as in node.toml")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="where clients keep their state and models")
    ] = None,
    stock: Annotated[
        bool, typer.Option("--stock", help="use Flower's SuperNode, which starts a process for every message")
    ] = False,
    insecure: InsecureOption = False,
) -> None:
    """Run a node: its rows stay here, and so do its clients' models."""
    from coterie.runs import federate, federate_stock
    from coterie.runs.files import read_toml

    name = read_toml(folder / federate.NODE_CONFIG)["name"]

    def log(text: str) -> None:
        typer.echo(f"{name}: {text}")

    if stock:
        federate_stock.serve(folder, data, client, server, insecure, state)
    else:
        federate.serve_node(folder, data, client, server, insecure, log, state)


@app.command(epilog="Example: coterie federate run hearts --algorithm ditto --rounds 50 --set lam=0.3")
def run(
    folder: FolderArgument,
    algorithm: AlgorithmOption = "ditto",
    settings: SetOption = None,
    rounds: RoundsOption = 100,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="name of the run folder")] = None,
    seed: SeedOption = 0,
    select: Annotated[
        str, typer.Option(metavar="WHICH", help="deploy the 'last' models or the 'best' by validation loss")
    ] = "last",
    l2: L2Option = None,
    deadline: DeadlineOption = 60.0,
    wait: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="how long nodes are waited for at the start")
    ] = 60.0,
    checkpoint_every: Annotated[
        int, typer.Option(min=0, metavar="N", help="rounds between checkpoints; 0 goes by time")
    ] = 0,
    evaluate_every: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="rounds between scores; about twenty in all if not given"),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="NAME", help="go on with an interrupted run instead of starting one")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="start it and leave")] = False,
    insecure: InsecureOption = False,
    json: JsonOption = None,
) -> None:
    """Start a run on the server's machine and follow it. Ctrl-C leaves it running; `attach` follows it again."""
    from coterie.algorithms import make
    from coterie.runs import federate

    require_place(json)
    opened = federate.FederationFolder.open(folder)
    if resume is not None:
        job = opened.job(resume)
        federate.submit(opened, [job], insecure)
    else:
        method = make(algorithm, **assignments(settings or []))
        if select not in ("last", "best"):
            raise SettingError(f"--select {select!r}: it is 'last' or 'best'")
        plan = {
            "rounds": rounds,
            "select": select,
            "checkpoint_every": checkpoint_every,
            "evaluate_every": evaluate_every,
        }
        job = federate.start(
            opened, method, name, plan, insecure, seed=seed, l2=l2, deadline=deadline, patience=wait
        )
    if detach:
        console.show(f"Started {job.name}. Follow it: coterie federate attach {folder}")
        return
    _follow(folder, job, json)


@app.command(epilog="Example: coterie federate attach hearts")
def attach(
    folder: FolderArgument,
    name: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="the run; the newest if not given")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Follow a run that is going on, or show the end of one."""
    from coterie.runs import federate

    require_place(json)
    _follow(folder, federate.FederationFolder.open(folder).job(name), json)


@app.command(epilog="Example: coterie federate demo --algorithm ditto --rounds 20")
def demo(
    folder: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="folder to make; a temporary one if not given")
    ] = None,
    algorithm: AlgorithmOption = "ditto",
    settings: SetOption = None,
    rounds: RoundsOption = 20,
    json: JsonOption = None,
) -> None:
    """Everything on this machine: a server, four hospitals as nodes with TLS and keys, and a run."""
    from coterie.algorithms import make
    from coterie.runs import federate_demo

    require_place(json)
    method = make(algorithm, **assignments(settings or []))
    with federate_demo.hospitals(folder, _log) as opened:
        _log(f"federation in {opened.path}")
        job = federate_demo.start(opened, method, rounds)
        _follow(opened.path, job, json)
        for place in sorted(opened.path.glob("nodes/*/state/*/run/models")):
            console.show(f"A node's models, which only it has: {place}")


def _follow(folder: Path, job: Path, json: Path | None) -> None:
    """Show progress until the run ends, then what a local run shows."""
    from coterie.runs import federate, files

    shown = 0
    try:
        with console.progress() as bar:

            def watch(told: dict[str, Any]) -> None:
                nonlocal shown
                fresh = federate.notes(job)[shown:]
                shown += len(fresh)
                console.notes(fresh)
                if told:
                    here = f", {told['here']} of {told['nodes']} nodes" if told.get("here") else ""
                    bar(f"{job.name}: {told['state']}{here}", told["round"], told["rounds"])

            federate.follow(job, watch)
    except KeyboardInterrupt:
        console.notes([f"The run goes on. Follow it: coterie federate attach {folder} --run {job.name}"])
        raise typer.Exit(130) from None
    summary = job / "summary.txt"
    if summary.exists():
        console.show(summary.read_text(encoding="utf-8").rstrip())
    out = files.read_json(job / "request.json")["out"]
    console.show(f"Run folder: {out}")
    report_beside(Path(out))
    if json is not None:
        write_json(json, files.read_json(job / "summary.json"))

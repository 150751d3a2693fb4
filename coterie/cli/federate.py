"""Train where the data are, with a server and a node on every machine that holds rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie._core.errors import SettingError, nearest
from coterie._core.files import read_toml
from coterie.algorithms import make
from coterie.cli import console, federate_advice, federate_trust
from coterie.cli.arguments import (
    AggregateOption,
    BufferOption,
    ClientOption,
    ClusterOption,
    DeltaOption,
    DropOption,
    EpsilonOption,
    JsonOption,
    KeepOption,
    L2Option,
    ModelsOption,
    RoundsOption,
    SeedOption,
    SetOption,
    StalenessOption,
    TargetOption,
    TaskOption,
    UnitOption,
    assignments,
    known_and_groups,
    lateness_of,
    model_settings,
    privacy_of,
    require_place,
)
from coterie.cli.federate_follow import follow
from coterie.data.federated import Roles
from coterie.deploy import demo as demonstration
from coterie.deploy import federation_folder, stock_node
from coterie.deploy.federation_plan import promised
from coterie.deploy.logs import Log
from coterie.deploy.membership import NODE_CONFIG
from coterie.deploy.policy import ROLES, Policy
from coterie.deploy.policy_words import explain
from coterie.engine.aggregate import Aggregate
from coterie.models.installed import install, installed
from coterie.models.table_models import TABLE_MODELS
from coterie.models.zoo import FACTORIES
from coterie.train.private import as_plan
from coterie.train.run import REFIT

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
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


LogOption = Annotated[
    str, typer.Option("--log", metavar="FORM", help="'text', or 'json' for one object a line")
]


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
    kind: federate_trust.KindOption = "table",
) -> None:
    """Set up a federation: certificates, a key for every node, start scripts and a README."""
    nodes: dict[str, list[str]] = {}
    for text in node or ():
        name, _, clients = text.partition("=")
        nodes[name] = [part for part in clients.split(",") if part]
    known, groups = known_and_groups(cluster)
    federate_trust.require_kind(kind)
    roles = Roles(client, target, known, task, tuple(drop or ()), tuple(keep or ()), groups)
    made = federation_folder.init(folder, nodes, ROLES.get(kind, roles), host or (), port, kind=kind)
    console.show(f"{made.path}: {len(made.nodes)} nodes. {made.path / 'README.md'} says what to copy where.")


@app.command(epilog="Example: coterie federate server hearts")
def server(
    folder: FolderArgument,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="address to listen on")] = "0.0.0.0",
    page: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            help="port of the page on 127.0.0.1; the one after the server's if not given, 0 for no page",
        ),
    ] = None,
    log: LogOption = "text",
    insecure: InsecureOption = False,
) -> None:
    """Run the server (Flower's SuperLink), with TLS, node keys and a page to watch it, until it is stopped."""
    written = Log("server" if log == "json" else "", log)
    opened = federation_folder.FederationFolder.open(folder)
    listen = "127.0.0.1" if insecure and host == "0.0.0.0" else host
    federation_folder.serve(opened, listen, None, insecure, written, page)


@app.command(epilog="Example: coterie federate node nodes/cleveland --data cleveland.csv --client cleveland")
def node(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder of the node, nodes/NAME")],
    data: Annotated[
        str, typer.Option(metavar="PATH", help="table, or folder of images or texts, of this node")
    ] = "",
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
    models: ModelsOption = None,
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
    log: LogOption = "text",
    insecure: InsecureOption = False,
) -> None:
    """Run a node. Its rows and its clients' models stay on this machine; its policy says what else does."""
    if show_policy:
        console.show(*explain(Policy.read(federation_folder.policy_path(folder))))
        return
    if not data:
        raise SettingError("--data PATH: name the table, or the folder of images or texts, of this node")
    written = Log(read_toml(folder / NODE_CONFIG)["name"], log)
    written.take_over()
    if stock:
        stock_node.serve(folder, data, client, server, insecure, state, models or ())
    else:
        federation_folder.serve_node(
            folder, data, client, server, insecure, written, state, approve, models or ()
        )


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
    refit: Annotated[
        str,
        typer.Option(
            metavar="ROWS",
            help="after scoring, train again on 'validation' rows too, or 'all', at nodes whose policies allow it",
        ),
    ] = "none",
    l2: L2Option = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="what clients train: linear (tables), cnn (images), mlp, resnet9, or a model of --models",
        ),
    ] = None,
    set_model: Annotated[
        list[str] | None,
        typer.Option("--set-model", metavar="NAME=VALUE", help="setting of the model (may be repeated)"),
    ] = None,
    models: ModelsOption = None,
    context: Annotated[
        int, typer.Option(min=1, metavar="N", help="tokens that are predicted per row of texts")
    ] = 64,
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
    relay: Annotated[
        bool,
        typer.Option("--relay", help="nodes exchange models among themselves; the server cannot read them"),
    ] = False,
    aggregate: AggregateOption = None,
    buffer: BufferOption = None,
    staleness: StalenessOption = None,
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
        chosen = _model(opened.kind, model, models or [])
        if select not in ("last", "best"):
            raise SettingError(f"--select {select!r}: choose 'last' or 'best'")
        if refit not in REFIT:
            raise SettingError(f"--refit {refit!r}: choose {', '.join(map(repr, REFIT))}")
        if refit != "none" and epsilon is not None:
            raise SettingError("--refit would read the rows again without noise; leave it out with --epsilon")
        plan = {
            "rounds": rounds,
            "select": select,
            "checkpoint_every": checkpoint_every,
            "evaluate_every": evaluate_every,
            "refit": refit,
        }
        if aggregate is not None:
            plan["aggregate"] = str(Aggregate.parse(aggregate))
        if relay and not method.relays:
            raise SettingError(f"--relay: {method.name} cannot run among nodes; choose pdl-tc, fc or cobo")
        late = lateness_of(buffer, staleness)
        if late is not None:
            late.require(method)
            if secure or epsilon is not None:
                raise SettingError(
                    "late answers cannot join masked or noisy sums; leave out --secure and --epsilon"
                )
            plan |= late.to_plan()
        plan |= as_plan(promised(privacy_of(epsilon, delta, unit), secure))
        job = federation_folder.start(
            opened,
            method,
            name,
            plan,
            insecure,
            seed=seed,
            l2=l2,
            model=chosen,
            models=[str(path.absolute()) for path in models or ()],
            model_settings=model_settings(set_model or []),
            context=context,
            deadline=deadline,
            patience=wait,
            secure=secure,
            relay=relay,
        )
    if detach:
        console.show(f"Started {job.name}. Follow it: coterie federate attach {folder}")
        return
    follow(folder, job, json)


def _model(kind: str, name: str | None, models: list[Path]) -> str:
    """Return the name of the model to train; raise `SettingError` if there is none of this name."""
    names = [one for path in models for one in install(path)]
    usual = {"table": "linear", "images": "cnn", "texts": names[0] if names else None}[kind]
    if name is None and usual is None:
        raise SettingError("texts need a language model: --models FOLDER, which nodes have installed too")
    built_in = {"table": list(TABLE_MODELS), "images": list(FACTORIES), "texts": []}[kind]
    chosen, known = str(name or usual), [*built_in, *installed()]
    if chosen not in known:
        raise SettingError(f"no model {chosen!r} for {kind}.{nearest(chosen, known)} --models installs yours")
    return chosen


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
    follow(folder, federation_folder.FederationFolder.open(folder).job(name), json)


@app.command(epilog="Example: coterie federate demo --data images --rounds 20")
def demo(
    folder: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="folder to create; a temporary one if not given"),
    ] = None,
    algorithm: AlgorithmOption = "ditto",
    settings: SetOption = None,
    rounds: RoundsOption = 20,
    data: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="table: four hospitals; images: digits, each node's turned; texts: made up, with adapters",
        ),
    ] = "table",
    json: JsonOption = None,
) -> None:
    """Run a whole federation on this machine: a server, four nodes, TLS, keys and a run."""
    require_place(json)
    federate_trust.require_kind(data)
    method = make(algorithm, **assignments(settings or []))
    with demonstration.DEMOS[data](folder, typer.echo) as opened:
        typer.echo(f"federation in {opened.path}")
        job = demonstration.start(opened, method, rounds, **demonstration.request(opened))
        follow(opened.path, job, json)
        for place in sorted(opened.path.glob("nodes/*/state/*/run/models")):
            console.show(f"Models of a node, which only it holds: {place}")


federate_trust.register(app)
federate_advice.register(app)

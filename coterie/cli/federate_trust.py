"""Commands of owners and operators: keys and certificates, policies, approvals and audit logs of a federation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie._core.errors import SettingError
from coterie._core.printable import printable
from coterie.cli import console
from coterie.cli.arguments import (
    ClientOption,
    ClusterOption,
    DropOption,
    ModelsOption,
    TargetOption,
    TaskOption,
    known_and_groups,
)
from coterie.data import bundled, tables
from coterie.data.federated import Roles
from coterie.data.image_folders import image_shape
from coterie.deploy import audit as logs
from coterie.deploy import federation_folder, keys, live_page, membership
from coterie.deploy import policy as policies
from coterie.deploy.consent import Consent
from coterie.deploy.policy import Policy
from coterie.deploy.policy_words import explain
from coterie.models.installed import install

DirArgument = Annotated[Path, typer.Argument(metavar="DIR", help="folder written by `federate init`")]
NodeArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="folder of the node")]
KindOption = Annotated[
    str, typer.Option("--kind", metavar="KIND", help="what nodes have: table, images or texts")
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="name of the node")]


def require_kind(kind: str) -> None:
    """Raise `SettingError` unless nodes can have such data."""
    if kind not in ("table", *policies.ROLES):
        raise SettingError(f"no kind of data {kind!r}: choose table, images or texts")


def join(
    folder: NodeArgument,
    name: NameArgument,
    renew: Annotated[
        bool, typer.Option("--renew", help="ask for a new certificate for the key that is there")
    ] = False,
) -> None:
    """Make a node's key and a request for a certificate, at the node. The key never leaves its folder."""
    request = membership.join(folder, name, renew)
    console.show(f"Send {request} to the federation's operator, and put what comes back into {folder}.")


def sign(
    folder: DirArgument,
    request: Annotated[Path, typer.Argument(metavar="REQUEST", help="file that `federate join` made")],
    clients: Annotated[
        str, typer.Option(metavar="NAME,...", help="clients of the node; one of the same name if not given")
    ] = "",
    renew: Annotated[bool, typer.Option("--renew", help="replace the certificate of a node")] = False,
) -> None:
    """Sign a node's request and admit the node, at the machine that has `ca/`."""
    federation_folder.FederationFolder.open(folder)
    place = membership.sign(folder, request, [part for part in clients.split(",") if part], renew)
    console.show(
        f"Signed {place.name}. SHA-256 of its certificate: {keys.fingerprint(place / keys.CERTIFICATE)}"
    )
    console.show(f"Send node.crt, ca.crt and node.toml of {place} to the node; none of them is secret.")


def revoke(folder: DirArgument, name: NameArgument) -> None:
    """Shut a node out at once, and for good unless it is signed again with another key."""
    membership.revoke(folder, name)
    console.show(f"{name} is revoked. A running server notices at its next request.")


def renew_server(folder: DirArgument) -> None:
    """Give the server a new key and certificate; restart the server afterwards."""
    federation_folder.FederationFolder.open(folder)
    membership.renew_server(folder)
    console.show(f"Renewed {folder / 'server' / 'server.crt'}. Restart the server; nodes notice nothing.")


def policy(
    folder: NodeArgument,
    data: Annotated[
        str, typer.Option(metavar="PATH", help="table, or folder of images or texts, of this node")
    ],
    client: ClientOption = "client",
    target: TargetOption = "target",
    cluster: ClusterOption = None,
    task: TaskOption = None,
    drop: DropOption = None,
    min_rows: Annotated[
        int, typer.Option(min=1, metavar="N", help="clients with fewer rows take no part")
    ] = 20,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD", help="also allow this method, with all of its phases (may be repeated)"
        ),
    ] = None,
    allow_model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="also allow this model, such as mlp (may be repeated)"),
    ] = None,
    models: ModelsOption = None,
    kind: KindOption = "table",
    approve: Annotated[bool, typer.Option("--approve", help="let every run wait for your approval")] = False,
    epsilon: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="E", help="privacy of rows that all runs together may cost; inf: no limit"
        ),
    ] = math.inf,
) -> None:
    """Write a strict policy for a node's table, images or texts and explain it. Edit policy.toml to change it."""
    federation_folder.require_new_policy(folder)
    require_kind(kind)
    own = [name for path in models or () for name in install(path)]
    more: dict[str, Any] = {"min_rows": min_rows, "approve": approve, "epsilon": epsilon}
    if kind == "images":
        strict = Policy.for_images(image_shape(data), **more)
    elif kind == "texts":
        strict = Policy.for_texts(**more)
    else:
        known, groups = known_and_groups(cluster)
        roles = Roles(client, target, known, task, tuple(drop or ()), groups=groups)
        strict = Policy.strict(tables.read(bundled.resolve(data)), roles, **more)
    made = strict.allowing(allow or (), [*own, *(allow_model or ())])
    made.write(folder / policies.FILE)
    console.show(f"{folder / policies.FILE}:", *explain(made))


def approve(
    folder: NodeArgument,
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="run to approve; lists them if not given")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="state folder of the node, if not FOLDER/state")
    ] = None,
) -> None:
    """Show the runs that wait for the owner of a node, with how they fit its policy, or approve one."""
    place = folder / "state" if state is None else state
    Policy.read(federation_folder.policy_path(folder))  # a folder without one is no node's
    consent = Consent(place)
    if run is not None:
        consent.approve(run)
        console.show(f"Approved {run}.")
        return
    waiting = consent.pending()
    for name, told in waiting.items():
        console.show(
            f"{name}: {printable(told['algorithm'], 500)}, {printable(told.get('rounds'), 30)} rounds"
        )
        console.show(
            f"  target {printable(told['roles'].get('target'))}; columns {', '.join(told['columns'])}"
        )
        protected = [
            "secure sums" if told.get("secure") else "single answers",
            f"privacy {printable(told['privacy'])}" if told.get("privacy") else "no noise",
        ]
        console.show(f"  model {printable(told.get('model'), 60)}; {', '.join(protected)}")
        fits = told["problems"] or ["it fits the policy"]
        console.show(*(f"  {printable(line)}" for line in fits))
    console.show(f"{len(waiting)} runs wait. Approve one: coterie federate approve {folder} RUN")


def audit(
    log: Annotated[
        Path, typer.Argument(metavar="LOG", help="audit.log of a node's state, a job or a server")
    ],
    against: Annotated[
        Path | None,
        typer.Option(metavar="LOG", help="the log of a job, which has seen hashes of the node's log"),
    ] = None,
    node: Annotated[str | None, typer.Option(metavar="NAME", help="the node whose log this is")] = None,
    last: Annotated[int, typer.Option(min=0, metavar="N", help="entries to show")] = 10,
) -> None:
    """Check that nobody changed an audit log, and show its last entries."""
    heads = logs.heads_seen(against, node or "") if against is not None else []
    entries = list(logs.verify(log, heads))
    for entry in entries[max(0, len(entries) - last) :]:
        hidden = ("hash", "before", "n", "at", "sha256", "head")
        words = " ".join(f"{key}={value}" for key, value in entry.items() if key not in hidden)
        console.show(f"{entry['n']:>6} {entry['at']} {printable(words, 1000)}")
    compared = f", and has all {len(heads)} entries that {against} has seen" if against is not None else ""
    console.show(f"{log}: {len(entries)} entries, none changed{compared}.")


def nodes(
    folder: DirArgument,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="connect without TLS, on 127.0.0.1 only")
    ] = False,
) -> None:
    """List nodes, whether they are connected, and when certificates expire. The observer's token is enough."""
    opened = federation_folder.FederationFolder.open(folder)
    states = opened.operator(insecure, observe=True).nodes()
    for name in opened.nodes:
        certificate = opened.path / "nodes" / name / keys.CERTIFICATE
        days = (
            f", certificate valid for {keys.days_left(certificate):.0f} days" if certificate.exists() else ""
        )
        console.show(f"{name}: {printable(states.get(name, 'not registered'), 40)}{days}")


def page(
    folder: DirArgument,
    show: Annotated[bool, typer.Option("--open", help="also open it in this machine's browser")] = False,
) -> None:
    """Show the address of the page of a running server, with the observer's token; it lets one look, no more."""
    address = live_page.page_address(federation_folder.FederationFolder.open(folder))
    console.show(address)
    if show:
        typer.launch(address)


def health(folder: DirArgument) -> None:
    """Ask a running server who is connected and what it does, as JSON; exit with 2 if it does not answer."""
    console.show(json.dumps(live_page.health(federation_folder.FederationFolder.open(folder))))


EXAMPLES: dict[Callable[..., None], str] = {
    join: "coterie federate join cleveland cleveland",
    sign: "coterie federate sign hearts cleveland.csr --clients cleveland",
    revoke: "coterie federate revoke hearts cleveland",
    renew_server: "coterie federate renew-server hearts",
    policy: "coterie federate policy cleveland --data cleveland.csv --client hospital --target sick",
    approve: "coterie federate approve cleveland",
    audit: "coterie federate audit cleveland/state/audit.log",
    nodes: "coterie federate nodes hearts",
    page: "coterie federate page hearts",
    health: "coterie federate health hearts",
}


def register(app: typer.Typer) -> None:
    """Add these commands to `coterie federate`."""
    for function, example in EXAMPLES.items():
        app.command(function.__name__.replace("_", "-"), epilog=f"Example: {example}")(function)

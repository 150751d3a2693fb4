"""Plan a federated run: ask the nodes what they have, agree on one encoding, and open the run on every node."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coterie._core.errors import RunError, SettingError
from coterie.algorithms import Algorithm
from coterie.data import federated
from coterie.data.federated import Roles
from coterie.data.preprocess import Preprocessor, Statistics
from coterie.data.split import split_sizes
from coterie.data.table_source import TableSource
from coterie.deploy import array_plan, descriptions, secure_statistics, wire
from coterie.deploy.answers import explain
from coterie.deploy.remote import PATIENCE, Place, RemoteRuntime, Setup
from coterie.deploy.secure_sums import SumCaller
from coterie.deploy.transport import Envelope, Late, NodeCaller
from coterie.engine.build import encode_clusters
from coterie.engine.federation import Federation
from coterie.engine.from_table import SPLIT, encoded
from coterie.engine.privacy import Privacy
from coterie.engine.private_statistics import SHARE
from coterie.models.description import description, from_description
from coterie.models.installed import describe_installed, make_installed
from coterie.models.signature import signature
from coterie.models.table_models import TABLE_MODELS, table_model
from coterie.train.predict import fitted_to

FEDERATED = "federated"  # marks the data of a run that a resume cannot read from a file


@dataclass(frozen=True)
class RunRequest:
    """What a run should be, before any node is asked.

    Attributes
    ----------
    roles : Roles
        Which columns of the tables are used, and how.
    seed : int
        Seed of splits and random draws.
    split : tuple of float
        Shares of training, validation and test rows.
    l2 : float or None
        Ridge penalty of the model; None takes the default model of the task.
    model : dict or None
        Description of the model to train, if the method brings its own.
    kind : str
        Which model to train otherwise: a built-in one for these data, or one that is installed here and at nodes.
    data : str
        What the nodes have: "table", "images" or "texts".
    settings : dict or None
        Settings of the model.
    context : int
        Tokens that are predicted per row of texts.
    proposal : dict or None
        The algorithm, its settings and the rounds, which owners of nodes see before they approve a run.
    secure : bool
        Add the statistics of nodes up under masks.
    privacy : dict or None
        The budget of the run, of which the statistics take a share.
    """

    roles: Roles
    seed: int = 0
    split: tuple[float, float, float] = SPLIT
    l2: float | None = None
    model: dict[str, Any] | None = None
    kind: str = "linear"
    data: str = "table"
    settings: dict[str, Any] | None = None
    context: int = 64
    proposal: dict[str, Any] | None = None
    secure: bool = False
    privacy: dict[str, Any] | None = None


@dataclass(frozen=True)
class FederationPlan:
    """Everything that is needed to open a run, now or when it is resumed.

    Attributes
    ----------
    run : str
        Identifier of the run in messages.
    request : RunRequest
        What was asked for.
    names : list of str
        Clients in the order of the federation.
    nodes : dict of str to list of int
        Clients of each node, in the node's own order.
    preprocessor, model
        The shared encoding and the model, as JSON; None instead of an encoding for images and texts.
    classes : list of str
        Classes of images.
    clusters, cluster_names
        Known clusters of the clients, where there are any.
    warnings : list of str
        Remarks about the tables.
    rows : dict of str to list of int
        Numbers of rows of each node's clients, which are fixed from then on.
    """

    run: str
    request: RunRequest
    names: list[str]
    nodes: dict[str, list[int]]  # clients of each node, in its own order
    preprocessor: str | None
    model: dict[str, Any]
    clusters: list[int] | None
    cluster_names: list[str] | None
    warnings: list[str]
    rows: dict[str, list[int]] = dataclasses.field(default_factory=dict)  # told by nodes, in their own order
    classes: list[str] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> FederationPlan:
        """Return the plan that `to_json` wrote."""
        request = dict(stored["request"])
        request["roles"], request["split"] = Roles.from_json(request["roles"]), tuple(request["split"])
        return cls(**{**stored, "request": RunRequest(**request)})


def survey(
    caller: NodeCaller,
    nodes: Mapping[str, Sequence[str]],
    request: RunRequest,
    run: str,
    patience: float = PATIENCE,
) -> FederationPlan:
    """Ask all nodes for their clients, columns and statistics, and make one plan of them.

    Parameters
    ----------
    caller
        Sends messages to the nodes.
    nodes
        The nodes, each with the clients it is expected to have. A node that does not answer in time may join later with
        these.
    request
        What the run should be.
    run
        Identifier of the run.
    patience
        Seconds to wait for nodes.

    Returns
    -------
    FederationPlan
        The plan, which `connect` takes.

    Raises
    ------
    RunError
        No node answered.
    """
    answers = _greeted(caller, sorted(nodes), greeting(run, request), patience)
    told = _told(caller, answers, request.data)
    agreed = descriptions.agreed if request.data == "table" else array_plan.agreed
    told = agreed(told, nodes, request.roles, caller.note)
    if not told:
        raise RunError(
            f"none of {len(nodes)} nodes answered within {patience:g} s. Start them with `coterie federate node`, and "
            "check their output."
        )
    taken = {client for description in told.values() for client in description["clients"]}
    clients = {name: description["clients"] for name, description in told.items()}
    for name in sorted(nodes):
        expected = [client for client in nodes[name] if client not in taken]
        if not isinstance(answers[name], Late):
            continue  # who was left out may not join later
        if request.roles.cluster is None:
            clients[name] = list(federated.in_order(expected))
        else:
            caller.note(
                f"{name} cannot join this run later: the clusters of its clients are not known without it"
            )
    clients = dict(sorted(clients.items()))
    names = federated.client_order(clients)
    number = {name: k for k, name in enumerate(names)}
    ids = {node: [number[name] for name in mine] for node, mine in clients.items()}
    rows = {node: description["rows"] for node, description in told.items()}
    if request.data != "table":
        made, classes = array_plan.model(
            told, request.kind, request.settings or {}, request.l2, request.context
        )
        return FederationPlan(run, request, names, ids, None, made, None, None, [], rows, classes)
    spec = federated.merge(told, request.roles)
    described = request.model
    if described is not None:
        wanted = from_description(described)
    elif request.kind in TABLE_MODELS:
        wanted = table_model(request.kind, spec.task, request.l2)
    else:
        wanted = make_installed(request.kind, **(request.settings or {}))
    preprocessor, model = encoded(spec, _sums(caller, told, ids, request, spec, run), wanted)
    model = fitted_to(model, preprocessor)
    named = described is None and request.kind not in TABLE_MODELS
    made = describe_installed(request.kind, request.settings or {}, model) if named else description(model)
    codes, cluster_names = _clusters(told, clients, names, request.roles)
    return FederationPlan(
        run,
        request,
        names,
        ids,
        preprocessor.to_json(),
        made,
        codes,
        cluster_names,
        list(spec.warnings),
        rows,
    )


def greeting(run: str, request: RunRequest) -> dict[str, Any]:
    """Return the header of the first message of a run: what it will do, for nodes whose owners approve runs."""
    header: dict[str, Any] = {"kind": "hello", "run": run, "roles": request.roles.to_json()}
    if request.data != "table":
        header["data"] = request.data
    if request.secure or request.privacy is not None:
        header["secure"] = True
    return header if request.proposal is None else {**header, "proposal": request.proposal}


def connect(
    caller: NodeCaller,
    plan: FederationPlan,
    algorithm: Algorithm,
    dropout: float = 0.0,
    *,
    secure: bool = False,
    privacy: Privacy | None = None,
    relay: bool = False,
) -> Federation:
    """Open a run on all nodes and return the federation of their clients.

    Parameters
    ----------
    caller
        Sends messages to the nodes.
    plan
        What `survey` returned.
    algorithm
        The algorithm that the nodes are to run.
    dropout
        Probability with which a client is left out of a call, for experiments.
    secure
        Answers of nodes are only added up, under masks.
    privacy
        What the run may cost of the clients' privacy, with its number of rounds; nodes add the noise.
    relay
        Nodes run the server's side of the algorithm among themselves; the server carries messages it cannot read.

    Returns
    -------
    Federation
        Takes `fit` and `resume` with this algorithm.
    """
    request, n = plan.request, len(plan.names)
    model = from_description(plan.model)
    clusters = None if plan.clusters is None else torch.tensor(plan.clusters)
    settings = {
        "algorithm": {"name": algorithm.name, "settings": algorithm.settings()},
        "model": plan.model,
        "signature": signature(model),
        **_about_rows(plan),
    }
    if secure:
        settings["sums"] = {"secure": True}
    if relay:
        if secure or privacy is not None:
            raise SettingError("a relayed run has no answers to add up; leave out --secure and --epsilon")
        settings["relay"] = True
    if promised(privacy, secure) is not None:
        assert privacy is not None
        settings["privacy"] = {**privacy.to_json(), "clients": n}
    hello = greeting(plan.run, request)
    dtype = torch.float64 if plan.preprocessor is not None else torch.float32
    setup = Setup(
        plan.run, request.roles.to_json(), request.seed, request.split, model, settings, hello, dtype
    )
    places = []
    for name, mine in plan.nodes.items():
        ids = torch.tensor(mine, dtype=torch.long)
        own = [plan.names[k] for k in mine]
        told = torch.tensor(plan.rows[name]) if name in plan.rows and request.data != "texts" else None
        places.append(Place(name, ids, own, None if clusters is None else clusters[ids], told))
    remote = RemoteRuntime(caller, places, setup, n)
    rows = {split: torch.zeros(n, dtype=torch.long) for split in ("train", "validation", "test")}
    for ids, counts in remote.open(plan.nodes.keys(), max(caller.deadline, PATIENCE)):
        for split, count in counts.items():
            rows[split][ids] = count
    if not any(place.here for place in remote.places):
        raise RunError("no node could open this run; the notes above say why")
    source = None
    if plan.preprocessor is not None:
        source = TableSource(_options(plan), Preprocessor.from_json(plan.preprocessor), plan.warnings)
    return Federation(
        remote,
        model=model,
        names=plan.names,
        rows=rows,
        clusters=clusters,
        cluster_names=plan.cluster_names,
        seed=request.seed,
        dtype=dtype,
        device="cpu",
        dropout=dropout,
        table=source,
    )


def _about_rows(plan: FederationPlan) -> dict[str, Any]:
    """Return what nodes have to know to make rows of what they have."""
    if plan.preprocessor is not None:
        return {"preprocessor": plan.preprocessor}
    return {"classes": plan.classes} if plan.request.data == "images" else {"context": plan.request.context}


def _options(plan: FederationPlan) -> dict[str, Any]:
    """Return how the tables were read, as a run folder records it."""
    request = plan.request
    paid = (
        {}
        if request.privacy is None
        else {"paid": [SHARE * request.privacy[part] for part in ("epsilon", "delta")]}
    )
    return {
        **request.roles.to_json(),
        **paid,
        "drop": list(request.roles.drop),
        "split": list(request.split),
        FEDERATED: True,
    }


def promised(privacy: Privacy | None, secure: bool) -> Privacy | None:
    """Return what a run may cost; raise `SettingError` if nodes cannot keep that promise."""
    if privacy is not None and privacy.unit == "client" and not secure:
        raise SettingError("--epsilon for clients needs --secure, because nodes share the noise of a sum")
    return privacy


def _greeted(
    caller: NodeCaller, names: Sequence[str], hello: dict[str, Any], patience: float
) -> dict[str, wire.WireError | Envelope]:
    """Return answers to a greeting; greet nodes that are not connected again until patience ends."""
    answers: dict[str, wire.WireError | Envelope] = {}
    end = time.monotonic() + patience
    missing = list(names)
    while missing:
        left = end - time.monotonic()
        answers |= caller.ask({name: (hello, {}) for name in missing}, max(left, 0.0))
        missing = [name for name in names if isinstance(answers[name], Late)]
        if not missing or time.monotonic() >= end:
            break
        time.sleep(min(0.5, patience))
    return answers


def _told(caller: NodeCaller, answers: Mapping[str, wire.WireError | Envelope], data: str) -> dict[str, Any]:
    """Return what the nodes told of themselves; leave out those whose answers cannot be read."""
    told = {}
    for name, envelope in answers.items():
        try:
            if isinstance(envelope, wire.WireError):
                raise envelope
            if data == "table":
                descriptions.require(envelope[0].get("told"))
            else:
                array_plan.require(envelope[0].get("told"), data)
            told[name] = envelope[0]["told"]
        except Exception as problem:
            caller.note(f"{name} is left out: {explain(problem)}")
    return told


def _sums(
    caller: NodeCaller,
    told: Mapping[str, Any],
    ids: Mapping[str, list[int]],
    request: RunRequest,
    spec: Any,
    run: str,
) -> Statistics:
    """Return the statistics of all training rows, added up in the order of the nodes."""
    header = {
        "kind": "statistics",
        "run": run,
        "roles": request.roles.to_json(),
        "seed": request.seed,
        "split": list(request.split),
        "spec": {**dataclasses.asdict(spec), "warnings": []},
    }
    envelopes = {name: (header, {"ids": torch.tensor(ids[name])}) for name in told}
    if request.secure or request.privacy is not None:
        privacy = None if request.privacy is None else Privacy(**request.privacy)
        sizes = [
            split_sizes(torch.tensor(one["rows"]), request.split)["train"].sum() for one in told.values()
        ]
        sums = SumCaller(caller, run, request.secure)
        found, doubts = secure_statistics.collect(sums, told, envelopes, int(sum(sizes)), spec, privacy)
        spec.warnings.extend(doubts)
        return found
    parts: dict[str, Statistics] = {}
    for name, envelope in sorted(caller.ask(envelopes, max(caller.deadline, PATIENCE)).items()):
        try:
            if isinstance(envelope, wire.WireError):
                raise envelope
            found = federated.statistics_from_json(envelope[0].get("statistics") or {}, spec)
            sizes = split_sizes(torch.tensor(told[name]["rows"]), request.split)["train"].tolist()
            own = dict(zip(told[name]["clients"], sizes, strict=True))
            descriptions.require_statistics(found, own)
            parts[name] = found
        except Exception as problem:
            caller.note(f"{name} is left out of the shared encoding: {explain(problem)}")
    for name, why in descriptions.implausible(parts).items():
        caller.note(f"{name} is left out of the shared encoding: {why}")
        del parts[name]
    if not parts:
        raise RunError("no node sent the statistics for the shared encoding; the notes above say why")
    return functools.reduce(Statistics.merge, parts.values())


def _clusters(
    told: Mapping[str, Any], clients: Mapping[str, Sequence[str]], names: Sequence[str], roles: Roles
) -> tuple[list[int] | None, list[str] | None]:
    if roles.cluster is None:
        return None, None
    label = {
        client: cluster
        for node, mine in clients.items()
        for client, cluster in zip(mine, told.get(node, {}).get("clusters") or [], strict=False)
    }
    unknown = [name for name in names if name not in label]
    if unknown:
        raise RunError(f"the cluster of client {unknown[0]!r} is unknown: its node did not answer")
    known = federated.in_order(set(label.values()))
    codes, _ = encode_clusters([known.index(label[name]) for name in names])
    assert codes is not None
    return codes.tolist(), list(known)

"""From nodes that answer to a federation: who is there, one encoding for all, everybody ready for a run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coterie.algorithms import Algorithm
from coterie.data import federated
from coterie.data.federated import Roles
from coterie.data.load import SPLIT, Table, default_model
from coterie.data.preprocess import Preprocessor, Statistics
from coterie.errors import DataError, RunError
from coterie.federation.build import encode_clusters
from coterie.federation.federation import Federation
from coterie.models.base import Model
from coterie.models.description import description, from_description
from coterie.runtime import wire
from coterie.runtime.post import Desk, Late, Letter
from coterie.runtime.remote import PATIENCE, Place, Remote, Setup

FEDERATED = "federated"  # marks the data of a run that a resume cannot read from a file


@dataclass(frozen=True)
class Wishes:
    """What a run is to be, before anybody is asked."""

    roles: Roles
    seed: int = 0
    split: tuple[float, float, float] = SPLIT
    l2: float | None = None


@dataclass(frozen=True)
class Assembly:
    """Clients and their nodes, encoding and model of a run: all that is needed to go on with it later."""

    run: str
    wishes: Wishes
    names: list[str]
    nodes: dict[str, list[int]]  # clients of each node, in its own order
    preprocessor: str
    model: dict[str, Any]
    clusters: list[int] | None
    cluster_names: list[str] | None
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Assembly:
        wishes = dict(stored["wishes"])
        wishes["roles"], wishes["split"] = Roles.from_json(wishes["roles"]), tuple(wishes["split"])
        return cls(**{**stored, "wishes": Wishes(**wishes)})


def survey(
    desk: Desk, nodes: Mapping[str, Sequence[str]], wishes: Wishes, run: str, patience: float = PATIENCE
) -> Assembly:
    """Ask all nodes who they are and for the sums behind the common encoding.

    `nodes` names the clients each is expected to have; one that does not answer in time may join later with them.
    """
    hello = {"kind": "hello", "run": run, "roles": wishes.roles.to_json()}
    told = _told(desk, _greeted(desk, sorted(nodes), hello, patience))
    if not told:
        raise RunError(
            f"none of {len(nodes)} nodes answered within {patience:g} s. Start them with `coterie federate node`, and "
            "look at what they print."
        )
    clients = {
        name: told[name]["clients"] if name in told else list(federated.in_order(nodes[name]))
        for name in sorted(nodes)
    }
    names = federated.client_order(clients)
    number = {name: k for k, name in enumerate(names)}
    ids = {node: [number[name] for name in mine] for node, mine in clients.items()}
    spec = federated.merge(told, wishes.roles)
    preprocessor = Preprocessor.from_statistics(spec, _sums(desk, told, ids, wishes, spec))
    model = _fitted(default_model(spec.task, wishes.l2), preprocessor)
    codes, cluster_names = _clusters(told, clients, names, wishes.roles)
    return Assembly(
        run,
        wishes,
        names,
        ids,
        preprocessor.to_json(),
        description(model),
        codes,
        cluster_names,
        list(spec.warnings),
    )


def connect(desk: Desk, assembly: Assembly, algorithm: Algorithm, dropout: float = 0.0) -> Federation:
    """A federation whose clients are on these nodes, ready for `fit` and `resume` with this algorithm."""
    wishes, n = assembly.wishes, len(assembly.names)
    model = from_description(assembly.model)
    clusters = None if assembly.clusters is None else torch.tensor(assembly.clusters)
    settings = {
        "algorithm": {"name": algorithm.name, "settings": algorithm.settings()},
        "model": assembly.model,
        "preprocessor": assembly.preprocessor,
    }
    setup = Setup(assembly.run, wishes.roles.to_json(), wishes.seed, wishes.split, model, settings)
    places = []
    for name, mine in assembly.nodes.items():
        ids = torch.tensor(mine, dtype=torch.long)
        own = [assembly.names[k] for k in mine]
        places.append(Place(name, ids, own, None if clusters is None else clusters[ids]))
    remote = Remote(desk, places, setup, n)
    rows = {split: torch.zeros(n, dtype=torch.long) for split in ("train", "validation", "test")}
    for ids, counts in remote.open(assembly.nodes.keys(), max(desk.deadline, PATIENCE)):
        for split, count in counts.items():
            rows[split][ids] = count
    if not any(place.here for place in remote.places):
        raise RunError("no node could get ready for this run; the notes above say why")
    options = {
        **wishes.roles.to_json(),
        "drop": list(wishes.roles.drop),
        "split": list(wishes.split),
        FEDERATED: True,
    }
    return Federation(
        remote,
        model=model,
        names=assembly.names,
        rows=rows,
        clusters=clusters,
        cluster_names=assembly.cluster_names,
        seed=wishes.seed,
        dtype=torch.float64,
        device="cpu",
        dropout=dropout,
        table=Table(options, Preprocessor.from_json(assembly.preprocessor), assembly.warnings),
    )


def _greeted(
    desk: Desk, names: Sequence[str], hello: dict[str, Any], patience: float
) -> dict[str, wire.WireError | Letter]:
    """Answers to a greeting; who is not signed in yet is greeted again until patience ends."""
    answers: dict[str, wire.WireError | Letter] = {}
    end = time.monotonic() + patience
    missing = list(names)
    while missing:
        left = end - time.monotonic()
        answers |= desk.ask({name: (hello, {}) for name in missing}, max(left, 0.0))
        missing = [name for name in names if isinstance(answers[name], Late)]
        if time.monotonic() >= end:
            break
        time.sleep(min(0.5, patience))
    return answers


def _told(desk: Desk, answers: Mapping[str, wire.WireError | Letter]) -> dict[str, Any]:
    """What the nodes told of themselves, those with unreadable answers left out by name."""
    told = {}
    for name, letter in answers.items():
        if isinstance(letter, wire.WireError):
            desk.note(f"{name} is left out: {letter}")
        elif not _is_description(letter[0].get("told")):
            desk.note(f"{name} is left out: what it tells of its table cannot be read")
        else:
            told[name] = letter[0]["told"]
    return told


def _is_description(told: Any) -> bool:
    def texts(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)

    return (
        isinstance(told, dict)
        and texts(told.get("clients"))
        and len(told["clients"]) > 0
        and isinstance(told.get("columns"), list)
        and all(texts(column) and len(column) == 2 for column in told["columns"])
        and (told.get("clusters") is None or (texts(told["clusters"])))
        and isinstance(told.get("target"), dict)
        and (told["target"].get("kind") == "quantity" or texts(told["target"].get("levels")))
    )


def _sums(
    desk: Desk, told: Mapping[str, Any], ids: Mapping[str, list[int]], wishes: Wishes, spec: Any
) -> Statistics:
    """The statistics of all training rows, added up in the order of the nodes."""
    header = {
        "kind": "statistics",
        "roles": wishes.roles.to_json(),
        "seed": wishes.seed,
        "split": list(wishes.split),
        "spec": {**dataclasses.asdict(spec), "warnings": []},
    }
    letters = {name: (header, {"ids": torch.tensor(ids[name])}) for name in told}
    whole: Statistics | None = None
    for name, letter in sorted(desk.ask(letters, max(desk.deadline, PATIENCE)).items()):
        try:
            if isinstance(letter, wire.WireError):
                raise letter
            part = federated.statistics_from_json(letter[0].get("statistics") or {}, spec)
        except (wire.WireError, DataError) as problem:
            desk.note(f"{name} is left out of the common encoding: {problem}")
            continue
        whole = part if whole is None else whole.merge(part)
    if whole is None:
        raise RunError("no node told the sums behind the common encoding; the notes above say why")
    return whole


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
        raise RunError(f"the cluster of client {unknown[0]!r} is not known, because its node did not answer")
    known = federated.in_order(set(label.values()))
    codes, _ = encode_clusters([known.index(label[name]) for name in names])
    assert codes is not None
    return codes.tolist(), list(known)


def _fitted(model: Model, preprocessor: Preprocessor) -> Model:
    """The model for these features and classes."""
    classes = len(preprocessor.spec.classes)
    x = torch.zeros(max(2, classes), len(preprocessor.feature_names), dtype=torch.float64)
    return model.fit_to(x, torch.arange(classes) if classes else torch.zeros(len(x), dtype=torch.float64))

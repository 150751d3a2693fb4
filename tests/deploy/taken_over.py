"""A server that was taken over, and the hospital with the strict policy that it attacks; nothing here is a test."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import polars
import torch

from coterie.data.federated import Roles
from coterie.deploy import wire
from coterie.deploy.audit import AuditLog
from coterie.deploy.node_service import NodeService
from coterie.deploy.policy import Policy

ROLES = Roles("hospital", "sick")
RUN = "a" * 8
LOGISTIC = {"model": "logistic", "l2": 0.0, "intercept": True, "reduction": "mean", "features": 3}
SPEC = {
    "client": "hospital",
    "target": "sick",
    "cluster": None,
    "task": "binary",
    "classes": ["no", "yes"],
    "numeric": ["age", "weight"],
    "categories": ["sex"],
    "warnings": [],
}
ENCODING = {
    "spec": SPEC,
    "scales": [
        {"name": "age", "mean": 50.0, "sd": 20.0, "missing": False},
        {"name": "weight", "mean": 80.0, "sd": 20.0, "missing": False},
    ],
    "choices": [{"name": "sex", "levels": ["f"], "missing": False}],
    "target_mean": 0.0,
    "target_sd": 1.0,
}


def patients(count: int = 60, seed: int = 1) -> polars.DataFrame:
    """Rows with identifiers and notes that must never leave."""
    draw = random.Random(seed)
    return polars.DataFrame(
        {
            "hospital": ["north"] * count,
            "ssn": [f"{draw.randint(100, 999)}-{draw.randint(10, 99)}-{k:04d}" for k in range(count)],
            "age": [draw.randint(20, 90) for _ in range(count)],
            "weight": [round(draw.uniform(45, 120), 1) for _ in range(count)],
            "sex": ["x" if k == 7 else draw.choice("fm") for k in range(count)],
            "note": [f"patient {k} HIV {'pos' if draw.random() < 0.3 else 'neg'}" for k in range(count)],
            "sick": [draw.choice(["yes", "no"]) for _ in range(count)],
        }
    )


class Server:
    """Sends whatever it likes to one node and remembers everything that came back."""

    def __init__(self, node: NodeService) -> None:
        self.node, self.heard, self.count = node, [], itertools.count()

    def ask(self, kind, tensors=None, **header):
        message = {"kind": kind, "nonce": f"n{next(self.count)}", **header}
        return self.raw(wire.encode(message, tensors or {}))

    def raw(self, message: bytes):
        answer = self.node.answer(message)
        self.heard.append(answer)
        return wire.decode(answer)

    def hello(self, run=RUN, roles=ROLES, **more):
        return self.ask("hello", run=run, roles=roles.to_json(), **more)[0]

    def statistics(self, run=RUN, seed=0, split=(0.6, 0.2, 0.2), ids=(0,), roles=ROLES, **spec):
        return self.ask(
            "statistics",
            {"ids": torch.tensor(ids)},
            run=run,
            roles=roles.to_json(),
            spec={**SPEC, **spec},
            split=list(split),
            seed=seed,
        )[0]

    def open(self, algorithm="ditto", run=RUN, settings=None, model=LOGISTIC, encoding=ENCODING, **more):
        setup = {
            "algorithm": {"name": algorithm, "settings": {"batch": 0, **(settings or {})}},
            "preprocessor": json.dumps(encoding),
            "model": model,
            **({"refit": more.pop("refit")} if "refit" in more else {}),
            **more.pop("setup", {}),
        }
        header = {"roles": ROLES.to_json(), "seed": 0, "split": [0.6, 0.2, 0.2], "clients": ["north"], **more}
        ids = header.pop("ids", (0,))
        self.opened = self.ask("open", {"ids": torch.tensor(ids)}, run=run, setup=setup, **header)
        return self.opened[0]

    def ask_open(self, run, refit):
        """Return the numbers of rows of a run that is opened again."""
        self.open(run=run, refit=refit)
        return self.opened[1]

    def call(self, phase, algorithm="ditto", tensors=None, begins=False, **more):
        header = {
            "run": RUN,
            "algorithm": algorithm,
            "phase": phase,
            "round": 1,
            "call": 0,
            "numbers": {},
            "begins": begins,
            "welcome_numbers": {},
            "lasting": False,
            "split": "",
            "metrics": [],
            "compress": "",
            "since": None,
            "floor": None,
        }
        return self.ask("call", {"at": torch.tensor([0]), **(tensors or {})}, **{**header, **more})


TABLE = patients()
STRICT = Policy.strict(TABLE, Roles("hospital", "sick", drop=("ssn", "note")))
X = torch.zeros(4, dtype=torch.float64)


def node(path: Path, policy: Policy = STRICT, table: polars.DataFrame = TABLE, **more) -> NodeService:
    path.mkdir(exist_ok=True)
    return NodeService(table, path, policy=policy, audit=AuditLog(path / "audit.log"), **more)


def with_policy(**changes) -> Policy:
    return Policy.strict(TABLE, Roles("hospital", "sick", drop=("ssn", "note")), **changes)


def leaked(server: Server) -> list[str]:
    """Values of identifiers, notes and weights in anything the node said."""
    heard = b"".join(server.heard)
    secrets = [*TABLE["ssn"], *TABLE["note"], *(repr(weight) for weight in TABLE["weight"])]
    found = [
        value
        for value in secrets
        if re.search(rb"(?<![\d.])" + re.escape(value.encode()) + rb"(?!\d)", heard)
    ]
    exact = torch.tensor(TABLE["weight"].to_list(), dtype=torch.float64)
    return found + [
        str(value) for value in exact.tolist() if torch.tensor([value]).double().numpy().tobytes() in heard
    ]


def refused(answer, text: str = "policy") -> bool:
    header = answer[0] if isinstance(answer, tuple) else answer
    return header.get("code") == "refused" and text in header["error"]

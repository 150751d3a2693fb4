"""A node's end of a federation: its own rows, its clients' state on its own disk, and the answers it gives.

Messages name what to do; nothing in them is executed. What a node will do is the list in `Site.KINDS` and, of an
algorithm, its phases.
"""

from __future__ import annotations

import functools
import json
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import coterie
from coterie.algorithms import make
from coterie.data import bundled, federated, tables
from coterie.data.federated import Roles
from coterie.data.preprocess import Preprocessor, local_statistics
from coterie.data.split import split_rows
from coterie.data.tables import TableSpec
from coterie.errors import CoterieError, DataError
from coterie.models.description import description, from_description
from coterie.runs import files
from coterie.runs.stamps import Stamp, Stamps
from coterie.runtime import messages, wire

Message = tuple[dict[str, Any], dict[str, Tensor]]
REMEMBERED = 10_000  # messages whose repetition is noticed


class Site:
    """Answers messages from the server with what its own clients compute."""

    def __init__(self, source: str | Path, state: Path, client: str | None = None) -> None:
        self.source, self.client, self.state = bundled.resolve(source), client, state
        self.runs: dict[str, OpenRun] = {}
        self.seen: deque[str] = deque(maxlen=REMEMBERED)
        self._frames: dict[Roles, Any] = {}
        self._raw: Any = None

    def check(self) -> int:
        """Read the table, so that what is wrong with it is known before the server asks; its number of rows."""
        self._raw = tables.read(self.source)
        return int(self._raw.height)

    def answer(self, message: bytes) -> bytes:
        """Always an answer: what cannot be done is said in `error`, with a `code` where the server can act on it."""
        nonce: Any = None
        try:
            header, tensors = wire.decode(message)
            nonce = header.get("nonce")
            self._require_new(nonce)
            kind = header.get("kind")
            if kind not in self.KINDS:
                raise wire.WireError(f"this node does nothing called {kind!r}")
            with torch.no_grad():
                reply, values = self.KINDS[kind](self, header, tensors)
            return wire.encode({**reply, "nonce": nonce}, values)
        except Forgotten as problem:
            return wire.encode({"nonce": nonce, "error": str(problem), "code": "forgot"}, {})
        except CoterieError as problem:
            return wire.encode({"nonce": nonce, "error": str(problem), "code": "refused"}, {})
        except Exception as problem:
            text = f"{type(problem).__name__}: {problem}"
            return wire.encode({"nonce": nonce, "error": text, "code": "failed"}, {})

    def _require_new(self, nonce: Any) -> None:
        if not isinstance(nonce, str) or not nonce:
            raise wire.WireError("a message without a number of its own")
        if nonce in self.seen:
            raise wire.WireError("this message was answered before")
        self.seen.append(nonce)

    def hello(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Who is here; nothing is read yet but names, sizes and kinds of columns."""
        roles = Roles.from_json(header["roles"])
        told = federated.describe(self.rows(roles), roles, str(self.source))
        run = header.get("run")
        knows = isinstance(run, str) and (run in self.runs or (self._folder(run) / SETUP).exists())
        return {"told": told, "knows": knows, "coterie": coterie.__version__}, {}

    def statistics(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Sums over the training rows, for the common encoding."""
        roles, spec = Roles.from_json(header["roles"]), _spec(header["spec"])
        frame, _, counts = tables.by_client(self.rows(roles), roles.client)
        part = split_rows(torch.tensor(counts), _fractions(header["split"]), header["seed"], tensors["ids"])
        frame = _with_columns(frame, spec, str(self.source))
        sums = local_statistics(frame[part.train.order.numpy()], spec)
        return {"statistics": federated.statistics_to_json(sums)}, {}

    def open(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Get ready for a run: its settings go to the disk, and its shard of clients into memory."""
        run = str(header["run"])
        folder = self._folder(run)
        settings = {name: header[name] for name in ("run", "roles", "seed", "split", "setup")}
        files.write_tensors(folder / SETUP, tensors, settings)
        opened = OpenRun(self, folder)
        if opened.names != header["clients"]:
            raise DataError(f"{self.source} has other clients than the federation has for this node")
        self.runs[run] = opened
        return {}, {f"rows.{split}": rows.size for split, rows in opened.shard.splits.items()}

    def call(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        return self.run(header).call(header, tensors)

    def deploy(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        return self.run(header).deploy(header, tensors)

    def score(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        return self.run(header).score(header)

    def finish(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        return self.run(header).finish(header, tensors)

    KINDS: ClassVar[dict[str, Callable[[Site, dict[str, Any], dict[str, Tensor]], Message]]] = {
        "hello": hello,
        "statistics": statistics,
        "open": open,
        "call": call,
        "deploy": deploy,
        "score": score,
        "finish": finish,
    }

    def run(self, header: dict[str, Any]) -> OpenRun:
        """The run a message is about, from memory or from the disk."""
        run = str(header.get("run"))
        if run not in self.runs:
            folder = self._folder(run)
            if not (folder / SETUP).exists():
                raise Forgotten(f"this node knows no run {run!r}")
            self.runs[run] = OpenRun(self, folder)
        return self.runs[run]

    def rows(self, roles: Roles) -> Any:
        """The rows of this node's clients."""
        if roles not in self._frames:
            if self._raw is None:
                self._raw = tables.read(self.source)
            self._frames[roles] = federated.own_rows(self._raw, roles, self.client, str(self.source))
        return self._frames[roles]

    def _folder(self, run: str) -> Path:
        if not re.fullmatch(r"[a-z0-9]{8,64}", run):
            raise wire.WireError(f"{run!r} is not the name of a run")
        return self.state / run


class Forgotten(CoterieError):
    """The state that a message builds on is not on this node."""


SETUP = "setup.safetensors"


class OpenRun:
    """One run on one node: shard, algorithm, states on disk, deployed models."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.folder = folder
        tensors, settings = files.read_tensors(folder / SETUP)
        roles, setup = Roles.from_json(settings["roles"]), settings["setup"]
        self.settings, self.roles = settings, roles
        self.algorithm = make(setup["algorithm"]["name"], **setup["algorithm"]["settings"])
        self.preprocessor = Preprocessor.from_json(setup["preprocessor"])
        frame, self.names, counts = tables.by_client(site.rows(roles), roles.client)
        if len(self.names) != len(tensors["ids"]):
            raise DataError(
                f"{site.source} has {len(self.names)} clients, {len(tensors['ids'])} at the start"
            )
        frame = _with_columns(frame, self.preprocessor.spec, str(site.source))
        self.shard = _shard(self.preprocessor, frame, counts, settings, tensors)
        self.stamps = Stamps(folder / "states")
        self.current: Stamp | None = None  # the state that is in memory

    def call(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """A phase on the state the server names; what the clients keep is on the disk before the answer leaves."""
        self._go_to(_stamp(header["since"]))
        before = self.shard.store.writes
        stamp: Stamp | None = self.current
        self.current = (-1, -1)  # in between, should the phase fail
        reply, values = messages.run(self.shard, self.algorithm, header, tensors)
        if self.shard.store.writes > before:
            stamp = (int(header["round"]), int(header["call"]))
            self.stamps.save(stamp, self.shard.snapshot())
            if header.get("floor"):
                self.stamps.prune(_stamp(header["floor"]) or stamp)
        self.current = stamp
        return {**reply, "at": stamp}, values

    def deploy(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Put the models of these clients onto the disk, under the round they are from."""
        self._go_to(_stamp(header["since"]))
        asked = {**header, "phase": "deploy", "lasting": False, "split": "", "compress": ""}
        _, values = messages.run(self.shard, self.algorithm, asked, tensors)
        path = self._models(int(header["round"]))
        models = self._stored(path)
        models[tensors["at"]] = values["value."]
        files.write_tensors(path, {"personal": models})
        return {}, {}

    def score(self, header: dict[str, Any]) -> Message:
        """Metrics of the stored models on one split; NaN for a client that has none."""
        models = self._stored(self._models(int(header["round"])))
        missing = torch.isnan(models).any(-1, keepdim=True)
        scores = self.shard.score(models.nan_to_num(), header["split"])
        return {}, {
            f"value.{name}": value if name == "rows" else torch.where(missing, torch.nan, value)
            for name, value in scores.items()
        }

    def finish(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """A folder with this node's models that `coterie predict` takes; states and other models go."""
        path, target = self._models(int(header["round"])), self.folder / "run"
        if not path.exists() and target.exists():
            return {}, {}
        personal = self._stored(path)
        own = [k for k in range(len(personal)) if not bool(personal[k].isnan().any())]
        models = {"personal": personal[own], "common": tensors.get("common", personal[own].mean(0))}
        files.write_tensors(target / "models" / "models.safetensors", models)
        files.write_json(
            target / "models" / "model.json",
            {
                "algorithm": self.algorithm.name,
                "sha256": files.sha256(target / "models" / "models.safetensors"),
                "clients": [self.names[k] for k in own],
                "client_column": self.roles.client,
                "model": description(self.shard.model),
                "preprocessor": self.preprocessor.to_json(),
            },
        )
        files.write_toml(
            target / "config.toml",
            {
                "coterie": coterie.__version__,
                "algorithm": {"name": self.algorithm.name, **self.algorithm.settings()},
                "plan": {"federated": True},
                "federation": {"run": self.settings["run"], "seed": self.settings["seed"]},
            },
        )
        self.stamps.clear()
        for old in (self.folder / "models").glob("*.safetensors"):
            old.unlink(missing_ok=True)
        return {"models": len(own)}, {}

    def _go_to(self, stamp: Stamp | None) -> None:
        if stamp == self.current:
            return
        tensors = {} if stamp is None else self.stamps.load(stamp)
        if tensors is None:
            raise Forgotten(f"the state after round {stamp and stamp[0]} is not on this node")
        self.shard.restore(tensors)
        self.current = stamp

    def _models(self, t: int) -> Path:
        return self.folder / "models" / f"round-{t:09d}.safetensors"

    def _stored(self, path: Path) -> Tensor:
        if path.exists():
            return files.read_tensors(path)[0]["personal"]
        shape = (len(self.shard.ids), self.shard.model.d)
        return torch.full(shape, torch.nan, dtype=self.shard.dtype)


def _shard(
    preprocessor: Preprocessor,
    frame: Any,
    counts: list[int],
    settings: dict[str, Any],
    tensors: dict[str, Tensor],
) -> Any:
    from coterie.federation.build import make_shard

    return make_shard(
        preprocessor.encode(frame),
        preprocessor.encode_target(frame),
        torch.tensor(counts),
        from_description(settings["setup"]["model"]),
        tensors.get("clusters"),
        _fractions(settings["split"]),
        settings["seed"],
        torch.float64,
        ids=tensors["ids"],
    )


@functools.cache
def _spec_from(text: str) -> TableSpec:
    stored = json.loads(text)
    lists = ("classes", "numeric", "categories")
    return TableSpec(**{**stored, **{name: tuple(stored[name]) for name in lists}, "warnings": []})


def _spec(stored: dict[str, Any]) -> TableSpec:
    return _spec_from(json.dumps(stored, sort_keys=True))


def _with_columns(frame: Any, spec: TableSpec, source: str) -> Any:
    missing = [name for name in (*spec.numeric, *spec.categories) if name not in frame.columns]
    if missing:
        raise DataError(f"{source}: the column {missing[0]!r}, which the others have, is missing")
    return frame


def _fractions(split: list[float]) -> tuple[float, float, float]:
    return float(split[0]), float(split[1]), float(split[2])


def _stamp(stored: Any) -> Stamp | None:
    return None if stored is None else (int(stored[0]), int(stored[1]))

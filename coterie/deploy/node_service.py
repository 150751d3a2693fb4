"""A node's side of a federation: its own rows, the state of its clients on disk, and its answers.

Messages name what to do; nothing in them is executed. A node does what is in `NodeService.KINDS` and, of an
algorithm, its phases.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

import coterie
from coterie._core import files, systems
from coterie._core.errors import CoterieError, DataError
from coterie._core.printable import printable
from coterie.algorithms import Algorithm, make
from coterie.data import bundled, federated, tables
from coterie.data.federated import Roles
from coterie.data.preprocess import Preprocessor, local_statistics
from coterie.data.split import split_rows
from coterie.data.table_spec import TableSpec
from coterie.deploy import disclosure, messages, secure_statistics, wire
from coterie.deploy.audit import AuditError, AuditLog
from coterie.deploy.client_state import CallId, ClientStateFiles
from coterie.deploy.guard import RUN, Guard, Pending, Refusal
from coterie.deploy.identity import Identity
from coterie.deploy.node_masks import KINDS as MASK_KINDS
from coterie.deploy.node_masks import NodeMasks
from coterie.deploy.node_privacy import NodePrivacy
from coterie.deploy.policy import TRUSTING, Policy
from coterie.deploy.secure_sums import NodeSums
from coterie.engine.build import make_runtime
from coterie.engine.local_runtime import LocalRuntime
from coterie.models.description import description, from_description

if TYPE_CHECKING:
    import polars

Message = tuple[dict[str, Any], dict[str, Tensor]]
REMEMBERED = 10_000  # messages whose repetition is noticed
MOST_OPEN = 4  # runs whose rows are in memory; others are read from disk when they are asked for


class NodeService:
    """Answers the server's messages with what the node's own clients compute, as far as the policy allows.

    Parameters
    ----------
    source
        The node's table: a file, the name of a bundled table, or a data frame.
    state
        Folder for the state and the models of clients.
    client
        Whose rows these are, where the table has no client column.
    make_algorithm
        Makes an algorithm from its name and settings; by default one that is installed.
    policy
        What may be answered. The default trusts the server, for simulations and tests; `coterie federate node` always
        passes the policy of the node's owner.
    audit
        Log of what leaves, written before it leaves; None keeps none.
    log
        Receives, for the owner's eyes only, why a message was not answered.
    identity
        Signs what this node says to other nodes, and checks what they say; None for tests.
    """

    def __init__(
        self,
        source: str | Path | polars.DataFrame,
        state: Path,
        client: str | None = None,
        make_algorithm: Callable[..., Algorithm] = make,
        policy: Policy = TRUSTING,
        audit: AuditLog | None = None,
        log: Callable[[str], None] = lambda text: None,
        identity: Identity | None = None,
    ) -> None:
        self.source, self.client, self.state = bundled.resolve(source), client, state
        self.source_name = str(self.source) if isinstance(self.source, str | Path) else "the table"
        self.make_algorithm = make_algorithm
        self.runs: dict[str, OpenRun] = {}
        self.seen: deque[str] = deque(maxlen=REMEMBERED)
        self._frames: dict[Roles, Any] = {}
        self._raw: Any = None
        self.policy, self.audit, self.log = policy, audit, log
        self.guard = Guard(policy, state, audit)
        self.identity = identity
        self.masks: dict[str, NodeMasks] = {}

    def check(self) -> int:
        """Read the table before the server asks, to report problems early; return its number of rows."""
        self._raw = tables.read(self.source)
        if self.policy.roles is not None:
            return int(self.rows(self.policy.roles).height)
        return int(self._raw.height)

    def answer(self, message: bytes) -> bytes:
        """Return the answer to a message.

        There is always one: a failure is in its `error`, with a `code` where the server can act on it. The text of an
        error names rules and what the message said, never a row; the owner's log has the rest.
        """
        nonce: Any = None
        entry: dict[str, Any] = {}
        try:
            header, tensors = wire.decode(message)
            nonce = self._new_nonce(header)
            at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            self.guard.admit(header, tensors, at, entry)
            kind = header.get("kind")
            if kind not in self.KINDS:
                raise wire.WireError(f"unknown request {kind!r}")
            with torch.no_grad():
                reply, values = self.KINDS[kind](self, header, tensors)
            head = {} if self.audit is None else {"audit": self.audit.head}
            answer = wire.encode({**reply, **head, "nonce": nonce}, values)
            self._write_down(entry, answer)
            return answer
        except AuditError as problem:
            self.log(f"nothing leaves: {problem}")
            return self._failure(
                nonce, "this node cannot write its audit log, so nothing leaves it", "failed"
            )
        except Pending as problem:
            return self._refused(entry, nonce, str(problem), "pending")
        except Forgotten as problem:
            return self._refused(entry, nonce, str(problem), "forgot")
        except (Refusal, wire.WireError) as problem:
            return self._refused(entry, nonce, str(problem), "refused")
        except Exception as problem:
            self.log(f"a message could not be answered: {type(problem).__name__}: {problem}")
            text = f"this node could not answer ({type(problem).__name__}); its own log says why"
            return self._refused(
                entry, nonce, text, "refused" if isinstance(problem, CoterieError) else "failed"
            )

    def _failure(self, nonce: Any, text: str, code: str) -> bytes:
        return wire.encode({"nonce": nonce, "error": printable(text), "code": code}, {})

    def _refused(self, entry: dict[str, Any], nonce: Any, text: str, code: str) -> bytes:
        answer = self._failure(nonce, text, code)
        try:
            if entry:
                self._write_down({**entry, "refused": text}, answer)
        except AuditError as problem:
            self.log(str(problem))
        return answer

    def _write_down(self, entry: dict[str, Any], answer: bytes) -> None:
        """Write to the audit log what is about to leave."""
        if self.audit is not None:
            digest = hashlib.sha256(answer).hexdigest()
            self.audit.write(**{**entry, "at": entry["at"]}, bytes=len(answer), sha256=digest)

    def _new_nonce(self, header: dict[str, Any]) -> str:
        nonce = header.get("nonce")
        if not isinstance(nonce, str) or not nonce or len(nonce) > 64:
            raise wire.WireError("message rejected: missing nonce")
        if nonce in self.seen:
            raise wire.WireError("message rejected: nonce already used")
        self.seen.append(nonce)
        return nonce

    def hello(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Return names and sizes of clients and kinds of columns."""
        roles = Roles.from_json(header["roles"])
        told = federated.describe(self.rows(roles), roles, self.source_name)
        told = disclosure.facts(self.policy, told)
        if header.get("secure") or self.policy.secure:
            told = disclosure.in_words(self.policy, told, self.rows(roles), roles)
        run = header.get("run")
        knows = isinstance(run, str) and (run in self.runs or (self._folder(run) / SETUP).exists())
        return {"told": told, "knows": knows, "coterie": coterie.__version__}, {}

    def statistics(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Return sums over the training rows, for the shared encoding."""
        import polars as pl

        roles, spec = Roles.from_json(header["roles"]), _spec(header["spec"])
        frame, _, counts = tables.by_client(self.rows(roles), roles.client)
        part = split_rows(torch.tensor(counts), _fractions(header["split"]), header["seed"], tensors["ids"])
        frame = _with_columns(frame, spec, self.source_name)
        if "about" in header:
            about = header["about"]
            if set(about["columns"]) | set(about.get("centres", ())) > {*spec.numeric, spec.target}:
                raise Refusal("statistics of columns that the run does not use")
            folder = self._folder(str(header.get("run")))
            masks, train = self.masks_of(str(header.get("run"))), frame[part.train.order.numpy()]
            hidden = [name for name in self.policy.encoding if name in train.columns]
            train = train.with_columns(pl.lit(None).alias(name) for name in hidden)
            return secure_statistics.answer(header, train, roles.client, folder, masks)
        sums = local_statistics(frame[part.train.order.numpy()], spec)
        sums = disclosure.statistics(self.policy, sums, frame[part.train.order.numpy()])
        return {"statistics": federated.statistics_to_json(sums)}, {}

    def open(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Open a run: write its settings to disk, read its clients into memory, return their sizes."""
        run = str(header["run"])
        folder = self._folder(run)
        settings = {name: header[name] for name in ("run", "roles", "seed", "split", "setup")}
        files.write_tensors(folder / SETUP, tensors, settings)
        opened = OpenRun(self, folder)
        if opened.names != header["clients"]:
            raise Refusal("the clients of this node are not those that the federation lists for it")
        self._remember(run, opened)
        return {}, {f"rows.{split}": rows.size for split, rows in opened.runtime.splits.items()}

    def call(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Run a phase."""
        return self.run(header).call(header, tensors)

    def deploy(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Store deployed models."""
        return self.run(header).deploy(header, tensors)

    def score(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Score stored models."""
        return self.run(header).score(header)

    def finish(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Write the models of a finished run for use."""
        return self.run(header).finish(header, tensors)

    def sums(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Take part in a sum of answers that nodes hold."""
        return self.run(header).sum(header, tensors)

    def mask(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Prepare a sum under masks with the other nodes, or help to take the masks off it."""
        return self.masks_of(str(header.get("run"))).answer(header)

    KINDS: ClassVar[dict[str, Callable[[NodeService, dict[str, Any], dict[str, Tensor]], Message]]] = {
        "hello": hello,
        "statistics": statistics,
        "open": open,
        "call": call,
        "deploy": deploy,
        "score": score,
        "finish": finish,
        "sum": sums,
        **dict.fromkeys(MASK_KINDS, mask),
    }

    def masks_of(self, run: str) -> NodeMasks:
        """Return this node's keys for the sums of a run."""
        if run not in self.masks:
            self._folder(run)  # the name is one
            self.masks[run] = NodeMasks(run, self.identity, self.policy.least_nodes)
            while len(self.masks) > MOST_OPEN:
                del self.masks[next(iter(self.masks))]
        return self.masks[run]

    def run(self, header: dict[str, Any]) -> OpenRun:
        """Return the run that a message is about, from memory or from disk."""
        run = str(header.get("run"))
        if run not in self.runs:
            folder = self._folder(run)
            if not (folder / SETUP).exists():
                raise Forgotten(f"unknown run {run!r}")
            self._remember(run, OpenRun(self, folder))
        return self.runs[run]

    def _remember(self, run: str, opened: OpenRun) -> None:
        self.runs[run] = opened
        while len(self.runs) > MOST_OPEN:
            del self.runs[next(iter(self.runs))]

    def rows(self, roles: Roles) -> Any:
        """Return the rows of this node's clients: the columns that the policy offers, of clients with enough rows."""
        if roles not in self._frames:
            if self._raw is None:
                self._raw = tables.read(self.source)
            rows = federated.own_rows(self._raw, roles, self.client, self.source_name)
            self._frames.clear()
            self._frames[roles] = disclosure.offered(self.policy, rows, roles, self.source_name, self.log)
        return self._frames[roles]

    def _folder(self, run: str) -> Path:
        if not RUN.fullmatch(run):
            raise wire.WireError(f"invalid run name {run!r}")
        return self.state / run


class Forgotten(CoterieError):
    """The state that a message starts from is not on this node."""


SETUP = "setup.safetensors"


class OpenRun:
    """One run on one node: runtime, algorithm, saved states and deployed models."""

    def __init__(self, service: NodeService, folder: Path) -> None:
        self.folder = folder
        tensors, settings = files.read_tensors(folder / SETUP)
        roles, setup = Roles.from_json(settings["roles"]), settings["setup"]
        self.settings, self.roles = settings, roles
        self.algorithm = service.make_algorithm(setup["algorithm"]["name"], **setup["algorithm"]["settings"])
        self.preprocessor = Preprocessor.from_json(setup["preprocessor"])
        frame, self.names, counts = tables.by_client(service.rows(roles), roles.client)
        if len(self.names) != len(tensors["ids"]):
            raise Refusal(f"this node has {len(self.names)} clients; the run lists {len(tensors['ids'])}")
        frame = _with_columns(frame, self.preprocessor.spec, service.source_name)
        if service.policy.min_rows_per_statistic > 1:
            part = split_rows(
                torch.tensor(counts), _fractions(settings["split"]), settings["seed"], tensors["ids"]
            )
            frame = disclosure.without_rare(service.policy, frame, part.train.order, self.preprocessor.spec)
        self.guard = service.guard
        self.runtime = _runtime(self.preprocessor, frame, counts, settings, tensors)
        self.state_files = ClientStateFiles(folder / "states")
        self.current: CallId | None = None  # the state that is in memory
        self.privacy = NodePrivacy.of(folder, setup, self.runtime, self.algorithm)
        masks = service.masks_of(str(settings["run"]))
        self.sums = NodeSums.of(self.runtime, self.algorithm, setup, masks, self.privacy)

    def call(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Run a phase from the state that the server names; new state is on disk before the answer leaves."""
        reveals = self.guard.require_phase(self.algorithm, str(header["phase"]), bool(header["split"]))
        self._go_to(_stamp(header["since"]))
        before = self.runtime.store.writes
        stamp: CallId | None = self.current
        self.current = (-1, -1)  # in between, should the phase fail
        with nullcontext() if self.privacy is None else self.privacy.paying(header, tensors):
            reply, values = messages.run(self.runtime, self.algorithm, header, tensors)
        if self.sums is not None:
            reply, values = self.sums.hold(header, tensors, (reply, values))
        if self.runtime.store.writes > before:
            stamp = (int(header["round"]), int(header["call"]))
            self.state_files.save(stamp, self.runtime.snapshot())
            if header.get("floor"):
                self.state_files.prune(_stamp(header["floor"]) or stamp)
        self.current = stamp
        if reveals == "nothing" and values.keys() - {"good"}:
            raise Refusal(f"{self.algorithm.name}'s {header['phase']} says it sends nothing, but does")
        if header["split"]:
            values = self._enough(values, str(header["split"]), tensors.get("at"))
        return {**reply, "at": stamp}, values

    def sum(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Take part in a sum of what the last call returned."""
        if self.sums is None:
            raise wire.WireError("message rejected: this run has no sums")
        return self.sums.answer(header)

    def deploy(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Store the models of these clients under the round they belong to."""
        self._go_to(_stamp(header["since"]))
        asked = {**header, "phase": "deploy", "lasting": False, "split": "", "compress": ""}
        _, values = messages.run(self.runtime, self.algorithm, asked, tensors)
        t = int(header["round"])
        models = self.models(t)
        models[tensors["at"]] = values["value."]
        files.write_tensors(self._path(t), {"personal": models})
        return {}, {}

    def score(self, header: dict[str, Any]) -> Message:
        """Return the sums of the named metrics for the stored models on one split; NaN for a client without a model."""
        metrics = messages.named_metrics(self.runtime, header)
        models = self.models(int(header["round"]))
        missing = torch.isnan(models).any(-1, keepdim=True)
        scores = self.runtime.score(models.nan_to_num(), header["split"], metrics)
        sums = {
            f"value.{name}": value if name == "rows" else torch.where(missing, torch.nan, value)
            for name, value in scores.items()
        }
        return {}, self._enough(sums, header["split"], None)

    def finish(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Write this node's models where `coterie predict` finds them; remove states and other models."""
        t, target = int(header["round"]), self.folder / "run"
        if not self._path(t).exists() and target.exists():
            return {}, {}
        personal = self.models(t)
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
                "model": description(self.runtime.model),
                "preprocessor": self.preprocessor.to_json(),
            },
        )
        config = {
            "coterie": coterie.__version__,
            "algorithm": {"name": self.algorithm.name, **self.algorithm.settings()},
            "plan": {"federated": True},
            "federation": {"run": self.settings["run"], "seed": self.settings["seed"]},
        }
        files.seal(target, "config.toml", files.as_toml(config))
        self.state_files.clear()
        if self.privacy is not None:
            self.privacy.finish()
        for old in (self.folder / "models").glob("*.safetensors"):
            systems.discard(old)
        return {"models": len(own)}, {}

    def _enough(self, values: dict[str, Tensor], split: str, at: Tensor | None) -> dict[str, Tensor]:
        rows = self.runtime.splits[split].size
        return disclosure.scores(self.guard.policy, values, rows if at is None else rows[at])

    def _go_to(self, stamp: CallId | None) -> None:
        if stamp == self.current:
            return
        tensors = {} if stamp is None else self.state_files.load(stamp)
        if tensors is None:
            raise Forgotten(f"no saved state of round {stamp and stamp[0]} on this node")
        self.runtime.restore(tensors)
        self.current = stamp

    def _path(self, t: int) -> Path:
        return self.folder / "models" / f"round-{t:09d}.safetensors"

    def models(self, t: int) -> Tensor:
        """Return the models stored under round t, [k, d]; NaN for a client that has none."""
        path = self._path(t)
        if path.exists():
            return files.read_tensors(path)[0]["personal"]
        shape = (len(self.runtime.ids), self.runtime.model.d)
        return torch.full(shape, torch.nan, dtype=self.runtime.dtype)


def _runtime(
    preprocessor: Preprocessor,
    frame: Any,
    counts: list[int],
    settings: dict[str, Any],
    tensors: dict[str, Tensor],
) -> LocalRuntime:
    return make_runtime(
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
    lists = ("classes", "numeric", "categories", "groups")
    return TableSpec(**{**stored, **{name: tuple(stored.get(name, ())) for name in lists}, "warnings": []})


def _spec(stored: dict[str, Any]) -> TableSpec:
    return _spec_from(json.dumps(stored, sort_keys=True))


def _with_columns(frame: Any, spec: TableSpec, source: str) -> Any:
    missing = [name for name in (*spec.numeric, *spec.categories) if name not in frame.columns]
    if missing:
        raise DataError(f"{source}: column {missing[0]!r} is missing; the other nodes have it")
    return frame


def _fractions(split: list[float]) -> tuple[float, float, float]:
    return float(split[0]), float(split[1]), float(split[2])


def _stamp(stored: Any) -> CallId | None:
    return None if stored is None else (int(stored[0]), int(stored[1]))

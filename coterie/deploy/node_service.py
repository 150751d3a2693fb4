"""A node's side of a federation: its own rows, the state of its clients on disk, and its answers.

Messages name what to do; nothing in them is executed. A node does what is in `NodeService.KINDS` and, of an
algorithm, its phases.
"""

from __future__ import annotations

import datetime
import hashlib
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

import coterie
from coterie._core import files, systems
from coterie._core.errors import CoterieError
from coterie._core.printable import printable
from coterie.algorithms import Algorithm, make
from coterie.data.image_folders import Images
from coterie.data.texts import Texts
from coterie.deploy import disclosure, messages, wire
from coterie.deploy.audit import AuditError, AuditLog
from coterie.deploy.client_state import CallId, ClientStateFiles
from coterie.deploy.guard import AGAIN, RUN, Guard, Pending, Refusal
from coterie.deploy.identity import Identity
from coterie.deploy.node_data import Message, NodeData
from coterie.deploy.node_images import NodeImages
from coterie.deploy.node_masks import KINDS as MASK_KINDS
from coterie.deploy.node_masks import NodeMasks
from coterie.deploy.node_model import make_model
from coterie.deploy.node_privacy import NodePrivacy
from coterie.deploy.node_table import NodeTable
from coterie.deploy.node_texts import NodeTexts
from coterie.deploy.policy import TRUSTING, Policy
from coterie.deploy.secure_sums import NodeSums
from coterie.engine.resplit import joined
from coterie.models.causal_lm import CausalLM
from coterie.train.run import REFIT

if TYPE_CHECKING:
    import polars

REMEMBERED = 10_000  # messages whose repetition is noticed
MOST_OPEN = 4  # runs whose rows are in memory; others are read from disk when they are asked for


class NodeService:
    """Answers the server's messages with what the node's own clients compute, as far as the policy allows.

    Parameters
    ----------
    source
        The node's rows: a table (a file, the name of a bundled table, or a data frame), or images or texts, which the
        policy says or which were read.
    state
        Folder for the state and the models of clients.
    client
        Whose rows these are, where the rows do not say.
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
        source: str | Path | polars.DataFrame | Images | Texts,
        state: Path,
        client: str | None = None,
        make_algorithm: Callable[..., Algorithm] = make,
        policy: Policy = TRUSTING,
        audit: AuditLog | None = None,
        log: Callable[[str], None] = lambda text: None,
        identity: Identity | None = None,
    ) -> None:
        self.state = state
        self.make_algorithm = make_algorithm
        self.runs: dict[str, OpenRun] = {}
        self.seen: deque[str] = deque(maxlen=REMEMBERED)
        self.policy, self.audit, self.log = policy, audit, log
        self.data: NodeData
        if isinstance(source, Images) or (policy.kind == "images" and isinstance(source, str | Path)):
            self.data = NodeImages(source, client, policy, log)
        elif isinstance(source, Texts) or (policy.kind == "texts" and isinstance(source, str | Path)):
            self.data = NodeTexts(source, client, policy, log, state)
        else:
            self.data = NodeTable(source, client, policy, log)
        self.guard = Guard(policy, state, audit)
        self.identity = identity
        self.masks: dict[str, NodeMasks] = {}

    def check(self) -> int:
        """Read the rows before the server asks, to report problems early; return how many there are."""
        return self.data.check()

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
            text = "this node cannot write its audit log, so nothing leaves it"
            return self._failure(nonce, f"{text}{_full(problem)}", "failed")
        except Pending as problem:
            return self._refused(entry, nonce, str(problem), "pending")
        except Forgotten as problem:
            return self._refused(entry, nonce, str(problem), "forgot")
        except (Refusal, wire.WireError) as problem:
            return self._refused(entry, nonce, str(problem), "refused")
        except Exception as problem:
            self.log(f"a message could not be answered: {type(problem).__name__}: {problem}")
            text = (
                f"this node could not answer ({type(problem).__name__}); its own log says why{_full(problem)}"
            )
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
        """Return names and sizes of clients and what their rows are."""
        kind = header.get("data", "table")
        if kind != self.data.kind:
            raise Refusal(f"this node's rows are {self.data.kind}, not {printable(kind, 30)}")
        told, run = self.data.told(header), header.get("run")
        knows = isinstance(run, str) and (run in self.runs or (self._folder(run) / SETUP).exists())
        return {"told": told, "knows": knows, "coterie": coterie.__version__}, {}

    def statistics(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Return sums over the training rows, for the shared encoding."""
        if "about" not in header:
            return self.data.statistics(header, tensors, self.state, None)
        run = str(header.get("run"))
        return self.data.statistics(header, tensors, self._folder(run), self.masks_of(run))

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
        setup = settings["setup"]
        self.settings = settings
        self.algorithm = service.make_algorithm(setup["algorithm"]["name"], **setup["algorithm"]["settings"])
        opened = service.data.open(settings, tensors, make_model(setup, service.policy))
        self.names, self.runtime, self.notes = opened.names, opened.runtime, opened.notes
        self.refit = str(setup.get("refit", "none"))
        if self.refit != "none":
            rows = joined(self.runtime.splits, REFIT[self.refit], service.policy.min_rows_per_statistic)
            self.runtime = self.runtime.with_rows(rows, self.runtime.clusters)
        self.guard = service.guard
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
        home = self.folder.with_name(self.folder.name.removesuffix(AGAIN))
        t, target = int(header["round"]), home / "run"
        if not self._path(t).exists() and target.exists():
            return {}, {}
        trained_on = ["train"] if self.refit == "none" else list(REFIT[self.refit])
        personal = self.models(t)
        own = [k for k in range(len(personal)) if not bool(personal[k].isnan().any())]
        models = {"personal": personal[own], "common": tensors.get("common", personal[own].mean(0))}
        files.write_tensors(target / "models" / "models.safetensors", models)
        files.write_json(
            target / "models" / "model.json",
            {
                "algorithm": self.algorithm.name,
                "trained_on": trained_on,
                "sha256": files.sha256(target / "models" / "models.safetensors"),
                "clients": [self.names[k] for k in own],
                "model": self.settings["setup"]["model"],
                **self.notes,
            },
        )
        if isinstance(self.runtime.model, CausalLM):
            places = systems.file_names([self.names[k] for k in own])
            for place, adapters in zip(places, personal[own], strict=True):
                self.runtime.model.save_adapter(adapters, target / "adapters" / place)
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


def _stamp(stored: Any) -> CallId | None:
    return None if stored is None else (int(stored[0]), int(stored[1]))


def _full(problem: Exception) -> str:
    """Return what the server is told of a full disk, which its owner can mend."""
    return ": its disk is full" if files.disk_is_full(problem) else ""

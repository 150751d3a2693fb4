"""A node's side of a federation: its own rows, the state of its clients on disk, and its answers.

Messages name what to do; nothing in them is executed. A node does what is in `NodeService.KINDS` and, of an
algorithm, its phases.
"""

from __future__ import annotations

import datetime
import hashlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

import coterie
from coterie._core import files
from coterie._core.errors import CoterieError
from coterie._core.printable import printable
from coterie.algorithms import Algorithm
from coterie.data.image_folders import Images
from coterie.data.texts import Texts
from coterie.deploy import wire
from coterie.deploy.audit import AuditError, AuditLog
from coterie.deploy.consent import Pending, Refusal
from coterie.deploy.guard import RUN, Guard
from coterie.deploy.identity import Identity
from coterie.deploy.node_data import Message, NodeData
from coterie.deploy.node_images import NodeImages
from coterie.deploy.node_masks import KINDS as MASK_KINDS
from coterie.deploy.node_masks import NodeMasks
from coterie.deploy.node_table import NodeTable
from coterie.deploy.node_texts import NodeTexts
from coterie.deploy.open_run import SETUP, Forgotten, OpenRun
from coterie.deploy.policy import TRUSTING, Policy
from coterie.deploy.relay import KINDS as RELAY_KINDS
from coterie.deploy.runnable import made

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
        make_algorithm: Callable[..., Algorithm] = made,
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

    def answer(self, message: wire.Content) -> wire.Content:
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
            answer = wire.encode_parts({**reply, **head, "nonce": nonce}, values)
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

    def _write_down(self, entry: dict[str, Any], answer: wire.Content) -> None:
        """Write to the audit log what is about to leave."""
        if self.audit is not None:
            digest = hashlib.sha256()
            for part in (answer,) if isinstance(answer, bytes) else answer:
                digest.update(part)
            told = {"bytes": wire.size(answer), "sha256": digest.hexdigest()}
            self.audit.write(**{**entry, "at": entry["at"]}, **told)

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

    def relay(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Exchange messages with the other nodes of a relayed run."""
        return self.run(header).relay(header, tensors)

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
        **dict.fromkeys(RELAY_KINDS, relay),
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


def _full(problem: Exception) -> str:
    """Return what the server is told of a full disk, which its owner can mend."""
    return ": its disk is full" if files.disk_is_full(problem) else ""

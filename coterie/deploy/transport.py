"""Send messages to nodes and collect their answers within a deadline."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from coterie._core.printable import printable
from coterie.deploy import wire

POLL = 0.02, 0.25  # seconds between looks for answers, at first and at most

Envelope = tuple[dict[str, Any], dict[str, Tensor]]  # header and tensors


class Undelivered(Exception):
    """A message that will get no answer, and why."""


class Transport(Protocol):
    """Carries messages to nodes, which it knows by name, and brings their answers."""

    def send(self, envelopes: Mapping[str, wire.Content], lasts: float) -> dict[str, str]:
        """Post a message to each of some nodes; return a ticket for each that could be posted."""

    def fetch(self, tickets: Collection[str], wait: float) -> dict[str, wire.Content | Undelivered]:
        """Return the answers that have arrived, by ticket; wait at most `wait` seconds for one on its way."""


@dataclass
class Activity:
    """What a node was asked and what it answered, in a run.

    Attributes
    ----------
    messages, answers : int
        Messages sent to the node, and answers that could be read.
    bytes_down, bytes_up : int
        Their lengths, without what the transport adds.
    seconds : float or None
        From the last message to its answer.
    problem : str
        What is wrong with the last answer; empty if nothing is.
    """

    messages: int = 0
    answers: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Posted:
    """A message on its way: the transport's ticket, its nonce and header, and when it was sent."""

    ticket: str
    nonce: str
    header: dict[str, Any]
    sent: float


@dataclass
class NodeCaller:
    """Sends messages, waits for answers, and says which node failed and why.

    Attributes
    ----------
    transport : Transport
        Carries the messages.
    deadline : float
        Seconds to wait for answers.
    note : callable
        Receives remarks about nodes.
    away : set of str
        Nodes that are not waited for.
    audit : callable
        Receives, for every answer, the node and what the server's log keeps of it.
    authority : str or None
        Certificate of the federation's authority, as PEM, by which nodes sign their keys for secure sums.
    activity : dict of str to Activity
        What every node has done so far.
    """

    transport: Transport
    deadline: float = 60.0
    note: Callable[[str], None] = field(default=lambda text: None)
    away: set[str] = field(default_factory=set)  # nodes that are not waited for
    audit: Callable[[str, dict[str, Any]], None] = field(default=lambda node, entry: None)
    authority: str | None = None
    activity: dict[str, Activity] = field(default_factory=dict)

    def ask(
        self, envelopes: Mapping[str, Envelope], deadline: float | None = None
    ) -> dict[str, wire.WireError | Envelope]:
        """Send a message to each of some nodes and wait for their answers.

        Parameters
        ----------
        envelopes
            Header and tensors by node.
        deadline
            Seconds to wait; None takes the caller's own.

        Returns
        -------
        dict of str
            For every node its header and tensors, or the error that says why there are none.
        """
        limit = self.deadline if deadline is None else deadline
        posted = self.post(envelopes, limit)
        answers = self.collect(posted, limit)
        for name, (header, _) in envelopes.items():
            if name not in answers:
                late = Late(f"no answer within {limit:g} s" if name in posted else "not connected")
                answers[name] = late
                self._note_answer(name, header, late)
        return answers

    def post(self, envelopes: Mapping[str, Envelope], lasts: float) -> dict[str, Posted]:
        """Send a message to each of some nodes.

        Parameters
        ----------
        envelopes
            Header and tensors by node.
        lasts
            Seconds after which nobody waits for the answers any more.

        Returns
        -------
        dict of str to Posted
            What `collect` needs, by node; a node that is not connected has none.
        """
        nonces = {name: secrets.token_hex(12) for name in envelopes}
        shared: dict[int, bytes] = {}  # what all are sent is encoded once
        encoded = {
            name: wire.encode_parts({**header, "nonce": nonces[name]}, tensors, shared)
            for name, (header, tensors) in envelopes.items()
        }
        for name, message in encoded.items():
            node = self.activity.setdefault(name, Activity())
            node.messages, node.bytes_down = node.messages + 1, node.bytes_down + wire.size(message)
        sent, tickets = time.monotonic(), self.transport.send(encoded, lasts)
        return {
            name: Posted(ticket, nonces[name], envelopes[name][0], sent) for name, ticket in tickets.items()
        }

    def collect(
        self,
        posted: Mapping[str, Posted],
        limit: float,
        enough: Callable[[Collection[str]], bool] = lambda names: False,
        parts: float = 0.0,
    ) -> dict[str, wire.WireError | Envelope]:
        """Wait for answers to messages.

        Parameters
        ----------
        posted
            The messages by node.
        limit
            Seconds to wait at most; 0 takes what is there.
        enough
            Told which nodes have answered; True ends the waiting.
        parts
            Seconds that an answer of which some parts are there may take beyond the limit: one that is given up half
            way is lost.

        Returns
        -------
        dict of str
            For every node that answered its header and tensors, or the error that says why there are none.
        """
        waiting = {message.ticket: name for name, message in posted.items()}
        answers: dict[str, Any] = {}
        end, pause = time.monotonic() + limit, POLL[0]
        while waiting and not enough(answers):
            began = time.monotonic()
            for ticket, content in self.transport.fetch(list(waiting), max(parts, end - began)).items():
                came_too_late = isinstance(content, Undelivered) and not parts and time.monotonic() >= end
                if not came_too_late:
                    name = waiting.pop(ticket)
                    answers[name] = self.read(content, posted[name].nonce)
                    self.activity[name].seconds = time.monotonic() - posted[name].sent
                    self.activity[name].bytes_up += (
                        0 if isinstance(content, Undelivered) else wire.size(content)
                    )
            # A look that began in time can end late; the next one is for those who answered meanwhile.
            if not waiting or began >= end:
                break
            # The server holds a look back until there is something new; one that it held needs no pause.
            time.sleep(max(0.0, min(pause, limit) - (time.monotonic() - began)))
            pause = min(1.5 * pause, POLL[1])
        for name, answer in answers.items():
            self._note_answer(name, posted[name].header, answer)
        return answers

    def _note_answer(self, name: str, asked: dict[str, Any], answer: wire.WireError | Envelope) -> None:
        fine = not isinstance(answer, wire.WireError)
        self.activity[name].answers += fine
        self.activity[name].problem = "" if fine else str(answer)
        self.audit(name, _entry(asked, answer))

    def read(self, content: wire.Content | Undelivered, nonce: str | None) -> Any:
        """Return a decoded answer, or the error that it is; `nonce` None accepts any."""
        if isinstance(content, Undelivered):
            return Late(printable(content))
        try:
            header, tensors = wire.decode(content)
        except wire.WireError as problem:
            return problem
        except Exception as problem:  # whatever a node sends, it ends its own part and nobody else's
            return wire.WireError(f"reply rejected: {type(problem).__name__}")
        if nonce is not None and header.get("nonce") != nonce:
            return wire.WireError("reply rejected: wrong nonce")
        if "error" in header:
            kind = ERRORS.get(str(header.get("code")), wire.WireError)
            return kind(printable(header["error"], 500))
        return header, tensors


def _entry(asked: dict[str, Any], answer: wire.WireError | Envelope) -> dict[str, Any]:
    """Return what a log keeps of a question and its answer; `head` is the newest line of the node's own log."""
    entry: dict[str, Any] = {name: asked[name] for name in ("kind", "phase", "round") if name in asked}
    if isinstance(answer, wire.WireError):
        return {**entry, "problem": str(answer)}
    return {**entry, "head": str(answer[0].get("audit", ""))[:64]}


class Late(wire.WireError):
    """No answer in time: the node is away until it is heard of again."""


class Forgot(wire.WireError):
    """The node has lost the state that the message starts from."""


class Waits(Late):
    """The owner of the node has not approved the run yet."""


ERRORS: dict[str, type[wire.WireError]] = {"forgot": Forgot, "pending": Waits}

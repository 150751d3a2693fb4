"""Letters to nodes and their answers: who is asked, how long is waited, what came back, in words."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from coterie.runtime import wire

POLL = 0.02, 0.25  # seconds between looks for answers, at first and at most

Letter = tuple[dict[str, Any], dict[str, Tensor]]  # header and tensors


class Undelivered(Exception):
    """A message that will have no answer, and why."""


class Carrier(Protocol):
    """What takes messages to nodes, by name, and brings their answers."""

    def send(self, letters: Mapping[str, bytes], lasts: float) -> dict[str, str]:
        """Post a letter to each of some nodes; a ticket for each that could be posted."""

    def fetch(self, tickets: Collection[str], wait: float) -> dict[str, bytes | Undelivered]:
        """The answers that have come so far, by ticket; one on its way is waited for, `wait` seconds at most."""


@dataclass
class Desk:
    """Sends letters, waits for answers, and says in words what went wrong with whom."""

    carrier: Carrier
    deadline: float = 60.0
    note: Callable[[str], None] = field(default=lambda text: None)
    away: set[str] = field(default_factory=set)  # nodes that are not waited for

    def ask(
        self, letters: Mapping[str, Letter], deadline: float | None = None
    ) -> dict[str, wire.WireError | Letter]:
        """Answers by node: decoded, or why there is none."""
        limit = self.deadline if deadline is None else deadline
        nonces = {name: secrets.token_hex(12) for name in letters}
        encoded = {
            name: wire.encode({**header, "nonce": nonces[name]}, tensors)
            for name, (header, tensors) in letters.items()
        }
        tickets = self.carrier.send(encoded, limit)
        waiting = {ticket: name for name, ticket in tickets.items()}
        answers: dict[str, Any] = {name: Late("is not signed in") for name in letters if name not in tickets}
        end, pause = time.monotonic() + limit, POLL[0]
        while waiting:
            began = time.monotonic()
            for ticket, content in self.carrier.fetch(list(waiting), max(0.0, end - began)).items():
                came_too_late = isinstance(content, Undelivered) and time.monotonic() >= end
                if not came_too_late:
                    name = waiting.pop(ticket)
                    answers[name] = self.read(content, nonces[name])
            # A look that began in time can end late; the next one is for those who answered meanwhile.
            if not waiting or began >= end:
                break
            time.sleep(pause)
            pause = min(1.5 * pause, POLL[1])
        for name in waiting.values():
            answers[name] = Late(f"no answer within {limit:g} s")
        return answers

    def read(self, content: bytes | Undelivered, nonce: str | None) -> Any:
        """A decoded answer, or the error it is."""
        if isinstance(content, Undelivered):
            return Late(str(content))
        try:
            header, tensors = wire.decode(content)
        except wire.WireError as problem:
            return problem
        if nonce is not None and header.get("nonce") != nonce:
            return wire.WireError("the answer belongs to another message")
        if "error" in header:
            kind = Forgot if header.get("code") == "forgot" else wire.WireError
            return kind(str(header["error"])[:500])
        return header, tensors


class Late(wire.WireError):
    """No answer in time: the node is away until it is heard of again."""


class Forgot(wire.WireError):
    """The node has lost what the message builds on."""

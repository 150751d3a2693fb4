"""A transport to nodes in this process: real messages, real state files, no network."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from coterie.deploy import wire
from coterie.deploy.node_service import NodeService
from coterie.deploy.transport import Undelivered


class InProcessTransport:
    """Carry messages to nodes in this process, to check an algorithm without a network.

    Parameters
    ----------
    nodes : mapping of str to NodeService
        The nodes by name. A node answers when its answer is fetched.
    """

    def __init__(self, nodes: Mapping[str, NodeService]) -> None:
        self.nodes = dict(nodes)
        self._posted: dict[str, tuple[str, wire.Content]] = {}
        self._count = 0

    def send(self, envelopes: Mapping[str, wire.Content], lasts: float) -> dict[str, str]:
        """Post a message to each of these nodes and return a ticket for each."""
        tickets = {}
        for name, envelope in envelopes.items():
            self._count += 1
            tickets[name] = str(self._count)
            self._posted[tickets[name]] = name, envelope
        return tickets

    def fetch(self, tickets: Collection[str], wait: float) -> dict[str, wire.Content | Undelivered]:
        """Return the answers to these tickets."""
        answers: dict[str, wire.Content | Undelivered] = {}
        for ticket in tickets:
            name, envelope = self._posted.pop(ticket)
            answers[ticket] = self.nodes[name].answer(envelope)
        return answers

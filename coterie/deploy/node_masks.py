"""A node's keys for secure sums, and the messages by which nodes prepare a sum and take the masks off it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from coterie.deploy import secure_aggregation as secure
from coterie.deploy import wire
from coterie.deploy.consent import Refusal
from coterie.deploy.identity import Identity

KINDS = ("sum_keys", "sum_shares", "unmask")
SLOTS = 16  # sums that nodes prepare for at once

Message = tuple[dict[str, Any], dict[str, Tensor]]


def context(about: Mapping[str, Any]) -> bytes:
    """Return a hash of everything that nodes must agree on before they mask an answer."""
    return secure.digest(about)


class NodeMasks:
    """A node's keys for the sums of one run, and the messages by which nodes prepare and unmask a sum.

    Parameters
    ----------
    run
        Identifier of the run.
    identity
        Signs the keys of this node and checks those of the others; None neither signs nor checks.
    least
        Fewest nodes whose answers are added up.
    """

    def __init__(self, run: str, identity: Identity | None = None, least: int = secure.LEAST) -> None:
        self.run, self.identity, self.least = run, identity, least
        self._party: secure.Party | None = None

    @property
    def nodes(self) -> int:
        """Number of nodes that prepared for the next sums."""
        return self.party.nodes

    @property
    def party(self) -> secure.Party:
        """The keys that the server was given last."""
        if self._party is None:
            raise wire.WireError("message rejected: no keys for secure sums on this node")
        return self._party

    def answer(self, header: dict[str, Any]) -> Message:
        """Answer one of the messages that prepare or unmask a sum."""
        kind = header["kind"]
        if kind == "sum_keys":
            return {"keys": self._new_keys(str(header["node"]), int(header["slots"]))}, {}
        if kind == "sum_shares":
            return {"shares": self.party.shares(self._checked(header["roster"]))}, {}
        alive = [str(one) for one in header["alive"]]
        if len(set(alive)) < self.least:
            raise Refusal(f"policy: at least {self.least} nodes are in a sum")
        return {"revealed": self.party.reveal(int(header["slot"]), alive)}, {}

    def masked(self, header: Mapping[str, Any], total: Tensor, weight: float) -> Tensor:
        """Return a sum of this node's clients under the masks of the slot that a message names."""
        if header.get("sealed"):
            self.party.receive(header["sealed"])
        about = header["about"]
        whole = secure.encode(total, secure.fraction_bits(float(about["weight"])), weight)
        return self.party.masked(int(header["slot"]), whole, context(about))

    def _new_keys(self, name: str, slots: int) -> dict[str, Any]:
        if not 1 <= slots <= SLOTS:
            raise wire.WireError(f"message rejected: {slots} sums at once")
        if self.identity is not None and name != self.identity.name:
            raise Refusal(f"this node is {self.identity.name}, by its certificate")
        self._party = secure.Party(name, slots)
        keys = self._party.public()
        return keys if self.identity is None else {**keys, **self.identity.sign(signed(self.run, name, keys))}

    def _checked(self, roster: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the keys of all nodes, each signed by its node for this run."""
        if len(roster) < self.least:
            raise Refusal(f"policy: at least {self.least} nodes are in a sum")
        found = {name: keys_only(keys) for name, keys in roster.items()}
        if self.identity is not None:
            for name, keys in found.items():
                self.identity.require(name, signed(self.run, name, keys), roster[name])
        return found


def keys_only(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the public keys of a node without its signature."""
    return {part: keys[part] for part in ("channel", "masks", "selves")}


def signed(run: str, name: str, keys: Mapping[str, Any]) -> bytes:
    """Return what a node signs when it sends its keys."""
    return secure.digest("keys for secure sums", run, name, keys)

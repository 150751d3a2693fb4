"""Relay: nodes say to each other what the server only carries.

In a relayed run every node runs the server's side of the algorithm for itself, and what its clients answer goes to all
other nodes, encrypted for each (X25519, HKDF and AES-GCM of `cryptography`). The server passes bytes on and learns
sizes, names of phases and the scores of deployed models. Nodes sign their keys, so that it cannot put its own between.
Every message is bound to its sender, its recipient and all that was exchanged before it, so that a message that is
changed, repeated, held back or given to another node is rejected. The node's side is `RelayKeys` here and `Replica` in
`replica.py`; the server's is `RelayCaller`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered, RunError, SettingError
from coterie.algorithms.base import Algorithm
from coterie.deploy import wire
from coterie.deploy.consent import Refusal
from coterie.deploy.identity import Identity
from coterie.deploy.key_agreement import agreed, derived, private_key, public_bytes
from coterie.deploy.secure_aggregation import digest
from coterie.deploy.transport import Envelope
from coterie.engine.federation import Federation
from coterie.engine.ledger import PEERS, Entry
from coterie.engine.state import State
from coterie.models.base import Model

if TYPE_CHECKING:
    from coterie.deploy.remote import RemoteRuntime

KINDS = ("relay_keys", "relay_join", "relay")
LEAST = 2  # nodes that exchange anything
ATTEMPTS = 5  # at a round, while nodes vanish
USE = b"coterie relay "
NONCE = 12


def signed(run: str, name: str, key: str) -> bytes:
    """Return what a node signs when it sends its key."""
    return digest("key for relayed messages", run, name, key)


class RelayKeys:
    """A node's key for the messages to other nodes, new for every group of nodes.

    Parameters
    ----------
    run, name
        The run, and the name of this node.
    identity
        Signs the key of this node and checks those of the others; None neither signs nor checks.
    """

    def __init__(self, run: str, name: str, identity: Identity | None) -> None:
        if identity is not None and name != identity.name:
            raise Refusal(f"this node is {identity.name}, by its certificate")
        self.run, self.name, self.identity = run, name, identity
        self._secret = private_key(secrets.token_bytes(32))
        self._lines: dict[str, bytes] = {}
        self.transcript = b""

    def public(self) -> dict[str, str]:
        """Return this node's public key, signed."""
        key = public_bytes(self._secret).hex()
        if self.identity is None:
            return {"key": key}
        return {"key": key, **self.identity.sign(signed(self.run, self.name, key))}

    def join(self, roster: Mapping[str, Mapping[str, str]], about: Any) -> None:
        """Take the keys of all nodes of the group, and what these must agree on."""
        if self.transcript:
            raise wire.WireError("message rejected: this key has its group of nodes already")
        keys = {name: str(told["key"]) for name, told in roster.items()}
        if len(keys) < LEAST or keys.get(self.name) != public_bytes(self._secret).hex():
            raise wire.WireError(f"message rejected: a relay needs {LEAST} nodes and this node's own key")
        for name, key in keys.items():
            if self.identity is not None:
                self.identity.require(name, signed(self.run, name, key), roster[name])
                known = self.identity.members
                if known and name not in known and name != self.name:
                    raise Refusal(
                        f"policy: {name} is not among the members whose certificates the owner compared"
                    )
            if name != self.name:
                self._lines[name] = agreed(self._secret, key)
        self.transcript = digest("relay", self.run, keys, about)

    @property
    def others(self) -> list[str]:
        """Names of the other nodes of the group."""
        return sorted(self._lines)

    def note(self, *what: Any) -> None:
        """Bind all further messages to something that all nodes of the group must see alike."""
        self.transcript = digest(self.transcript.hex(), *what)

    def seal(self, other: str, content: bytes) -> bytes:
        """Return a message that only another node of the group can read."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = secrets.token_bytes(NONCE)
        return nonce + AESGCM(self._key(other)).encrypt(nonce, content, self._bound(self.name, other))

    def opened(self, other: str, sealed: bytes) -> bytes:
        """Return what another node of the group sealed for this one, at this point of the exchange."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        if other not in self._lines:
            raise wire.WireError("message rejected: it is of no node of this group")
        try:
            return AESGCM(self._key(other)).decrypt(
                sealed[:NONCE], sealed[NONCE:], self._bound(other, self.name)
            )
        except (InvalidTag, ValueError):
            raise wire.WireError(
                f"message rejected: what {other} is said to have sent was changed, is old, or is for somebody else"
            ) from None

    def _key(self, other: str) -> bytes:
        return derived(self._lines[other], USE + self.run.encode())

    def _bound(self, sender: str, recipient: str) -> bytes:
        return digest(sender, recipient, self.transcript.hex())


@dataclass(frozen=True)
class Relayed(Algorithm):
    """An algorithm whose server's side runs on the nodes; here only rounds are counted.

    Parameters
    ----------
    inner
        The algorithm.
    """

    inner: Algorithm = None  # type: ignore[assignment]  # fields before it have defaults

    def __post_init__(self) -> None:
        for name in ("name", "reveals", "varying"):
            object.__setattr__(self, name, getattr(self.inner, name))
        object.__setattr__(self, "batch", self.inner.batch)

    def start(self, fed: Federation) -> State:
        """Let nodes start."""
        return self._relayed(fed, 0)

    def round(self, fed: Federation, s: State, t: int) -> State:
        """Let nodes take a round."""
        return self._relayed(fed, t)

    def _relayed(self, fed: Federation, t: int) -> State:
        relay: RelayCaller = fed.runtime.relay  # type: ignore[attr-defined]  # only a runtime that relays makes this
        relay.round(fed, t)
        return State(relayed=t)

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return nothing: nodes have what `deploy` takes."""
        return {}, {}

    def traffic_of(self, model: Model) -> dict[str, tuple[int, int]]:
        """Return nothing: what nodes exchange is counted when it travels."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Return the settings of the algorithm that nodes run."""
        return self.inner.settings()


class RelayCaller:
    """The server's side: it lets nodes exchange keys, and passes on what they say to each other.

    Parameters
    ----------
    runtime
        The clients on nodes.
    """

    def __init__(self, runtime: RemoteRuntime) -> None:
        self.runtime = runtime
        self._group: list[str] = []
        self._behind: set[str] = (
            set()
        )  # nodes that missed a round, whose copy of the server is of an earlier one

    def adapted(self, algorithm: Any) -> Any:
        """Return the algorithm as the server of a relayed run sees it."""
        assert isinstance(algorithm, Algorithm)
        if isinstance(algorithm, Relayed):
            return algorithm
        if not algorithm.relays:
            raise SettingError(
                f"{algorithm.name} cannot run among nodes (relays); choose pdl-tc, fc or cobo, or leave out --relay"
            )
        return Relayed(inner=algorithm)

    def round(self, fed: Federation, t: int) -> None:
        """Carry the messages of one round; a round that loses a node begins again without it."""
        for _ in range(ATTEMPTS):
            here = [place.name for place in self.runtime.places if place.here]
            names = [name for name in here if name not in self._behind]
            if names != self._group:
                self._join(fed, names)
                names = self._group
            if len(names) < LEAST:
                raise NobodyAnswered(f"fewer than {LEAST} nodes are here to exchange anything")
            if self._carried(fed, t):
                for place in self.runtime.places:
                    if place.name in names:
                        place.stamp = (t, 0)
                    elif place.name not in self._behind:
                        self._behind.add(place.name)
                        self.runtime.caller.note(
                            f"{place.name} has missed round {t} and is out of the rest of this run: what the others "
                            "know cannot be made up for"
                        )
                return
        raise RunError(f"round {t}: nodes vanished {ATTEMPTS} times in the middle of it")

    def _join(self, fed: Federation, names: list[str]) -> None:
        """Let nodes exchange new keys, and tell them who the clients of the federation are."""
        runtime, self._group = self.runtime, []
        about: dict[str, Any] = {
            "names": fed.names,
            "rows": {split: count.tolist() for split, count in fed.rows.items()},
            "clusters": None if fed.clusters is None else fed.clusters.tolist(),
            "nodes": {name: runtime.named(name).ids.tolist() for name in names},
        }
        asked: dict[str, Envelope] = {name: (self._about("relay_keys", node=name), {}) for name in names}
        roster = {name: reply[0].get("keys") for name, reply in self._fine(asked).items()}
        about["nodes"] = {name: about["nodes"][name] for name in roster}
        joined: dict[str, Envelope] = {
            name: (self._about("relay_join", roster=roster, about=about), {}) for name in roster
        }
        if len(roster) >= LEAST and len(self._fine(joined)) == len(roster):
            self._group = list(roster)

    def _carried(self, fed: Federation, t: int) -> bool:
        """Pass messages on until all nodes have done the round; False if one of them is gone."""
        runtime, step = self.runtime, 0
        inbox: dict[str, dict[str, Tensor]] = {name: {} for name in self._group}
        while True:
            envelopes: dict[str, Envelope] = {}
            for name in self._group:
                place = runtime.named(name)
                about = self._about("relay", round=t, step=step, since=place.stamp, floor=place.floor)
                envelopes[name] = about, {f"from.{other}": value for other, value in inbox[name].items()}
            replies = self._fine(envelopes)
            if len(replies) < len(self._group):
                self._group = []
                return False
            told = {(str(header.get("phase")), bool(header.get("done"))) for header, _ in replies.values()}
            if len(told) > 1:
                raise RunError(f"round {t}: nodes disagree on what comes next ({sorted(told)})")
            phase, done = told.pop()
            if done:
                return True
            inbox = {name: {} for name in self._group}
            for name, (header, tensors) in replies.items():
                for other in self._group:
                    sealed = tensors.get(f"to.{other}")
                    if other != name and sealed is not None:
                        inbox[other][name] = sealed
                        self._count(fed, phase, header, sealed)
            step += 1

    def _count(self, fed: Federation, phase: str, header: Mapping[str, Any], sealed: Tensor) -> None:
        """Count one message from node to node: its bytes as they travel, and the numbers that its sender put in."""
        floats = header.get("floats")
        entry = Entry(fed.round, "setup" if fed.round == 0 else "train", phase, PEERS)
        numbers = floats if isinstance(floats, int) and 0 <= floats <= sealed.numel() else 0
        fed.ledger.add(entry, (0, 0, 0), (1, numbers, sealed.numel()))

    def _fine(self, envelopes: Mapping[str, Envelope]) -> dict[str, Envelope]:
        """Return the answers; nodes that sent none, or refused, are left out from now on."""
        found: dict[str, Envelope] = {}
        for name, reply in self.runtime.caller.ask(envelopes).items():
            if isinstance(reply, wire.WireError):
                self.runtime.lose(self.runtime.named(name), reply)
                self.runtime.named(name).here = False
            elif any(value.dtype != torch.uint8 or value.dim() != 1 for value in reply[1].values()):
                self.runtime.lose(self.runtime.named(name), wire.WireError("reply rejected: not sealed"))
                self.runtime.named(name).here = False
            else:
                found[name] = reply
        return found

    def _about(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "run": self.runtime.setup.run, **more}

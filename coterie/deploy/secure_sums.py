"""Sums of answers across a network: nodes hold what a phase returned and send masked sums of it.

A call of a phase and a sum are two messages. The node answers the call with nothing but whose numbers are finite; the
server then says which sum it wants, and all nodes that were told the same thing add it up under masks
(`secure_aggregation`). The node's side is `NodeSums`, the server's `SumCaller`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered, SettingError
from coterie.deploy import secure_aggregation as secure
from coterie.deploy import wire
from coterie.deploy.consent import Refusal
from coterie.deploy.identity import Identity
from coterie.deploy.messages import under
from coterie.deploy.node_masks import SLOTS, Message, NodeMasks, context, keys_only, signed
from coterie.deploy.transport import Envelope, NodeCaller
from coterie.engine.protocol import Call, FederatedAlgorithm
from coterie.engine.sums import HeldByClients, SumRequest, Total

if TYPE_CHECKING:
    from coterie.deploy.node_privacy import NodePrivacy
    from coterie.engine.local_runtime import LocalRuntime

MOST = 1 << 31  # numbers along one axis of an answer
ATTEMPTS = 3  # to exchange keys while nodes vanish
NODES_IN_A_CLUSTER = 2  # below which the sum of a cluster would be one node's answer


class NodeSums:
    """What a node holds of the last call.

    Parameters
    ----------
    runtime, algorithm
        The node's clients and what they run.
    masks
        The node's keys, under whose masks sums leave; None lets them out as they are.
    privacy
        Noise and budget of the node's clients, where they are kept private.
    """

    def __init__(
        self,
        runtime: LocalRuntime,
        algorithm: FederatedAlgorithm,
        masks: NodeMasks | None,
        privacy: NodePrivacy | None = None,
    ) -> None:
        self.runtime, self.algorithm, self.masks, self.privacy = runtime, algorithm, masks, privacy
        self._held: HeldByClients | None = None
        self._summed: set[str | None] = set()

    @classmethod
    def of(
        cls,
        runtime: LocalRuntime,
        algorithm: FederatedAlgorithm,
        setup: Mapping[str, Any],
        masks: NodeMasks,
        privacy: NodePrivacy | None = None,
    ) -> NodeSums | None:
        """Return what the settings of a run ask for; None where answers leave one by one."""
        sums = setup.get("sums")
        if sums is not None:
            return cls(runtime, algorithm, masks if sums["secure"] else None, privacy)
        if privacy is not None and privacy.settings.unit == "client":
            raise SettingError("noise that nodes share needs secure sums: --secure")
        return None

    def hold(self, header: dict[str, Any], sent: dict[str, Tensor], reply: Message) -> Message:
        """Keep the values of a reply here, and return the reply without them."""
        if header["split"]:
            return reply  # scores of deployed models
        if header["compress"]:
            raise Refusal("compressed answers cannot be added up; leave the compressor out")
        call = Call(
            self.algorithm,
            str(header["phase"]),
            int(header["round"]),
            int(header["call"]),
            {**header["numbers"], **under("shared.", sent)},
            under("each.", sent),
        )
        at = sent["at"]
        rows = self.runtime.train.size[at].unsqueeze(-1).double()
        good = reply[1].get("good")
        self._held = HeldByClients(under("value.", reply[1]), self.runtime.ids[at], rows, call, good)
        self._summed = set()
        return reply[0], {} if good is None else {"good": good}

    def answer(self, header: dict[str, Any]) -> Message:
        """Return a sum of what is held, each once."""
        about = header["about"]
        request = request_from(about)
        place = self._held
        if place is None or about["call"] != [place.call.round, place.call.call, place.call.phase]:
            raise wire.WireError("message rejected: this node holds no answer to that call")
        if request.name in self._summed:
            raise wire.WireError("message rejected: this answer was added up already")
        try:
            _check_groups(about, place.ids)
            place.values(request)
        except SettingError as problem:
            raise Refusal(str(problem)) from None
        self._summed.add(request.name)
        total, weight = self._total(place, request)
        shape = {"shape": list(place.shape(request))}
        if self.masks is None:
            return shape, {"total": total}
        return shape, {"total": self.masks.masked(header, total, weight)}

    def _total(self, place: HeldByClients, request: SumRequest) -> tuple[Tensor, float]:
        """Return the sums of this node's clients as one vector, and their weight."""
        if self.privacy is not None and self.privacy.settings.unit == "client":
            if self.masks is None or request.clip <= 0:
                raise wire.WireError("message rejected: this node gives noisy sums only, with a clip norm")
            among = secure.enough(self.masks.nodes)
            return self.privacy.total(place, request, among), float(len(place.ids))
        share = place.members(request) * place.weights(request).t()
        total = (share @ place.values(request)).flatten()
        if isinstance(request.groups, str):
            total = torch.cat([total, share.sum(-1)])
        return total, float(place.weights(request).sum())


@dataclass
class SumCaller:
    """The server's side of sums: keys that nodes have prepared, and the messages.

    Attributes
    ----------
    caller : NodeCaller
        Sends messages to the nodes.
    run : str
        Identifier of the run.
    secure : bool
        Whether sums arrive under masks.
    """

    caller: NodeCaller
    run: str
    secure: bool = True
    _roster: dict[str, Any] = field(default_factory=dict)
    _sealed: dict[str, dict[str, str]] = field(default_factory=dict)
    _next: int = 0
    _slots: int = 0

    def total(self, call: Call, ids: Mapping[str, Tensor], rows: Tensor, request: SumRequest) -> Total:
        """Return a sum over the clients `ids` of some nodes, whose row counts [n, 1] are known.

        Raises
        ------
        NobodyAnswered
            Too few nodes are left to add anything up.
        """
        names = self._prepared(sorted(ids)) if self.secure else sorted(ids)
        about = self._about(call, {name: ids[name] for name in names}, rows, request)
        header = {"kind": "sum", "run": self.run, "about": about, "slot": self._next}
        envelopes: dict[str, Envelope] = {
            name: ({**header, "sealed": self._sealed.pop(name, {})}, {}) for name in names
        }
        slot, self._next = self._next, self._next + 1
        came = self._same_shape(self.caller.ask(envelopes), request, self.secure)
        self._require(came, call.phase)
        parts = {name: values for name, (_, values) in came.items()}
        shape = next(iter(came.values()))[0]
        if self.secure:
            whole = self._unmasked(slot, parts, about, call.phase)
            flat = self._decoded(whole, about, call.phase)
        else:
            flat = torch.stack(list(parts.values())).sum(0)
        present = torch.cat([ids[name] for name in parts])
        return _split(flat, shape, request, present, rows)

    def vector(
        self, about: Mapping[str, Any], envelopes: Mapping[str, Envelope], length: int
    ) -> tuple[Tensor, list[str]]:
        """Return the sum of vectors that nodes answer a message with, and the nodes that are in it.

        Parameters
        ----------
        about
            What nodes must agree on; its `weight` bounds the numbers.
        envelopes
            The message for each node, without what it is about.
        length
            How many numbers a vector has.

        Raises
        ------
        NobodyAnswered
            Too few nodes are left to add anything up.
        """
        names = self._prepared(sorted(envelopes)) if self.secure else sorted(envelopes)
        slot, self._next = self._next, self._next + 1
        asked: dict[str, Envelope] = {
            name: (
                {**envelopes[name][0], "about": about, "slot": slot, "sealed": self._sealed.pop(name, {})},
                envelopes[name][1],
            )
            for name in names
        }
        kind, came = torch.int64 if self.secure else torch.float64, {}
        for name, (_, tensors) in self._fine(self.caller.ask(asked)).items():
            values = tensors.get("total")
            if values is None or values.dtype != kind or values.shape != (length,) or not _finite(values):
                self.caller.note(f"{name} is left out of a sum: malformed values")
                continue
            came[name] = values
        self._require(came, "statistics")
        if not self.secure:
            return torch.stack(list(came.values())).sum(0), list(came)
        return self._decoded(self._unmasked(slot, came, about, "statistics"), about, "statistics"), list(came)

    def _decoded(self, whole: Tensor, about: Mapping[str, Any], what: str) -> Tensor:
        """Return the numbers of a sum; raise `NobodyAnswered` if honest nodes cannot have added them."""
        flat = secure.decode(whole, secure.fraction_bits(about["weight"]))
        if float(flat.abs().max() if len(flat) else 0) > 2**secure.MAGNITUDE * max(1.0, about["weight"]):
            self.caller.note(f"{what}: a node added numbers that are too large; the sum is not used")
            raise NobodyAnswered(f"{what}: the sum is larger than honest answers can be")
        return flat

    def _prepared(self, names: list[str]) -> list[str]:
        """Return the nodes that have keys and each other's shares for the next sum; make new ones if need be."""
        if set(names) == set(self._roster) and self._next < self._slots:
            return names
        slots = SLOTS if not self._roster or set(names) == set(self._roster) else 1
        for _ in range(ATTEMPTS):
            roster = self._keys(names, slots)
            told: dict[str, Envelope] = {
                name: ({"kind": "sum_shares", "run": self.run, "roster": roster}, {}) for name in roster
            }
            sent: dict[str, dict[str, Any]] = {
                name: reply[0]["shares"]
                for name, reply in self._fine(self.caller.ask(told)).items()
                if isinstance(reply[0].get("shares"), dict)
            }
            self._require(sent, "exchange of shares")
            names = sorted(sent)
            if len(sent) == len(roster):
                break
        self._roster = {name: keys_only(keys) for name, keys in roster.items()}
        self._slots, self._next = slots, 0
        self._sealed = {
            name: {owner: str(shares[name]) for owner, shares in sent.items() if name in shares}
            for name in sent
        }
        return names

    def _keys(self, names: Sequence[str], slots: int) -> dict[str, Any]:
        """Return the keys of the nodes that sent some, signed if the federation has an authority."""
        asked: dict[str, Envelope] = {
            name: ({"kind": "sum_keys", "run": self.run, "node": name, "slots": slots}, {}) for name in names
        }
        self._roster, roster = {}, {}
        for name, reply in self._fine(self.caller.ask(asked)).items():
            keys: Any = reply[0].get("keys")
            try:
                if not _are_keys(keys, slots):
                    raise wire.WireError("malformed keys")
                if self.caller.authority is not None:
                    known = Identity(None, "", self.caller.authority)
                    known.require(name, signed(self.run, name, keys_only(keys)), keys)
                roster[name] = keys
            except wire.WireError as problem:
                self.caller.note(f"{name} is left out of a sum: {problem}")
        self._require(roster, "exchange of keys")
        return roster

    def _about(
        self, call: Call, ids: Mapping[str, Tensor], rows: Tensor, request: SumRequest
    ) -> dict[str, Any]:
        present = torch.cat(list(ids.values()))
        weight = float(len(present) if request.uniform else rows[present].sum())
        stored = dataclasses.asdict(request)
        stored["groups"] = request.groups.tolist() if isinstance(request.groups, Tensor) else request.groups
        about = {
            "call": [call.round, call.call, call.phase],
            "request": stored,
            "clients": {name: own.tolist() for name, own in ids.items()},
            "weight": weight,
        }
        _check_groups(about, present)
        return about

    def _unmasked(self, slot: int, masked: dict[str, Tensor], about: Mapping[str, Any], phase: str) -> Tensor:
        header = {"kind": "unmask", "run": self.run, "slot": slot, "alive": sorted(masked)}
        replies = self._fine(self.caller.ask({name: (header, {}) for name in masked}))
        revealed = {
            name: reply[0]["revealed"]
            for name, reply in replies.items()
            if _are_shares(reply[0].get("revealed"), self._roster)
        }
        try:
            return secure.unmask(self._roster, slot, masked, revealed, context(about))
        except (wire.WireError, ValueError) as problem:
            self._roster = {}
            raise NobodyAnswered(f"{phase}: the sum could not be unmasked ({problem})") from None

    def _same_shape(
        self, answers: Mapping[str, wire.WireError | Envelope], request: SumRequest, whole: bool
    ) -> dict[str, tuple[tuple[int, ...], Tensor]]:
        """Return the totals that have the shape that most nodes sent."""
        kind = torch.int64 if whole else torch.float64
        found: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        for name, (header, tensors) in self._fine(answers).items():
            shape, values = header.get("shape"), tensors.get("total")
            if not isinstance(shape, list) or not all(
                type(size) is int and 0 <= size <= MOST for size in shape
            ):
                self.caller.note(f"{name} is left out of a sum: malformed shape")
                continue
            length = request.count * (math.prod(shape) + isinstance(request.groups, str)) + (request.clip > 0)
            if values is None or values.dtype != kind or values.shape != (length,):
                self.caller.note(f"{name} is left out of a sum: malformed values")
                continue
            found[name] = tuple(shape), values
        if not found:
            return found
        usual = Counter(shape for shape, _ in found.values()).most_common(1)[0][0]
        return {name: part for name, part in found.items() if part[0] == usual}

    def _fine(self, answers: Mapping[str, wire.WireError | Envelope]) -> dict[str, Envelope]:
        good = {}
        for name, reply in answers.items():
            if isinstance(reply, wire.WireError):
                self.caller.note(f"{name} is left out of a sum: {reply}")
            else:
                good[name] = reply
        return good

    def _require(self, nodes: Sequence[str] | Mapping[str, Any], what: str) -> None:
        least = secure.enough(len(self._roster)) if self.secure else 1
        if len(nodes) < least:
            self._roster = {}
            problem = f"{what}: {len(nodes)} nodes are left, and a secure sum needs {least}"
            self.caller.note(problem)
            raise NobodyAnswered(problem)


@dataclass(frozen=True)
class RemoteHeld:
    """Answers to one call that nodes hold.

    Attributes
    ----------
    sums : SumCaller
        Asks the nodes.
    call : Call
        The call that they answered.
    ids : dict of str to Tensor
        Clients with a finite answer, by node.
    rows : Tensor
        Training rows of every client of the federation, [n, 1].
    """

    sums: SumCaller
    call: Call
    ids: dict[str, Tensor]
    rows: Tensor

    def total(self, request: SumRequest) -> Total:
        """Return a sum of the answers."""
        return self.sums.total(self.call, self.ids, self.rows, request)


def request_from(about: Mapping[str, Any]) -> SumRequest:
    """Return the request that a message asks for."""
    stored = dict(about["request"])
    groups = stored.pop("groups")
    return SumRequest(**stored, groups=torch.tensor(groups) if isinstance(groups, list) else groups)


def _split(flat: Tensor, shape: tuple[int, ...], request: SumRequest, ids: Tensor, rows: Tensor) -> Total:
    """Return the sums and weights in one vector as a `Total`."""
    count, short = request.count, 0.0
    if request.clip > 0:
        flat, short = flat[:-1], float(flat[-1])
    if isinstance(request.groups, str):
        flat, weights = flat[:-count], flat[-count:].unsqueeze(-1)
    else:
        each = torch.ones(len(ids), dtype=torch.float64) if request.uniform else rows[ids].flatten().double()
        label = torch.zeros(len(ids), dtype=torch.long) if request.groups is None else request.groups[ids]
        weights = torch.zeros(count, dtype=torch.float64).index_add(0, label, each).unsqueeze(-1)
    return Total(flat.view(count, *shape), weights, ids, short)


def _check_groups(about: Mapping[str, Any], own: Tensor) -> None:
    """Refuse the sum of a cluster that one node has for itself."""
    groups = about["request"]["groups"]
    if not isinstance(groups, list):
        return
    where: dict[int, set[str]] = {}
    for name, ids in about["clients"].items():
        for k in ids:
            where.setdefault(int(groups[k]), set()).add(name)
    alone = [cluster for cluster, nodes in where.items() if len(nodes) < NODES_IN_A_CLUSTER]
    if alone and set(alone) & {int(groups[k]) for k in own.tolist()}:
        raise SettingError(
            f"cluster {alone[0]} is on one node alone, so that its sum would be that node's answer; leave out --secure"
        )


def _finite(values: Tensor) -> bool:
    return not values.is_floating_point() or bool(values.isfinite().all())


def _are_keys(keys: Any, slots: int) -> bool:
    return (
        isinstance(keys, dict)
        and isinstance(keys.get("channel"), str)
        and all(isinstance(keys.get(part), list) and len(keys[part]) == slots for part in ("masks", "selves"))
        and all(
            isinstance(key, str) and len(key) == 64
            for key in [keys["channel"], *keys["masks"], *keys["selves"]]
        )
    )


def _are_shares(revealed: Any, roster: Mapping[str, Any]) -> bool:
    return isinstance(revealed, dict) and all(
        name in roster
        and isinstance(share, list)
        and len(share) == 2
        and isinstance(share[0], int)
        and isinstance(share[1], str)
        and len(share[1]) == 2 * secure.SEED
        for name, share in revealed.items()
    )

"""A federation of nodes in one process, speaking bytes: what a distributed engine carries, without one.

Each node holds a shard of the clients and sees nothing but messages. `Nodes` is the server's end and
offers what `Shard` offers; a real transport replaces `Node.handle` by a network.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.federation.compressors import compressor
from coterie.federation.federation import Federation
from coterie.federation.parcels import Parcel, parcel_keys
from coterie.runtime import wire
from coterie.runtime.shard import Answer, Call, Shard, Visits, visit_keys


class Node:
    """One machine with its own clients. It runs only the phases of the algorithm it was set up with."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def handle(self, algorithm: Any, message: bytes) -> bytes:
        """Answer one message."""
        header, tensors = wire.decode(message)
        if header["algorithm"] != algorithm.name or header["phase"] not in phases(algorithm):
            raise wire.WireError(f"{algorithm.name} has no phase {header['phase']!r}")
        shared = {**header["numbers"], **_under("shared.", tensors)}
        call = Call(
            algorithm,
            header["phase"],
            header["round"],
            header["call"],
            shared,
            _under("each.", tensors),
            compressor(header["compress"]) if header["compress"] else None,
        )
        welcome = None
        if header["begins"]:
            welcome = {**header["welcome_numbers"], **_under("welcome.", tensors)}
        visits = Visits(tensors.get("at"), tensors.get("nth"))
        if header["split"]:
            answer = self.shard.evaluate(call, visits, header["split"], welcome)
        else:
            answer = self.shard.run(call, visits, welcome, lasting=header["lasting"], packed=True)
        reply = {f"value.{name}": value for name, value in answer.named.items()}
        if answer.good is not None:
            reply["good"] = answer.good
        parcels = {
            name: [parcel.ordinal, parcel.length, wire.NAMES[parcel.dtype]]
            for name, parcel in answer.parcels.items()
        }
        return wire.encode({"parcels": parcels}, reply)


class Nodes:
    """The server's end: groups visits by node, one message each, and puts the answers back in order."""

    def __init__(self, nodes: list[Node], place: Tensor) -> None:
        self.nodes, self.place = nodes, place  # place [n]: which node a client lives on
        self.position = torch.empty_like(place)
        for k, node in enumerate(nodes):
            self.position[place == k] = torch.arange(len(node.shard.ids))

    @classmethod
    def split(cls, fed: Federation, count: int) -> Federation:
        """The same federation with its clients spread over `count` nodes."""
        whole: Shard = fed.runtime
        place = torch.arange(fed.n) % count
        nodes = []
        for k in range(count):
            ids = (place == k).nonzero().squeeze(-1)
            splits = {name: rows.subset(ids) for name, rows in whole.splits.items()}
            clusters = None if whole.clusters is None else whole.clusters[ids]
            nodes.append(Node(Shard(splits, whole.model, whole.seed, whole.dtype, clusters, ids, whole.loop)))
        spread = fed.fresh()
        spread.runtime = cls(nodes, place)
        return spread

    def fresh(self, seed: int | None = None) -> Nodes:
        return Nodes([Node(node.shard.fresh(seed)) for node in self.nodes], self.place)

    def run(
        self, call: Call, visits: Visits, welcome: dict[str, Any] | None = None, lasting: bool = True
    ) -> Answer:
        return self._ask(call, visits, welcome, lasting, "")

    def evaluate(
        self, call: Call, visits: Visits, split: str, welcome: dict[str, Any] | None = None
    ) -> Answer:
        return self._ask(call, visits, welcome, False, split)

    def score(self, weights: Tensor, split: str) -> dict[str, Tensor]:
        parts = [node.shard.score(weights[node.shard.ids], split) for node in self.nodes]
        order = torch.cat([node.shard.ids for node in self.nodes]).argsort()
        return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}

    def stack_size(self, batch: int) -> int:
        return self.nodes[0].shard.stack_size(batch)

    def threads(self, batch: int, participation: float = 1.0) -> int:
        return max(node.shard.threads(batch, participation) for node in self.nodes)

    def data_tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for node in self.nodes for tensor in node.shard.data_tensors())

    def snapshot(self) -> dict[str, Tensor]:
        return {
            f"{k}/{name}": value
            for k, node in enumerate(self.nodes)
            for name, value in node.shard.snapshot().items()
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        for k, node in enumerate(self.nodes):
            node.shard.restore(_under(f"{k}/", tensors))

    def _ask(
        self, call: Call, visits: Visits, welcome: dict[str, Any] | None, lasting: bool, split: str
    ) -> Answer:
        asked = torch.arange(len(self.place)) if visits.at is None else visits.at
        answers: list[tuple[Tensor, dict[str, Tensor]]] = []
        header: dict[str, Any] = {}
        for k, node in enumerate(self.nodes):
            mine = (self.place[asked] == k).nonzero().squeeze(-1)
            if len(mine) == 0:
                continue
            message = self._message(call, visits, mine, asked, welcome, lasting, split)
            header, reply = wire.decode(node.handle(call.algorithm, message))
            answers.append((mine, reply))
        order = torch.cat([mine for mine, _ in answers]).argsort()
        parts = [_under("value.", reply) for _, reply in answers]
        named = {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
        parcels = self._unpack(call, visits, asked, named, header["parcels"])
        if all("good" not in reply for _, reply in answers):
            return Answer(named, None, parcels)
        goods = [reply.get("good", torch.ones(len(mine), dtype=torch.bool)) for mine, reply in answers]
        return Answer(named, torch.cat(goods)[order], parcels)

    def _unpack(
        self,
        call: Call,
        visits: Visits,
        asked: Tensor,
        named: dict[str, Tensor],
        sent: dict[str, tuple[int, int, str]],
    ) -> dict[str, Parcel]:
        """Decode, in `named`, what came compressed."""
        parcels: dict[str, Parcel] = {}
        for name, (ordinal, length, dtype_name) in sent.items():
            one, packed, dtype = call.compress, named[name], wire.DTYPES[dtype_name]
            assert one is not None
            keys = visit_keys(self.nodes[0].shard.seed, call, asked, visits.nth)
            named[name] = one.decode(packed, parcel_keys(keys, ordinal), length, dtype)
            parcels[name] = Parcel(ordinal, length, dtype, one.floats(length), packed.shape[-1])
        return parcels

    def _message(
        self,
        call: Call,
        visits: Visits,
        mine: Tensor,
        asked: Tensor,
        welcome: dict[str, Any] | None,
        lasting: bool,
        split: str,
    ) -> bytes:
        tensors = {"at": self.position[asked[mine]]}
        if visits.nth is not None:
            tensors["nth"] = visits.nth[mine]
        tensors |= {f"each.{name}": value[mine] for name, value in call.each.items()}
        tensors |= {
            f"shared.{name}": value for name, value in call.shared.items() if isinstance(value, Tensor)
        }
        start = welcome or {}
        tensors |= {f"welcome.{name}": value for name, value in start.items() if isinstance(value, Tensor)}
        header = {
            "algorithm": call.algorithm.name,
            "phase": call.phase,
            "round": call.round,
            "call": call.call,
            "numbers": {name: value for name, value in call.shared.items() if not isinstance(value, Tensor)},
            "begins": welcome is not None,
            "welcome_numbers": {
                name: value for name, value in start.items() if not isinstance(value, Tensor)
            },
            "lasting": lasting,
            "split": split,
            "compress": str(call.compress) if call.compress is not None else "",
        }
        return wire.encode(header, tensors)


SERVER_SIDE = {
    "start",
    "round",
    "handout",
    "common",
    "observe",
    "traffic",
    "replace",
    "settings",
    "from_theory",
    "mixture",
}


def phases(algorithm: Any) -> set[str]:
    """The allow-list: public methods that are not the server's."""
    return {
        name
        for name in dir(type(algorithm))
        if not name.startswith("_") and name not in SERVER_SIDE and callable(getattr(type(algorithm), name))
    }


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

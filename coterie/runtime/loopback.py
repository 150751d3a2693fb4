"""A federation of nodes in one process, speaking bytes: what a distributed engine carries, without one.

Each node holds a shard of the clients and sees nothing but messages. `Nodes` is the server's end and
offers what `Shard` offers; a real transport replaces `Node.handle` by a network.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.federation.federation import Federation
from coterie.models.shared import picked
from coterie.runtime import messages, wire
from coterie.runtime.shard import Shard
from coterie.runtime.visits import Answer, Call, Visits


class Node:
    """One machine with its own clients. It runs only the phases of the algorithm it was set up with."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def handle(self, algorithm: Any, message: bytes) -> bytes:
        """Answer one message."""
        header, tensors = wire.decode(message)
        return wire.encode(*messages.run(self.shard, algorithm, header, tensors))


class Nodes:
    """The server's end: groups visits by node, one message each, and puts the answers back in order."""

    private = False

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

    def deploy(self, call: Call, visits: Visits, welcome: dict[str, Any] | None = None) -> Answer:
        return self._ask(call, visits, welcome, False, "")

    def joined(self) -> list[tuple[Tensor, dict[str, Tensor]]]:
        return []

    def evaluate(
        self, call: Call, visits: Visits, split: str, welcome: dict[str, Any] | None = None
    ) -> Answer:
        return self._ask(call, visits, welcome, False, split)

    def score(self, weights: Tensor, split: str) -> dict[str, Tensor]:
        parts = [node.shard.score(picked(weights, node.shard.ids), split) for node in self.nodes]
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
            node.shard.restore(messages.under(f"{k}/", tensors))

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
            at = self.position[asked[mine]]
            message = wire.encode(*messages.ask(call, visits, mine, at, welcome, lasting, split))
            header, reply = wire.decode(node.handle(call.algorithm, message))
            answers.append((mine, reply))
        order = torch.cat([mine for mine, _ in answers]).argsort()
        parts = [messages.under("value.", reply) for _, reply in answers]
        named = {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
        seed = self.nodes[0].shard.seed
        parcels = messages.unpack(seed, call, asked, visits.nth, named, header["parcels"])
        if all("good" not in reply for _, reply in answers):
            return Answer(named, None, parcels)
        goods = [reply.get("good", torch.ones(len(mine), dtype=torch.bool)) for mine, reply in answers]
        return Answer(named, torch.cat(goods)[order], parcels)

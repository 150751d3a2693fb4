"""Nodes in this process that exchange bytes with the server, as a distributed engine would.

Each node has a runtime of its own clients and sees messages only. `LoopbackRuntime` is the server's side; a real
transport replaces `LoopbackNode.handle` by a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coterie._core import broadcast
from coterie.deploy import messages, wire
from coterie.engine.federation import Federation
from coterie.engine.local_runtime import LocalRuntime
from coterie.engine.protocol import Answer, Call, FederatedAlgorithm, Runtime, Sent, Visits
from coterie.models.metrics import Metric


class LoopbackNode:
    """One node with its own clients."""

    def __init__(self, runtime: LocalRuntime) -> None:
        self.runtime = runtime

    def handle(self, algorithm: FederatedAlgorithm, message: bytes) -> bytes:
        """Answer one message with what a phase of the algorithm gives."""
        header, tensors = wire.decode(message)
        return wire.encode(*messages.run(self.runtime, algorithm, header, tensors))


class LoopbackRuntime(Runtime):
    """Group the visits of a call by node, send one message to each, and put the answers back in order.

    Parameters
    ----------
    nodes
        The nodes.
    place
        Number of the node on which each client lives, [n].
    """

    def __init__(self, nodes: list[LoopbackNode], place: Tensor) -> None:
        self.nodes, self.place = nodes, place  # place [n]: which node a client lives on
        self.position = torch.empty_like(place)
        for k, node in enumerate(nodes):
            self.position[place == k] = torch.arange(len(node.runtime.ids))

    @classmethod
    def split(cls, fed: Federation, count: int) -> Federation:
        """Return the same federation with its clients spread over `count` nodes."""
        spread = fed.fresh()
        spread.runtime = cls.of(fed, count)
        return spread

    @classmethod
    def of(cls, fed: Federation, count: int) -> LoopbackRuntime:
        """Return a runtime of `count` nodes with the clients and rows of a local federation."""
        place = torch.arange(fed.n) % count
        nodes = []
        for k in range(count):
            ids = (place == k).nonzero().squeeze(-1)
            splits = {name: fed.runtime.rows(name).subset(ids) for name in fed.rows}
            clusters = None if fed.clusters is None else fed.clusters[ids]
            nodes.append(LoopbackNode(LocalRuntime(splits, fed.model, fed.seed, fed.dtype, clusters, ids)))
        return cls(nodes, place)

    def fresh(self, seed: int | None = None) -> LoopbackRuntime:
        """Return the same nodes with no state kept."""
        return LoopbackRuntime([LoopbackNode(node.runtime.fresh(seed)) for node in self.nodes], self.place)

    def run(self, call: Call, visits: Visits) -> Answer:
        """Run a phase on the nodes of these clients."""
        return self._ask(call, visits, None, True, "")

    def deploy(self, call: Call, visits: Visits, welcome: dict[str, Sent] | None = None) -> Answer:
        """Return the deployed models of these clients."""
        return self._ask(call, visits, welcome, False, "")

    def evaluate(
        self,
        call: Call,
        visits: Visits,
        split: str,
        metrics: Sequence[Metric],
        welcome: dict[str, Sent] | None = None,
    ) -> Answer:
        """Return the metrics' sums of the deployed models on one split."""
        return self._ask(call, visits, welcome, False, split, metrics)

    def score(self, weights: Tensor, split: str, metrics: Sequence[Metric]) -> dict[str, Tensor]:
        """Return the metrics' sums of given models on one split."""
        parts = [
            node.runtime.score(broadcast.index(weights, node.runtime.ids), split, metrics)
            for node in self.nodes
        ]
        order = torch.cat([node.runtime.ids for node in self.nodes]).argsort()
        return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}

    def stack_size(self, batch: int) -> int:
        """Return how many clients the first node computes in one tensor operation."""
        return self.nodes[0].runtime.stack_size(batch)

    def threads(self, batch: int, participation: float = 1.0) -> int:
        """Return how many threads torch should use for the busiest node."""
        threads = max(node.runtime.threads(batch, participation) for node in self.nodes)
        self.workers = max(node.runtime.workers for node in self.nodes)
        return threads

    def data_tensors(self) -> tuple[Tensor, ...]:
        """Return the data of all nodes."""
        return tuple(tensor for node in self.nodes for tensor in node.runtime.data_tensors())

    def snapshot(self) -> dict[str, Tensor]:
        """Return the state of all nodes, by node."""
        return {
            f"{k}/{name}": value
            for k, node in enumerate(self.nodes)
            for name, value in node.runtime.snapshot().items()
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Replace the state of all nodes by a snapshot."""
        for k, node in enumerate(self.nodes):
            node.runtime.restore(messages.under(f"{k}/", tensors))

    def close(self) -> None:
        """Close the runtimes of all nodes."""
        for node in self.nodes:
            node.runtime.close()

    def _ask(
        self,
        call: Call,
        visits: Visits,
        welcome: dict[str, Sent] | None,
        lasting: bool,
        split: str,
        metrics: Sequence[Metric] = (),
    ) -> Answer:
        asked = torch.arange(len(self.place)) if visits.at is None else visits.at
        answers: list[tuple[Tensor, dict[str, Tensor]]] = []
        header: dict[str, Any] = {}
        for k, node in enumerate(self.nodes):
            mine = (self.place[asked] == k).nonzero().squeeze(-1)
            if len(mine) == 0:
                continue
            at = self.position[asked[mine]]
            message = wire.encode(*messages.ask(call, visits, mine, at, welcome, lasting, split, metrics))
            header, reply = wire.decode(node.handle(call.algorithm, message))
            answers.append((mine, reply))
        order = torch.cat([mine for mine, _ in answers]).argsort()
        parts = [messages.under("value.", reply) for _, reply in answers]
        named = {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
        seed = self.nodes[0].runtime.seed
        encoded = messages.unpack(seed, call, asked, visits.nth, named, header["encoded"])
        if all("good" not in reply for _, reply in answers):
            return Answer(named, None, encoded)
        goods = [reply.get("good", torch.ones(len(mine), dtype=torch.bool)) for mine, reply in answers]
        return Answer(named, torch.cat(goods)[order], encoded)

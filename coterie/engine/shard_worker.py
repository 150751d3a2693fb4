"""A worker of a sharded simulation: it holds some of the clients and does what the server's messages ask."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie._core import broadcast
from coterie._core.errors import SettingError
from coterie.data.augment import CropFlip
from coterie.data.rows import Augment, Rows
from coterie.engine import call_messages
from coterie.engine.call_messages import under
from coterie.engine.local_runtime import LocalRuntime
from coterie.engine.protocol import Answer, Call, FederatedAlgorithm, Sent, Visits
from coterie.engine.server_draws import ServerDraws
from coterie.engine.shards import Node, tree_nodes, tree_sum
from coterie.engine.sums import HeldByClients, SumRequest
from coterie.models.base import Model
from coterie.models.description import CUSTOM, description, from_description
from coterie.models.fast.lazy_models import LazyModels, materialize
from coterie.models.measuring import untimed
from coterie.models.metrics import resolve
from coterie.models.network import Network
from coterie.models.own_code import from_reference, reference

SUMMED_AT_ONCE = 1024  # clients whose values are added up in their own type; these sums are added in float64

Message = tuple[dict[str, Any], dict[str, Tensor]]
MakeAlgorithm = Callable[..., FederatedAlgorithm]


@dataclass
class Shard:
    """The blocks of clients that one worker has of a federation.

    Attributes
    ----------
    first, count : int
        Number of the first block, and of all blocks of all workers.
    blocks : list of LocalRuntime
        The clients of each block.
    clients : int
        Number of clients of the federation.
    """

    first: int
    count: int
    blocks: list[LocalRuntime]
    clients: int

    def cohort(self, draws: ServerDraws, t: int, count: int) -> list[Tensor]:
        """Return who of each block is in the cohort of round t, which everybody can draw."""
        where = draws.cohort(t, self.clients, count)
        found = []
        for block in self.blocks:
            at = torch.searchsorted(block.ids.cpu(), where).clamp(max=len(block.ids) - 1)
            found.append(at[block.ids.cpu()[at] == where].to(block.device))
        return found


class ShardWorker:
    """Some clients of a federation, and the messages that they answer.

    Parameters
    ----------
    make_algorithm
        Makes an algorithm from its name and settings.
    model, augment
        What to use where the server's model is a module of the user's own, or its augmentation a function of the
        user's own: neither can be sent.
    card
        Which GPU to use, where the server computes on GPUs; counted round if there are fewer.
    """

    def __init__(
        self,
        make_algorithm: MakeAlgorithm,
        model: Model | None = None,
        augment: Augment | None = None,
        card: int = 0,
    ) -> None:
        self.make_algorithm, self.model, self.augment, self.card = make_algorithm, model, augment, card
        self.device = "cpu"
        self.shards: dict[int, Shard] = {}
        self.algorithms: dict[str, FederatedAlgorithm] = {}
        self._held: dict[int, tuple[Shard, list[tuple[int, HeldByClients]]]] = {}
        self.torch_threads, self.hands = torch.get_num_threads(), 1

    def answer(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Do what a message asks for and return the answer."""
        for hold in header.get("forget", ()):
            self._held.pop(hold, None)
        for shard in header.get("drop", ()):
            self.shards.pop(shard, None)
        return KINDS[header["kind"]](self, header, tensors)

    def open(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Take clients."""
        if header["device"] != "cpu":
            self.device = f"{header['device']}:{self.card % torch.cuda.device_count()}"
        described, model = header["model"], self.model
        if described["model"] != CUSTOM and (model is None or description(model) != described):
            model = from_description(described)
        elif model is None and header["own"] is not None:
            model = from_reference(header["own"])
        if model is None:
            raise SettingError(
                "this model cannot be sent to a worker. Make it by a function that has a name in a module or program, "
                "network(function), or start every process with your program: torchrun, and workers='torchrun'"
            )
        if header["exact"] and isinstance(model, Network):
            model = replace(model, decisions={})
        model.measured().update(header["decisions"])
        augment = self._augment(header["augment"])
        blocks = []
        for k in range(header["first"], header["end"]):
            own = under(f"{k}.", tensors)
            splits = {}
            for split in header["splits"]:
                rows = under(f"{split}.", own)
                size = rows["size"]
                chosen = Rows(rows["x"], rows["y"], size.cumsum(0) - size, size).to(self.device)
                splits[split] = replace(chosen, augment=augment if split == "train" else None)
            blocks.append(
                LocalRuntime(
                    splits,
                    model,
                    header["seed"],
                    getattr(torch, header["dtype"]),
                    None if "clusters" not in own else own["clusters"].to(self.device),
                    own["ids"].to(self.device),
                    header["loop"],
                )
            )
        self.shards[header["shard"]] = Shard(header["first"], header["count"], blocks, header["clients"])
        return {}, {}

    def _augment(self, described: dict[str, Any] | None) -> Augment | None:
        if described is None:
            return None
        if described == {} and self.augment is None:
            raise SettingError(
                "this augmentation is a function of your own, which cannot be sent to a worker. Start every process "
                "with your program: torchrun, and fit(..., workers='torchrun')"
            )
        return self.augment if described == {} else CropFlip(**described)

    def fresh(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Take the same clients once more, with nothing kept."""
        old = self.shards[header["of"]]
        blocks = [block.fresh(header["seed"]) for block in old.blocks]
        self.shards[header["shard"]] = replace(old, blocks=blocks)
        return {}, {}

    def call(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Run a phase; its answers stay here, or are returned if it is `deploy`."""
        shard, began = self.shards[header["shard"]], time.process_time()
        algorithm = self._algorithm(header["algorithm"], header["settings"])
        tensors = {name: value.to(self.device) for name, value in tensors.items()}
        call, visits, welcome = call_messages.read(algorithm, header, tensors)
        parts, held = [], []
        for block, runtime, own, own_visits in self._visits(shard, header, call, visits):
            with untimed() if header["exact"] else nullcontext():
                answer = self._run(runtime, own, own_visits, header, welcome)
            parts.append((answer, own_visits))
            ids = runtime.ids if own_visits.at is None else runtime.ids[own_visits.at]
            size = runtime.train.size if own_visits.at is None else runtime.train.size[own_visits.at]
            held.append((block, HeldByClients(answer.named, ids, size.unsqueeze(-1), own, answer.good)))
        reply: dict[str, Any] = {
            "values": {
                name: [str(value.dtype).removeprefix("torch."), list(value.shape[1:])]
                for name, value in held[0][1].named.items()
            },
            "encoded": {
                name: [
                    item.ordinal,
                    item.length,
                    str(item.dtype).removeprefix("torch."),
                    item.floats,
                    item.size,
                ]
                for name, item in parts[-1][0].encoded.items()
            },
        }
        told: dict[str, Tensor] = {}
        if any(answer.good is not None for answer, _ in parts):
            told["good"] = torch.cat(
                [
                    torch.ones(len(clients.ids), dtype=torch.bool)
                    if clients.good is None
                    else clients.good.cpu()
                    for _, clients in held
                ]
            )
        if header["what"] == "run":
            self._held[header["hold"]] = shard, held
        else:
            told |= {f"value.{name}": joined([c.named[name] for _, c in held]) for name in reply["values"]}
        reply["seconds"] = time.process_time() - began
        return reply, told

    def _visits(
        self, shard: Shard, header: dict[str, Any], call: Call, visits: Visits
    ) -> Iterator[tuple[int, LocalRuntime, Call, Visits]]:
        """Yield the blocks that are visited, each with its part of the call."""
        cohort, counts = None, header["counts"]
        if header["cohort"] is not None:
            cohort = shard.cohort(ServerDraws(shard.blocks[0].seed), *header["cohort"])
            counts = [len(at) for at in cohort]
        first = 0
        for k, runtime in enumerate(shard.blocks):
            end = first + (len(runtime.ids) if counts is None else counts[k])
            if end == first:
                continue
            mine = slice(first, end)
            own = replace(call, each={name: value[mine] for name, value in call.each.items()})
            at = cohort[k] if cohort is not None else None if visits.at is None else visits.at[mine]
            nth = visits.nth
            yield shard.first + k, runtime, own, Visits(at, None if nth is None else nth[mine])
            first = end

    def _run(
        self,
        runtime: LocalRuntime,
        call: Call,
        visits: Visits,
        header: dict[str, Any],
        welcome: dict[str, Sent] | None,
    ) -> Answer:
        if header["what"] == "run":
            return runtime.run(call, visits, welcome)
        if header["what"] == "deploy":
            return runtime.deploy(call, visits, welcome)
        metrics = [resolve(name, runtime.model.task) for name in header["metrics"]]
        return runtime.evaluate(call, visits, header["split"], metrics, welcome)

    def _algorithm(self, name: str, settings: dict[str, Any]) -> FederatedAlgorithm:
        key = algorithm_key(name, settings)
        if key not in self.algorithms:
            self.algorithms[key] = self.make_algorithm(name, **settings)
        return self.algorithms[key]

    def sum(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Add answers up: one sum for each node of the summation tree that lies within this worker's blocks."""
        shard, held = self._held[header["hold"]]
        groups: Tensor | str | None = tensors.get("groups", header["groups"])
        request = SumRequest(header["name"], header["uniform"], groups, header["groups_count"])
        leaves: dict[Node, Tensor] = {}
        first = 0
        shape: tuple[int, ...] = ()
        for block, clients in held:
            own, shape = request, clients.shape(request)
            if isinstance(groups, Tensor):  # clusters of the visited clients, in their order
                labels = groups[first : first + len(clients.ids), None].to(clients.ids.device)
                clients = replace(clients, named={**clients.named, _LABELS: labels})
                own = replace(request, groups=_LABELS)
            first += len(clients.ids)
            leaves[block, block + 1] = summed(clients, own)
        nodes = tree_nodes(shard.count, shard.first, shard.first + len(shard.blocks))
        sums = {node: tree_sum(leaves, node) for node in nodes}
        found = {node: value for node, value in sums.items() if value is not None}
        return {"nodes": list(found), "shape": list(shape)}, {"sums": torch.stack(list(found.values()))}

    def gather(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Return the answers themselves."""
        _, held = self._held[header["hold"]]
        return {}, {"values": joined([clients.named[header["name"]] for _, clients in held])}

    def score(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Score given models."""
        shard, parts, first = self.shards[header["shard"]], [], 0
        for runtime in shard.blocks:
            metrics = [resolve(name, runtime.model.task) for name in header["metrics"]]
            weights = broadcast.to(tensors["weights"][first : first + len(runtime.ids)], self.device)
            first += len(runtime.ids)
            parts.append(runtime.score(weights, header["split"], metrics))
        return {}, {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}

    def snapshot(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Return what clients keep, by block."""
        shard = self.shards[header["shard"]]
        return {}, {
            f"{shard.first + k}.{name}": value
            for k, runtime in enumerate(shard.blocks)
            for name, value in runtime.snapshot().items()
        }

    def restore(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Replace what clients keep."""
        shard = self.shards[header["shard"]]
        for k, runtime in enumerate(shard.blocks):
            runtime.model.measured().update(header["decisions"])
            own = under(f"{shard.first + k}.", tensors)
            runtime.restore({name: value.to(self.device) for name, value in own.items()})
        return {}, {}

    def memory(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Limit the memory of what clients keep."""
        shard = self.shards[header["shard"]]
        for runtime in shard.blocks:
            runtime.limit_memory(header["bytes"] // len(shard.blocks))
        return {}, {}

    def threads(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Find how many threads the work is worth; who serves this worker uses them."""
        shard, most = self.shards[header["shard"]], torch.get_num_threads()
        used = [runtime.threads(header["batch"], header["participation"]) for runtime in shard.blocks]
        self.torch_threads = max(used, default=1)
        self.hands = max(1, most // self.torch_threads)
        workers = max((runtime.workers for runtime in shard.blocks), default=1)
        return {"threads": self.torch_threads, "workers": workers}, {}

    def decide(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Compute as the server does from now on, where ways to compute are chosen by timing."""
        for runtime in self.shards[header["shard"]].blocks:
            runtime.model.measured().update(header["decisions"])
        return {}, {}

    def paths(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
        """Say how often each way to compute was taken."""
        return {"paths": [dict(block.paths_used()) for block in self.shards[header["shard"]].blocks]}, {}


_LABELS = "\0labels"
KINDS: dict[str, Callable[[ShardWorker, dict[str, Any], dict[str, Tensor]], Message]] = {
    "open": ShardWorker.open,
    "fresh": ShardWorker.fresh,
    "call": ShardWorker.call,
    "sum": ShardWorker.sum,
    "gather": ShardWorker.gather,
    "score": ShardWorker.score,
    "snapshot": ShardWorker.snapshot,
    "restore": ShardWorker.restore,
    "memory": ShardWorker.memory,
    "threads": ShardWorker.threads,
    "paths": ShardWorker.paths,
    "decide": ShardWorker.decide,
}


def opening(runtime: LocalRuntime, ids: list[Tensor], first: int, end: int, exact: bool) -> Message:
    """Return the message that gives a worker the blocks first..end - 1 of a federation's clients."""
    augment = runtime.train.augment
    header = {
        "kind": "open",
        "first": first,
        "end": end,
        "count": len(ids),
        "clients": len(runtime.ids),
        "model": description(runtime.model),
        "own": reference(runtime.model),
        "decisions": {} if exact else dict(runtime.model.measured()),
        "exact": exact,
        "device": runtime.device.type,
        "seed": runtime.seed,
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "loop": runtime.loop,
        "splits": list(runtime.splits),
        "augment": None if augment is None else asdict(augment) if isinstance(augment, CropFlip) else {},
    }
    tensors: dict[str, Tensor] = {}
    for k in range(first, end):
        own = ids[k]
        tensors[f"{k}.ids"] = own
        if runtime.clusters is not None:
            tensors[f"{k}.clusters"] = runtime.clusters[own]
        for split, rows in runtime.splits.items():
            mine = rows.subset(own)
            tensors |= {f"{k}.{split}.{part}": getattr(mine, part) for part in ("x", "y", "size")}
    return header, tensors


def algorithm_key(name: str, settings: dict[str, Any]) -> str:
    """Return what tells algorithms apart."""
    return json.dumps([name, settings], sort_keys=True)


def summed(clients: HeldByClients, request: SumRequest) -> Tensor:
    """Return sums of weights and of weighted answers, float64 [K, 1 + length]."""
    share = clients.members(request) * clients.weights(request).t()
    weights = share.sum(-1, keepdim=True)
    if request.name is None:
        return weights
    values: Any = clients.named[request.name]
    if isinstance(values, LazyModels) and clients.good is None and len(share) == 1:
        return torch.cat([weights, (share.to(values.dtype) @ values).double()], -1)
    values = materialize(values).reshape(len(clients.ids), -1)
    if not values.is_floating_point():
        values = values.double()
    if clients.good is not None:
        share, values = share[:, clients.good], values[clients.good]
    if broadcast.is_broadcast(values):
        return torch.cat([weights, weights * values[0].double()], -1)
    share = share.to(values.dtype)
    total = torch.zeros(len(share), values.shape[1], dtype=torch.float64, device=values.device)
    for first in range(0, len(values), SUMMED_AT_ONCE):
        some = slice(first, first + SUMMED_AT_ONCE)
        total += share[:, some] @ values[some]
    return torch.cat([weights, total], -1)


def joined(parts: list[Any]) -> Tensor:
    """Return stacks one after the other; those that repeat the same row become one row, broadcast."""
    parts = [materialize(part) for part in parts]
    if len(parts) == 1:
        return broadcast.compact(parts[0])
    alike = all(broadcast.is_broadcast(part) or len(part) == 1 for part in parts)
    row: Tensor = parts[0][0]
    if alike and all(torch.equal(part[0], row) for part in parts):
        return row.expand(sum(map(len, parts)), *row.shape)
    return torch.cat(parts)

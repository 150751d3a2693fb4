"""Clients shared over several processes, each of which runs phases on its own clients and adds answers up.

The server sends a model to every worker and receives a sum from every worker: the traffic of a mean does not depend on
the number of clients. Single answers stay with the workers and are fetched when a method looks at them.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coterie._core import broadcast
from coterie.data.rows import Rows
from coterie.engine import call_messages
from coterie.engine.call_messages import under
from coterie.engine.encoding import Encoded
from coterie.engine.local_runtime import LocalRuntime
from coterie.engine.protocol import Answer, Call, Capabilities, Runtime, Sent, Visits
from coterie.engine.shard_worker import Message, algorithm_key, joined, opening
from coterie.engine.shards import Node, Shards, tree_sum
from coterie.engine.state import State
from coterie.engine.sums import SumRequest, Total
from coterie.engine.worker_links import Crew
from coterie.models.metrics import Metric


class ShardedRuntime(Runtime):
    """The clients of a local runtime, shared over the workers of a crew.

    Parameters
    ----------
    crew
        The workers.
    home
        All clients and rows. Phases are not run here.
    shards
        Who is where.
    number
        Number under which the workers have these clients.
    """

    capabilities = Capabilities(rows_visible=True, state_visible=True, memory_limit=True)

    def __init__(self, crew: Crew, home: LocalRuntime, shards: Shards, number: int) -> None:
        self.crew, self.home, self.shards, self.number = crew, home, shards, number
        self.processes = "any number" if crew.exact else len(crew)
        ids = torch.arange(len(shards.place))
        self._everybody = SplitVisits(
            ids, torch.cat(shards.ids), torch.tensor([len(own) for own in shards.ids])
        )
        weakref.finalize(self, crew.forgotten_shards.append, number)

    @classmethod
    def open(cls, crew: Crew, home: LocalRuntime) -> ShardedRuntime:
        """Share the clients of a runtime, with no state kept, over the workers of a crew."""
        shards = Shards.of(home.train.size.cpu(), len(crew), crew.exact)
        number, crew.own.model = crew.number("shards"), home.model
        crew.own.augment, crew.own.card = home.train.augment, home.device.index or 0
        for k in range(len(crew)):  # one after the other: a copy of a worker's rows at a time
            header, tensors = opening(home, shards.ids, *shards.cuts(k), crew.exact)
            messages: list[Message | None] = [None] * len(crew)
            messages[k] = {**header, "shard": number}, tensors
            crew.ask(messages)
        return cls(crew, home, shards, number)

    def fresh(self, seed: int | None = None) -> ShardedRuntime:
        """Return the same clients and rows with no state kept."""
        number = self.crew.number("shards")
        self._tell("fresh", of=self.number, shard=number, seed=seed)
        return ShardedRuntime(self.crew, self.home.fresh(seed), self.shards, number)

    def with_rows(self, splits: dict[str, Rows], clusters: Tensor | None) -> ShardedRuntime:
        """Return the same clients with other rows and no state kept."""
        return ShardedRuntime.open(self.crew, self.home.with_rows(splits, clusters))

    def brought_home(self) -> LocalRuntime:
        """Return all clients, with what they keep, in this process."""
        home = self.home.fresh()
        home.restore({name: value.to(home.device) for name, value in self.snapshot().items()})
        home.used += self.paths_used()
        return home

    def run(self, call: Call, visits: Visits) -> Answer:
        """Run a phase; the answers stay with the workers."""
        hold = self.crew.number("answers")
        split, answers = self._visit(call, visits, what="run", hold=hold, lasting=True)
        header = next(answer[0] for answer in answers if answer is not None)
        encoded = {
            name: Encoded(ordinal, length, getattr(torch, dtype), floats, size)
            for name, (ordinal, length, dtype, floats, size) in header["encoded"].items()
        }
        shapes = {
            name: torch.empty((len(split.ids), *shape), dtype=getattr(torch, dtype), device="meta")
            for name, (dtype, shape) in header["values"].items()
        }
        away = HeldAway(self, hold, split, self._good(split, answers))
        weakref.finalize(away, self.crew.forgotten_answers.append, hold)
        return Answer(shapes, away.good, encoded, away=away)

    def deploy(self, call: Call, visits: Visits, welcome: dict[str, Sent] | None = None) -> Answer:
        """Return the deployed models."""
        return self._values(*self._visit(call, visits, welcome, what="deploy"))

    def evaluate(
        self,
        call: Call,
        visits: Visits,
        split: str,
        metrics: Sequence[Metric],
        welcome: dict[str, Sent] | None = None,
    ) -> Answer:
        """Return the metrics' sums of the deployed models on one split."""
        found = self._visit(call, visits, welcome, what="evaluate", split=split, metrics=metrics)
        return self._values(*found)

    def score(self, weights: Tensor, split: str, metrics: Sequence[Metric]) -> dict[str, Tensor]:
        """Return the metrics' sums of given models on one split."""
        header = {"kind": "score", "shard": self.number, "split": split, "metrics": [m.name for m in metrics]}
        messages: list[Message | None] = []
        for own in self._parts(self._everybody):
            models = broadcast.index(weights, own.to(weights.device))
            messages.append((header, {"weights": models}) if len(own) else None)
        parts = [answer[1] for answer in self.crew.ask(messages) if answer is not None]
        return {name: self._put(self._everybody, [part[name] for part in parts]) for name in parts[0]}

    def begin_round(self, t: int, state: State | None) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Note the round, which errors name; after the first, all compute in the ways that this process chose."""
        self.crew.round = t
        if t == 2 and self.home.model.measured() and not self.crew.exact:
            self._tell("decide", decisions=dict(self.home.model.measured()))
        return []

    def paths_used(self) -> Counter[str]:
        """Return how often each way to compute was taken, by all workers together."""
        used: Counter[str] = Counter()
        for header, _ in self._tell("paths"):
            for counts in header["paths"]:
                used.update(counts)
        return used

    def snapshot(self) -> dict[str, Tensor]:
        """Return what clients keep, as one local runtime would: any number of workers can take it up."""
        tensors = {name: value for _, told in self._tell("snapshot") for name, value in told.items()}
        found: dict[str, Tensor] = {}
        for name in sorted({key.partition(".")[2] for key in tensors if key.endswith(".slot")}):
            column = name.removesuffix(".slot")
            slot, rows, used = torch.full((len(self.shards.place),), -1), [], 0
            for block, ids in enumerate(self.shards.ids):
                if f"{block}.{name}" not in tensors:
                    continue
                own, values = tensors[f"{block}.{name}"].cpu(), tensors[f"{block}.{column}.rows"].cpu()
                slot[ids] = torch.where(own < 0, own, own + used)
                rows.append(values)
                used += len(values)
            found[name], found[f"{column}.rows"] = slot, _padded(rows)
        return found

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Replace what clients keep by the snapshot of any runtime with the same clients."""
        messages: list[Message | None] = []
        for k in range(len(self.crew)):
            own: dict[str, Tensor] = {}
            for block in range(*self.shards.cuts(k)):
                for name in [key for key in tensors if key.endswith(".slot")]:
                    slot = tensors[name].cpu()[self.shards.ids[block]]
                    has = slot >= 0
                    if not has.any():
                        continue
                    rows = tensors[name.removesuffix(".slot") + ".rows"]
                    own[f"{block}.{name.removesuffix('.slot')}.rows"] = rows[slot[has].to(rows.device)]
                    own[f"{block}.{name}"] = torch.where(has, has.cumsum(0) - 1, -1)
            decisions = {} if self.crew.exact else dict(self.home.model.measured())
            messages.append(({"kind": "restore", "shard": self.number, "decisions": decisions}, own))
        self.crew.ask(messages)

    def kept(self, name: str) -> Tensor:
        """Return what all clients keep under a name, [n, ...]."""
        tensors = self.snapshot()
        if f"{name}.slot" not in tensors or int(tensors[f"{name}.slot"].min()) < 0:
            raise KeyError
        return tensors[f"{name}.rows"][tensors[f"{name}.slot"]].to(self.home.device)

    def keep(self, name: str, values: Tensor) -> None:
        """Let all clients keep these values, [n, ...]."""
        others = {key: value for key, value in self.snapshot().items() if key.rpartition(".")[0] != name}
        self.restore({**others, f"{name}.slot": torch.arange(len(values)), f"{name}.rows": values})

    def limit_memory(self, size: int) -> None:
        """Keep at most this many bytes of state in memory, of all workers together."""
        self._tell("memory", bytes=size // len(self.crew))

    def stack_size(self, batch: int) -> int:
        """Return how many clients are computed in one tensor operation."""
        return self.home.stack_size(batch)

    def threads(self, batch: int, participation: float = 1.0) -> int:
        """Let every worker use as many threads as its work is worth; return the number of this process."""
        most = torch.get_num_threads()
        told = self._tell("threads", batch=batch, participation=participation, most=most)
        self.workers = max(header["workers"] for header, _ in told)
        return int(told[0][0]["threads"])

    def data_tensors(self) -> tuple[Tensor, ...]:
        """Return what identifies the data of a run, as one local runtime would."""
        return self.home.data_tensors()

    def rows(self, split: str) -> Rows:
        """Return the rows of all clients in one split."""
        return self.home.rows(split)

    def fetch(self, away: HeldAway, name: str) -> Tensor:
        """Return answers [k, ...] that the workers hold, in the order of the visits."""
        header = {"kind": "gather", "hold": away.hold, "name": name}
        answers = self.crew.ask([(header, {}) if len(part) else None for part in self._parts(away.split)])
        return self._put(away.split, [answer[1]["values"] for answer in answers if answer is not None])

    def total(self, away: HeldAway, request: SumRequest) -> tuple[Tensor, tuple[int, ...]]:
        """Return sums of weights and weighted answers, [K, 1 + length], and the shape of one answer."""
        by = request.groups
        header = {
            "kind": "sum",
            "hold": away.hold,
            "name": request.name,
            "uniform": request.uniform,
            "groups": by if isinstance(by, str) else None,
            "groups_count": request.count,
        }
        messages: list[Message | None] = []
        for part in self._parts(away.split):
            labels = {"groups": by.cpu()[away.split.ids[part]].int()} if isinstance(by, Tensor) else {}
            messages.append((header, labels) if len(part) else None)
        parts: dict[Node, Tensor] = {}
        shape: tuple[int, ...] = ()
        for answer in self.crew.ask(messages):
            if answer is not None:
                nodes, shape = answer[0]["nodes"], tuple(answer[0]["shape"])
                sums = zip(nodes, answer[1]["sums"], strict=True)
                parts |= {(low, high): value.cpu() for (low, high), value in sums}
        found = tree_sum(parts, (0, len(self.shards.ids)))
        assert found is not None
        return found, shape

    def _tell(self, kind: str, **header: Any) -> list[Message]:
        """Send all workers the same message and return their answers."""
        message: Message = {"kind": kind, "shard": self.number, **header}, {}
        return [answer for answer in self.crew.ask([message] * len(self.crew)) if answer is not None]

    def _split(self, visits: Visits) -> SplitVisits:
        """Return how visits are divided among blocks."""
        if visits.at is None:
            return self._everybody
        ids = visits.at.cpu()
        places = self.shards.place[ids]
        counts = torch.bincount(places, minlength=len(self.shards.ids))
        return SplitVisits(ids, torch.argsort(places, stable=True), counts)

    def _parts(self, split: SplitVisits) -> list[Tensor]:
        """Return the visits of each worker, in its own order."""
        ends = [0, *split.counts.cumsum(0).tolist()]
        cuts = [self.shards.cuts(k) for k in range(len(self.crew))]
        return [split.order[ends[first] : ends[end]] for first, end in cuts]

    def _visit(
        self, call: Call, visits: Visits, welcome: dict[str, Sent] | None = None, *, what: str, **more: Any
    ) -> tuple[SplitVisits, list[Message | None]]:
        """Send every worker its visits; return how they are divided, and the answers."""
        algorithm: Any = call.algorithm
        settings = algorithm.settings()
        self.crew.own.algorithms[algorithm_key(algorithm.name, settings)] = algorithm
        known = visits.at is None or visits.cohort is not None
        split = self._split(visits)
        extra = {
            "kind": "call",
            "shard": self.number,
            "settings": settings,
            "what": what,
            "hold": more.pop("hold", 0),
            "cohort": visits.cohort,
            "exact": self.crew.exact,
        }
        messages: list[Message | None] = []
        for k, part in enumerate(self._parts(split)):
            at = None if known else self.shards.position[split.ids[part]]
            header, tensors = call_messages.ask(call, visits, part.to(self.home.device), at, welcome, **more)
            counts = None if known else split.counts[slice(*self.shards.cuts(k))].tolist()
            messages.append(({**header, **extra, "counts": counts}, tensors) if len(part) else None)
        return split, self.crew.ask(messages)

    def _values(self, split: SplitVisits, answers: list[Message | None]) -> Answer:
        values = [under("value.", answer[1]) for answer in answers if answer is not None]
        named = {name: self._put(split, [value[name] for value in values]) for name in values[0]}
        return Answer(named, self._good(split, answers))

    def _put(self, split: SplitVisits, parts: list[Tensor]) -> Tensor:
        """Return rows of all workers in the order of the visits."""
        found = joined([part.to(self.home.device) for part in parts])
        return found if split.in_order else broadcast.index(found, split.back.to(self.home.device))

    def _good(self, split: SplitVisits, answers: list[Message | None]) -> Tensor | None:
        """Return which visits were answered with finite numbers, in their order; None: all."""
        if all(answer is None or "good" not in answer[1] for answer in answers):
            return None
        parts = zip(self._parts(split), answers, strict=True)
        goods = [
            answer[1].get("good", torch.ones(len(part), dtype=torch.bool))
            for part, answer in parts
            if answer is not None
        ]
        return self._put(split, goods)


def _padded(parts: list[Tensor]) -> Tensor:
    """Concatenate rows, with zeros where those of one block are longer: a stack is as wide as its largest client."""
    shape = torch.tensor([part.shape[1:] for part in parts]).max(0).values.tolist()
    rows = parts[0].new_zeros((sum(map(len, parts)), *shape))
    first = 0
    for part in parts:
        rows[(slice(first, first + len(part)), *map(slice, part.shape[1:]))] = part
        first += len(part)
    return rows


@dataclass(frozen=True)
class SplitVisits:
    """How the visits of a call are divided among blocks of clients.

    Attributes
    ----------
    ids : Tensor
        The client of each visit, [k].
    order : Tensor
        The visits block by block, [k].
    counts : Tensor
        How many visits each block has.
    """

    ids: Tensor
    order: Tensor
    counts: Tensor

    @functools.cached_property
    def back(self) -> Tensor:
        """Where each visit is in `order`, [k]."""
        return torch.argsort(self.order)

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether the blocks have the visits in their own order."""
        return bool((self.order[1:] > self.order[:-1]).all())


@dataclass(frozen=True, eq=False)
class HeldAway:
    """Answers to one call that the workers hold.

    Attributes
    ----------
    runtime : ShardedRuntime
        Whose workers.
    hold : int
        Number under which they hold them.
    split : Split
        Who has what.
    good : Tensor or None
        Which answers are finite, [k]; None: all.
    """

    runtime: ShardedRuntime
    hold: int
    split: SplitVisits
    good: Tensor | None
    _fetched: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        """Return the finite answers [k, ...], fetched once."""
        if name not in self._fetched:
            values = self.runtime.fetch(self, name)
            self._fetched[name] = values if self.good is None else values[self.good]
        return self._fetched[name]

    def fetched(self, answer: Answer) -> Answer:
        """Return the answer with all its values."""
        named = {name: self.runtime.fetch(self, name) for name in answer.named}
        return replace(answer, named=named, away=None)

    def total(self, request: SumRequest) -> Total:
        """Return a sum of the answers, made by the workers."""
        found, shape = self.runtime.total(self, request)
        return Total(found[:, 1:].reshape(request.count, *shape), found[:, :1], self.split.ids)

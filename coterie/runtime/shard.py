"""Clients that live in one place: their rows, their kept state, and the running of phases on them.

The local runtime holds one shard with everybody; a node of a real federation holds a shard with its own
clients. Either runs them stacked (one tensor operation for all) or one by one, which is the oracle.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from coterie.data.rows import Rows
from coterie.errors import CoterieError
from coterie.federation.client import Apart, Client, all_finite, as_reply, sums
from coterie.federation.parcels import Parcel, Sealer
from coterie.models import span
from coterie.models.base import Model
from coterie.models.descent import Descent
from coterie.models.metrics import metrics
from coterie.models.shared import joined
from coterie.models.unwritten import written_out
from coterie.runtime.draws import Draws
from coterie.runtime.early import Early
from coterie.runtime.store import Store
from coterie.runtime.visits import Answer, Call, Visits, visit_keys
from coterie.runtime.workers import workers

STACK_ELEMENTS = 1 << 26  # parameters and minibatch elements of the clients stacked at once
CACHED_ELEMENTS = 1 << 20  # the same for minibatches in closed form: what stays in the processor's cache
GPU_BYTES_PER_ELEMENT = 32  # the same on a GPU: an eighth of its memory, in float32
STATISTICS_ELEMENTS = 1 << 27  # largest X'X of all clients worth holding
THREADED_ELEMENTS = 1 << 20  # below this, waking a second thread costs more than it saves
WORKERS_ELEMENTS = 1 << 20  # the same for workers, which are woken once in a call
COMPILED_ELEMENTS = 1 << 18  # the same where C computes, without Python's lock


class Shard:
    """Rows, kept state and model of some clients."""

    private = False  # whether models stay where the clients are
    leaps = True  # whether rounds may be taken at once

    def __init__(
        self,
        splits: dict[str, Rows],
        model: Model,
        seed: int,
        dtype: torch.dtype,
        clusters: Tensor | None = None,
        ids: Tensor | None = None,
        loop: bool = False,
    ) -> None:
        self.splits, self.model, self.seed, self.dtype, self.loop = splits, model, seed, dtype, loop
        self.train = splits["train"]
        self.clusters = clusters
        self.device = self.train.x.device
        self.ids = torch.arange(len(self.train), device=self.device) if ids is None else ids
        self.initial = model.initial(seed, dtype, self.device)
        self.store = Store(len(self.train))
        self.workers = 1  # stacks computed side by side, or parts of one where a phase allows that
        self._apart: set[tuple[type, str]] = set()  # algorithms and phases that do not
        self.unread: list[Tensor] | None = None  # sums of answers not looked at yet; None: look at once
        self.draws = Draws(seed, self.train, self.ids)
        self._early = Early()
        self._statistics: Any = None
        self._descent: Descent | None = None

    def fresh(self, seed: int | None = None) -> Shard:
        """The same clients with nothing kept; shares rows and statistics."""
        shard = Shard(
            self.splits,
            self.model,
            self.seed if seed is None else seed,
            self.dtype,
            self.clusters,
            self.ids,
            self.loop,
        )
        shard._statistics = self._statistics
        return shard

    def score(self, weights: Tensor, split: str) -> dict[str, Tensor]:
        """Metrics of given models [n, d] on one split."""
        return metrics(self.model, weights, self.splits[split], None)

    def data_tensors(self) -> tuple[Tensor, ...]:
        """What identifies the data of a run, all splits."""
        return tuple(tensor for rows in self.splits.values() for tensor in (rows.x, rows.y, rows.size))

    def snapshot(self) -> dict[str, Tensor]:
        """What the clients keep, for a checkpoint."""
        return self.store.snapshot()

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.store.restore(tensors)

    def statistics(self, at: Tensor | None) -> Any:
        """Sufficient statistics of the clients at these positions, where the model has them and they pay."""
        if self._statistics is None:
            self._statistics = self._make_statistics() if self._statistics_pay() else False
        if self._statistics is False:
            return None
        if at is None:
            return self._statistics
        return tuple(part[at] for part in self._statistics)

    def descent(self, pace: Tensor) -> Descent | None:
        """Steps of this size [n, 1] on all rows of everybody, where they have a closed form that is small enough."""
        statistics = self.statistics(None)
        if statistics is None or not Descent.pays(statistics[0]):
            return None
        if self._descent is None or not torch.equal(self._descent.pace, pace):
            self._descent = Descent(statistics[0], statistics[1], pace)
        return self._descent

    def run(
        self,
        call: Call,
        visits: Visits,
        welcome: dict[str, Any] | None = None,
        lasting: bool = True,
        then: Callable[[Client, Tensor], Any] | None = None,
        packed: bool = False,
    ) -> Answer:
        """Run a phase for these visits and keep what it kept.

        `welcome` are the arguments of `begin` for clients that have not begun; `lasting=False` discards what
        is kept; `then` turns what the phase returned into the answer; `packed` leaves compressed values as
        the bytes they travel in.
        """
        phase = getattr(call.algorithm, call.phase)
        as_tensors = packed or not lasting or call.compress is not None
        parts, goods = [], []
        parcels: dict[str, Parcel] = {}

        def visit(
            client: Client, rows: slice | int
        ) -> tuple[dict[str, Any], Tensor | None, dict[str, Parcel]]:
            if welcome is not None:
                call.algorithm.begin(client, **self._received(welcome, {}, client, rows))
            reply = self._early.reply(call, client)
            if reply is None:
                reply = phase(client, **self._received(call.shared, call.each, client, rows))
            reply = reply if then is None else then(client, reply)
            named: dict[str, Any] = as_reply(reply, call.phase, as_tensors or not client.whole)
            sealed = client.sealer.seal(client, named := dict(named)) if call.compress is not None else {}
            good = self._good(named, client, call.phase)
            named = {name: sealed[name].bytes if packed and name in sealed else named[name] for name in named}
            return named, good, sealed

        for at, client, (named, good, sealed) in self._visited(call, visits, visit):
            parcels = sealed
            if lasting and client.written and visits.nth is not None:
                raise CoterieError(
                    f"phase {call.phase!r} keeps state but visits a client more than once in one call"
                )
            if lasting:
                self._commit(client, at, good)
            parts.append(named)
            goods.append(good)
        answer = self._join(parts, goods)
        return Answer(answer.named, answer.good, parcels)

    def expect(self, call: Call) -> None:
        """Begin with what everybody is to be asked later in this round, where that pays."""
        whole = not self.loop and len(self.ids) <= self.stack_size(call.algorithm.batch)
        if whole and self.workers == 1 and self.device.type == "cpu":
            products = len(self.train.x) * self.model.d
            self._early.begin(call, lambda keys: Client(self, None, keys, call.algorithm.batch), products)

    def _visited(
        self, call: Call, visits: Visits, visit: Callable[[Client, slice | int], Any]
    ) -> Iterator[tuple[Tensor | None, Client, Any]]:
        """What `visit` gives for each stack, in their order, some of them computed side by side."""
        if self._in_parts(call, visits):
            try:
                ((at, client, rows),) = self._stacks(call, visits, self.workers)
                yield at, client, visit(client, rows)
                return
            except Apart:
                self._apart.add((type(call.algorithm), call.phase))
        stacks = self._stacks(call, visits)
        if self.workers == 1 or not self._draws(call.algorithm.batch):
            for at, client, rows in stacks:
                yield at, client, visit(client, rows)
            return
        pool = workers(self.workers)
        waiting: deque[tuple[Tensor | None, Client, Future[Any]]] = deque()
        for at, client, rows in stacks:
            waiting.append((at, client, pool.submit(visit, client, rows)))
            if len(waiting) > 2 * self.workers:
                at, client, answer = waiting.popleft()
                yield at, client, answer.result()
        for at, client, answer in waiting:
            yield at, client, answer.result()

    def deploy(self, call: Call, visits: Visits, welcome: dict[str, Any] | None = None) -> Answer:
        """The models that `deploy` gives, which `score` takes; nothing is kept."""
        return self.run(call, visits, welcome, lasting=False)

    def joined(self) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Clients that have come since the last round and their numbers of rows by split: nobody does here."""
        return []

    def evaluate(
        self, call: Call, visits: Visits, split: str, welcome: dict[str, Any] | None = None
    ) -> Answer:
        """Metrics of the deployed models on one split; nothing is kept."""

        def score(client: Client, weights: Tensor) -> dict[str, Tensor]:
            return metrics(self.model, weights, self.splits[split], client._at)

        return self.run(call, visits, welcome, lasting=False, then=score)

    def _in_parts(self, call: Call, visits: Visits) -> bool:
        """Whether workers may compute parts of one stack: they meet less often than with a stack for each."""
        count = len(self.ids) if visits.at is None else len(visits.at)
        return (
            self.workers > 1
            and self._spans(call.algorithm.batch)
            and 0 < count <= self.stack_size(call.algorithm.batch)
            and (type(call.algorithm), call.phase) not in self._apart
        )

    def _stacks(
        self, call: Call, visits: Visits, threads: int = 1
    ) -> Iterator[tuple[Tensor | None, Client, slice | int]]:
        """The visits as stacks that fit into memory, or one by one; one stack where several threads compute it."""

        @functools.cache
        def keys() -> Tensor:
            return visit_keys(
                self.seed, call, self.ids if visits.at is None else self.ids[visits.at], visits.nth
            )

        def client(at: Tensor | None, rows: slice | int) -> Client:
            sealer = Sealer(call.compress, call.phase)
            return Client(self, at, lambda: keys()[rows], call.algorithm.batch, sealer, threads)

        count = len(self.ids) if visits.at is None else len(visits.at)
        step = 1 if self.loop else self.stack_size(call.algorithm.batch)
        if self._draws(call.algorithm.batch) and self.workers > threads:
            keys()  # so that no two workers make them
            step = min(step, math.ceil(count / self.workers))
        stacks = max(1, math.ceil(count / step))
        step = max(1, math.ceil(count / stacks))  # equal stacks: nobody waits for a longer one
        if count <= step and not self.loop:
            stack = client(visits.at, slice(None))
            stack.whole = True
            if self.device.type == "cpu":
                stack.minibatches = functools.partial(self.draws.of, call, visits)
            yield visits.at, stack, slice(None)
            return
        everyone = torch.arange(count, device=self.device) if visits.at is None else visits.at
        for first in range(0, count, step):
            rows = first if self.loop else slice(first, first + step)
            yield everyone[rows], client(everyone[rows], rows), rows

    def stack_size(self, batch: int) -> int:
        """How many clients are stacked at once."""
        room = STACK_ELEMENTS
        if self._draws(batch):
            room = min(room, CACHED_ELEMENTS << (3 if self._spans(batch) else 0))
        if self.device.type == "cuda":
            room = torch.cuda.get_device_properties(self.device).total_memory // GPU_BYTES_PER_ELEMENT
        return max(1, room // (4 * self.model.d + batch * self._row_elements))

    def threads(self, batch: int, participation: float = 1.0) -> int:
        """How many threads torch is to use in a round: one for small tensors, else as many as it is set to.

        Minibatches of models in closed form have workers instead: a thread for a stack waits for others once in a
        call, threads inside torch in each operation, which is slow on a machine that has other things to do.
        """
        rows = batch or self.train.largest
        stack = len(self.train) * participation
        work = stack * (self.model.d + min(rows, self.train.largest) * self._row_elements)
        self.workers = 1
        if self._draws(batch) and not self.loop:
            compiled = self._spans(batch) and span.compiles(self.model, self.train)
            least = COMPILED_ELEMENTS if compiled else WORKERS_ELEMENTS
            self.workers = 1 if work < least else torch.get_num_threads()
            return 1
        return 1 if work < THREADED_ELEMENTS else torch.get_num_threads()

    def _draws(self, batch: int) -> bool:
        """Whether gradients are those of minibatches, in closed form, on this machine's processor."""
        return self.model.closed_form and 0 < batch < self.train.largest and self.device.type == "cpu"

    def _spans(self, batch: int) -> bool:
        """Whether enough steps on minibatches run in the span of the rows."""
        return self._draws(batch) and not self.loop and span.pays(self.model, self.train, math.inf)

    @functools.cached_property
    def _row_elements(self) -> int:
        return max(1, self.train.x[0].numel()) if len(self.train.x) else 1

    def _received(
        self, shared: dict[str, Any], each: dict[str, Tensor], client: Client, rows: slice | int
    ) -> dict[str, Any]:
        lead = client.lead
        received = {
            name: value.expand(*lead, *value.shape) if isinstance(value, Tensor) else value
            for name, value in shared.items()
        }
        for name, value in each.items():
            received[name] = value[rows]
        return received

    def _good(self, named: dict[str, Any], client: Client, phase: str) -> Tensor | None:
        """Which clients of the stack answered with finite numbers (None: all)."""
        lead = client.lead
        for name, value in (*named.items(), *client.written.items()):
            if value.shape[: len(lead)] != lead:
                raise CoterieError(
                    f"phase {phase!r}: value {name!r} has shape {tuple(value.shape)}, which does not start with the "
                    f"client axis {tuple(lead)}. Write phases for the last axis and keep the axes before it."
                )
        values = [*named.values(), *client.written.values(), *client.sealer.given]
        if self.unread is not None:
            self.unread += sums(values)
            return None
        if all_finite(values):
            return None
        good = torch.ones(lead, dtype=torch.bool, device=self.device)
        for value in values:
            if value.is_floating_point():
                good &= torch.isfinite(written_out(value)).reshape(*lead, -1).all(-1)
        return good

    def _commit(self, client: Client, at: Tensor | None, good: Tensor | None) -> None:
        for name, value in client.written.items():
            if good is None:
                self.store.write(name, at, value)
            elif good.any():
                everyone = torch.arange(len(self.train), device=self.device) if at is None else at
                if good.dim() == 0:
                    self.store.write(name, everyone, value)
                else:
                    self.store.write(name, everyone[good], value[good])

    def _join(self, parts: list[dict[str, Tensor]], goods: list[Tensor | None]) -> Answer:
        if not self.loop and len(parts) == 1:
            return Answer(parts[0], goods[0])
        if not parts:
            return Answer({})
        join = torch.stack if self.loop else joined
        named = {name: join([part[name] for part in parts]) for name in parts[0]}
        if all(good is None for good in goods):
            return Answer(named)
        length = 1 if self.loop else None
        filled = []
        for part, good in zip(parts, goods, strict=True):
            count = length or len(next(iter(part.values()), torch.empty(0)))
            filled.append(
                torch.ones(count, dtype=torch.bool, device=self.device) if good is None else good.reshape(-1)
            )
        return Answer(named, torch.cat(filled))

    def _statistics_pay(self) -> bool:
        if not self.model.has_statistics or (self.loop and len(self.train) > 10_000):
            return False
        d, clients, rows = self.model.d, len(self.train), len(self.train.x)
        return clients * d * d <= STATISTICS_ELEMENTS and clients * d <= 4 * rows

    def _make_statistics(self) -> tuple[Tensor, ...]:
        everyone = Client(self, None, lambda: self.ids, 0)
        d = self.model.d
        parts = [
            torch.zeros(len(self.train), *shape, dtype=self.dtype, device=self.device)
            for shape in ((d, d), (d,), (1,))
        ]
        for place, batch in self.train.full(None):
            weight = everyone._group_weight(batch, place, self.train)
            for whole, part in zip(parts, self.model.statistics(batch.x, batch.y, weight), strict=True):
                whole[slice(None) if place is None else place] = part
        return tuple(parts)

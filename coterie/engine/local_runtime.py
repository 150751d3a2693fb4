"""Clients that live in one place: their rows, their kept state, and the running of phases on them.

The local runtime holds one runtime with everybody; a node of a real federation holds a runtime with its own
clients. Either runs them stacked (one tensor operation for all) or one by one, which is the oracle.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from coterie._core import broadcast, threads
from coterie._core.errors import CoterieError
from coterie._core.threads import workers
from coterie.data.rows import Rows
from coterie.engine.client import Client
from coterie.engine.encoding import Encoded, Encoder
from coterie.engine.minibatches import MinibatchPrefetch
from coterie.engine.phase_output import all_finite, as_reply, witnesses
from coterie.engine.prefetch import Prefetch
from coterie.engine.protocol import Answer, Call, Capabilities, Runtime, Sent, Visits, visit_keys
from coterie.engine.row_privacy import RowPrivacy
from coterie.engine.state import State
from coterie.engine.store import Store
from coterie.models import fast
from coterie.models.base import Model
from coterie.models.fast.lazy_models import materialize
from coterie.models.metrics import Metric, client_sums

STACK_ELEMENTS = 1 << 26  # parameters and minibatch elements of the clients stacked at once
CACHED_ELEMENTS = 1 << 20  # the same for minibatches in closed form: what stays in the processor's cache
GPU_BYTES_PER_ELEMENT = 32  # the same on a GPU: an eighth of its memory, in float32
THREADED_ELEMENTS = 1 << 20  # below this, waking a second thread costs more than it saves
WORKERS_ELEMENTS = 1 << 20  # the same for workers, which are woken once in a call
UNLOCKED_ELEMENTS = 1 << 18  # the same where they compute without Python's lock


class LocalRuntime(Runtime):
    """Rows, kept state and model of some clients."""

    capabilities = Capabilities(
        rows_visible=True, state_visible=True, memory_limit=True, fast_forward=True, deferred_checks=True
    )

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
        self._split: dict[
            int, bool
        ] = {}  # by batch size: whether parts of one stack are computed side by side
        self.used: Counter[str] = Counter()  # how often each fast path was taken
        self._used_before = model.paths_used()  # by other runs of the same model
        self.unread: list[Tensor] | None = None  # sums of answers not looked at yet; None: look at once
        self.draws = MinibatchPrefetch(seed, self.train, self.ids)
        self._prefetch = Prefetch(self._everybody)
        self.private: RowPrivacy | None = None  # noise for gradients, where rows are kept private
        self._statistics: tuple[Tensor, ...] | Literal[False] | None = None  # False: there are none
        self._known: dict[str, Tensor] = {}
        self._descent: tuple[Tensor, Callable[..., Tensor]] | None = None  # step sizes, and steps of them

    def fresh(self, seed: int | None = None) -> LocalRuntime:
        """Return the same clients with nothing kept; rows and statistics are shared."""
        runtime = LocalRuntime(
            self.splits,
            self.model,
            self.seed if seed is None else seed,
            self.dtype,
            self.clusters,
            self.ids,
            self.loop,
        )
        runtime._statistics = self._statistics
        return runtime

    def score(self, weights: Tensor, split: str, metrics: Sequence[Metric]) -> dict[str, Tensor]:
        """Return the sums [n, k] of each metric for models [n, d] on one split, and the numbers of "rows"."""
        return client_sums(self.model, weights, self.splits[split], None, metrics)

    def data_tensors(self) -> tuple[Tensor, ...]:
        """Return what identifies the data of a run, all splits."""
        return tuple(tensor for rows in self.splits.values() for tensor in (rows.x, rows.y, rows.size))

    def snapshot(self) -> dict[str, Tensor]:
        """Return what the clients keep, for a checkpoint."""
        return self.store.snapshot()

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Replace what the clients keep by a snapshot."""
        self.store.restore(tensors)

    def rows(self, split: str) -> Rows:
        """Return the rows of all clients in one split."""
        return self.splits[split]

    def with_rows(self, splits: dict[str, Rows], clusters: Tensor | None) -> LocalRuntime:
        """Return the same clients with other rows and nothing kept."""
        return LocalRuntime(splits, self.model, self.seed, self.dtype, clusters, self.ids, self.loop)

    def kept(self, name: str) -> Tensor:
        """Return what all clients keep under a name, [n, ...]."""
        return self.store.read(name, None)

    def keep(self, name: str, values: Tensor) -> None:
        """Let all clients keep these values, [n, ...]."""
        self.store.write(name, None, values)

    def limit_memory(self, size: int) -> None:
        """Keep at most so many bytes of state in memory and the rest on disk."""
        self.store.memory = size

    def stack(self, batch: int) -> Client | None:
        """Return all clients as one stack that draws nothing, or None if they do not fit."""
        if self.loop or self.stack_size(batch) < len(self.ids) or 0 < batch < self.train.largest:
            return None
        if self.private is not None:
            return None
        return Client(self, None, _no_draws, batch)

    @contextmanager
    def unchecked(self) -> Iterator[list[Tensor]]:
        """Take all answers inside the block as finite; the list is filled with numbers that tell whether they were."""
        unread: list[Tensor] = []
        self.unread = unread
        try:
            yield unread
        finally:
            self.unread = None

    def hold(self) -> Callable[[], None]:
        """Return a function that puts back the state that clients keep now."""
        kept = self.store.held()

        def put_back() -> None:
            self.store.columns = kept

        return put_back

    def statistics(self, at: Tensor | None) -> tuple[Tensor, ...] | None:
        """Return sufficient statistics of the clients at these positions, or None where they do not pay."""
        if self._statistics is None:
            slow = self.loop and len(self.train) > 10_000
            path = None if slow else fast.find("statistics", self.model, self.train)
            self._statistics = False if path is None else path.run(self.model, self.train)
        if self._statistics is False:
            return None
        self.used["row-statistics"] += 1
        if at is None:
            return self._statistics
        return tuple(part[at] for part in self._statistics)

    def once(self, name: str, compute: Callable[[Client], Tensor], at: Tensor | None) -> Tensor:
        """Return what no round changes of the clients at these positions; it is computed once, for everybody."""
        if name not in self._known:
            self._known[name] = compute(Client(self, None, _no_draws, 0))
        return self._known[name] if at is None else self._known[name][at]

    def descent(self, step: Tensor) -> Callable[..., Tensor] | None:
        """Return full-batch steps of this size [n, 1] for everybody, where a fast path takes many at once."""
        statistics = self.statistics(None)
        path = fast.find("descent", statistics, step)
        if path is None:
            return None
        if self._descent is None or not torch.equal(self._descent[0], step):
            self._descent = step, path.run(statistics, step)
        self.used[path.name] += 1
        return self._descent[1]

    def run(
        self,
        call: Call,
        visits: Visits,
        welcome: dict[str, Sent] | None = None,
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
        parts, goods, counts = [], [], []
        encoded: dict[str, Encoded] = {}

        def visit(
            client: Client, rows: slice | int
        ) -> tuple[dict[str, Tensor], Tensor | None, dict[str, Encoded]]:
            if welcome is not None and call.algorithm.begin is not None:
                call.algorithm.begin(client, **self._received(welcome, {}, client, rows))
            reply = self._prefetch.reply(call, client) if welcome is None else None
            if reply is None:
                reply = phase(client, **self._received(call.shared, call.each, client, rows))
            reply = reply if then is None else then(client, reply)
            named: dict[str, Tensor] = dict(as_reply(reply, call.phase))
            if packed or not lasting or call.compress is not None:
                named = {name: materialize(value) for name, value in named.items()}
            sent = client.encoder.encode_reply(client, named) if call.compress is not None else {}
            good = self._good(named, client, call.phase)
            named = {name: sent[name].bytes if packed and name in sent else named[name] for name in named}
            return named, good, sent

        for at, client, (named, good, sent) in self._visited(call, visits, visit):
            encoded = sent
            if lasting and client.written and visits.nth is not None:
                raise CoterieError(
                    f"phase {call.phase!r} keeps state but visits a client more than once in one call"
                )
            if lasting:
                self._commit(client, at, good)
            parts.append(named)
            goods.append(good)
            counts.append(client.lead.numel())
        answer = self._join(parts, goods, counts)
        return Answer(answer.named, answer.good, encoded)

    def _everybody(self, call: Call) -> Client | None:
        """All clients as one stack for a call that is computed ahead; None where they do not fit into one."""
        if len(self.ids) > self.stack_size(call.algorithm.batch):
            return None
        if len(self.train.x) * self.model.d < threads.SHARED_PRODUCTS:
            return None
        keys = functools.partial(visit_keys, self.seed, call, self.ids, None)
        return Client(self, None, keys, call.algorithm.batch, optimizer=call.algorithm.optimizer)

    def _visited(
        self, call: Call, visits: Visits, visit: Callable[[Client, slice | int], Any]
    ) -> Iterator[tuple[Tensor | None, Client, Any]]:
        """Yield what `visit` gives for each stack, in their order, some of them computed side by side."""
        batch = call.algorithm.batch
        count = len(self.ids if visits.at is None else visits.at)
        step = 1 if self.loop else self.stack_size(batch)
        # parts of one stack, where a phase allows them: threads meet less often than with a stack for each
        in_parts = self.workers > 1 and 0 < count <= step and self._splits(batch)
        side_by_side = self.workers > 1 and not in_parts and self._draws(batch)
        if side_by_side:
            step = max(1, min(step, math.ceil(count / self.workers)))
        stacks = self._stacks(call, visits, count, step, self.workers if in_parts else 1)
        if not side_by_side:
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

    def deploy(self, call: Call, visits: Visits, welcome: dict[str, Sent] | None = None) -> Answer:
        """Return the models that `deploy` gives, which `score` takes; nothing is kept."""
        return self.run(call, visits, welcome, lasting=False, then=Client.calibrated)

    def begin_round(self, t: int, state: State | None) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Prepare for a round; return clients that have joined and their numbers of rows by split: nobody does here."""
        if self.workers == 1 and self.device.type == "cpu" and not self.loop:
            self._prefetch.begin_round(t, state)
        return []

    def paths_used(self) -> Counter[str]:
        """Return how often each fast path, or the plain code of a model, was taken."""
        return self.used + (self.model.paths_used() - self._used_before)

    def evaluate(
        self,
        call: Call,
        visits: Visits,
        split: str,
        metrics: Sequence[Metric],
        welcome: dict[str, Sent] | None = None,
    ) -> Answer:
        """Return the sums of each metric for the deployed models on one split, and "rows"; keep nothing."""

        def score(client: Client, weights: Tensor) -> dict[str, Tensor]:
            return client_sums(
                self.model, client.calibrated(weights), self.splits[split], client._at, metrics
            )

        return self.run(call, visits, welcome, lasting=False, then=score)

    def _stacks(
        self, call: Call, visits: Visits, count: int, step: int, threads: int
    ) -> Iterator[tuple[Tensor | None, Client, slice | int]]:
        """Yield `count` visits as stacks of at most `step`, one by one, or as one stack for several threads."""
        if count <= step and not self.loop:
            stack = self._client(call, visits.at, functools.partial(self._keys, call, visits), threads)
            stack.whole = True
            if self.device.type == "cpu":
                stack.batches.prefetched = functools.partial(self.draws.of, call, visits)
            yield visits.at, stack, slice(None)
            return
        stacks = max(1, math.ceil(count / step))
        step = max(1, math.ceil(count / stacks))  # equal stacks: nobody waits for a longer one
        everyone = torch.arange(count, device=self.device) if visits.at is None else visits.at
        keys = functools.cache(functools.partial(self._keys, call, visits))
        if self.workers > threads:
            keys()  # so that no two workers make them
        for first in range(0, count, step):
            rows = first if self.loop else slice(first, first + step)
            at, own_keys = everyone[rows], functools.partial(lambda rows: keys()[rows], rows)
            yield at, self._client(call, at, own_keys, threads), rows

    def _keys(self, call: Call, visits: Visits) -> Tensor:
        """Return the hash keys of all visits of a call, [k]."""
        if self.device.type == "cpu":
            return self.draws.keys(call, visits)
        return visit_keys(self.seed, call, self.ids if visits.at is None else self.ids[visits.at], visits.nth)

    def _client(self, call: Call, at: Tensor | None, keys: Callable[[], Tensor], threads: int) -> Client:
        """Return a stack of clients for a call."""
        algorithm = call.algorithm
        encoder = Encoder(call.compress, call.phase)
        made = Client(self, at, keys, algorithm.batch, encoder, threads, call.algorithm.optimizer)
        if self.private is not None:
            if call.phase != "deploy" and call.phase not in algorithm.stays:
                made.private, made.stays = self.private, algorithm.stays
                made.use = f"{call.phase} {call.round} {call.call}"
        return made

    def stack_size(self, batch: int) -> int:
        """Return how many clients are stacked at once."""
        room = STACK_ELEMENTS
        if self._draws(batch):
            room = min(room, CACHED_ELEMENTS << (3 if self._splits(batch) else 0))
        if self.device.type == "cuda":
            room = torch.cuda.get_device_properties(self.device).total_memory // GPU_BYTES_PER_ELEMENT
        return max(1, room // (4 * self.model.d + batch * self._row_elements))

    def threads(self, batch: int, participation: float = 1.0) -> int:
        """Return how many threads torch is to use in a round: one for small tensors, else as many as it is set to.

        Minibatches of models in closed form have workers instead: a thread for a stack waits for others once in a
        call, threads inside torch in each operation, which is slow on a machine that has other things to do.
        """
        rows = batch or self.train.largest
        stack = len(self.train) * participation
        work = stack * (self.model.d + min(rows, self.train.largest) * self._row_elements)
        self.workers, self._split = 1, {}
        if self._draws(batch) and not self.loop:
            unlocked = self._splits(batch) and any(
                path.unlocked(self.model, self.train) for path in fast.enabled("sgd")
            )
            least = UNLOCKED_ELEMENTS if unlocked else WORKERS_ELEMENTS
            self.workers = 1 if work < least else torch.get_num_threads()
            return 1
        return 1 if work < THREADED_ELEMENTS else torch.get_num_threads()

    def _draws(self, batch: int) -> bool:
        """Whether gradients are those of minibatches, in closed form, on this machine's processor."""
        return self.model.closed_form and 0 < batch < self.train.largest and self.device.type == "cpu"

    def _splits(self, batch: int) -> bool:
        """Whether a fast path of local SGD computes parts of one stack with several threads."""
        found = self._split.get(batch)
        if found is None:
            paths = fast.enabled("sgd") if self._draws(batch) and not self.loop else ()
            found = self._split[batch] = any(path.in_parts(self.model, self.train) for path in paths)
        return found

    @functools.cached_property
    def _row_elements(self) -> int:
        return max(1, self.train.x[0].numel()) if len(self.train.x) else 1

    def _received(
        self, shared: dict[str, Sent], each: dict[str, Tensor], client: Client, rows: slice | int
    ) -> dict[str, Sent]:
        lead = client.lead
        received = {
            name: value.expand(*lead, *value.shape) if isinstance(value, Tensor) else value
            for name, value in shared.items()
        }
        for name, value in each.items():
            received[name] = value[rows]
        return received

    def _good(self, named: dict[str, Tensor], client: Client, phase: str) -> Tensor | None:
        """Which clients of the stack answered with finite numbers (None: all)."""
        lead = client.lead
        for name, value in (*named.items(), *client.written.items()):
            if value.shape[: len(lead)] != lead:
                raise CoterieError(
                    f"phase {phase!r}: value {name!r} has shape {tuple(value.shape)}, which does not start with the "
                    f"client axis {tuple(lead)}. Write phases for the last axis and keep the axes before it."
                )
        values = [*named.values(), *client.written.values(), *client.encoder.given]
        if self.unread is not None:
            self.unread += witnesses(values)
            return None
        if all_finite(values):
            return None
        good = torch.ones(lead, dtype=torch.bool, device=self.device)
        for value in values:
            if value.is_floating_point():
                good &= torch.isfinite(materialize(value)).reshape(*lead, -1).all(-1)
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

    def _join(self, parts: list[dict[str, Tensor]], goods: list[Tensor | None], counts: list[int]) -> Answer:
        if not self.loop and len(parts) == 1:
            return Answer(parts[0], goods[0])
        if not parts:
            return Answer({})
        join = torch.stack if self.loop else broadcast.cat
        named = {name: join([part[name] for part in parts]) for name in parts[0]}
        if all(good is None for good in goods):
            return Answer(named)
        filled = [
            torch.ones(count, dtype=torch.bool, device=self.device) if good is None else good.reshape(-1)
            for good, count in zip(goods, counts, strict=True)
        ]
        return Answer(named, torch.cat(filled))


def _no_draws() -> Tensor:
    raise CoterieError("a phase draws random numbers while several rounds are computed at once")

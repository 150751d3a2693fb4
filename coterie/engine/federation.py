"""The server's side of a federation: who the clients are, and the one door to them, `map`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie._core import broadcast, html, randomness
from coterie._core.errors import SettingError
from coterie.data.clients import Clients
from coterie.engine import build
from coterie.engine.aggregate import ON_NODES, Aggregate
from coterie.engine.byzantine import Attack, as_attacks, lied
from coterie.engine.calls import arguments, occurrences, payload
from coterie.engine.compressors import Compressor, compressor
from coterie.engine.encoding import Encoded
from coterie.engine.from_table import from_table
from coterie.engine.from_texts import from_texts
from coterie.engine.late import LateAnswers
from coterie.engine.late_replies import collected
from coterie.engine.ledger import INSIDE, Entry, Ledger, weigh
from coterie.engine.noise import Noise
from coterie.engine.privacy import ClientPrivacy, NoisyNodes, Privacy, PrivateHeld
from coterie.engine.protocol import Answer, Call, FederatedAlgorithm, Runtime, Sent, Visits
from coterie.engine.replies import Replies
from coterie.engine.server_draws import ServerDraws
from coterie.engine.state import State
from coterie.engine.sums import AwayReplies, Held, SummedReplies, Total, started_from
from coterie.engine.sums import HeldByClients as HeldBy
from coterie.models.base import Model
from coterie.models.metrics import LOSS, Metric, main_metric, row_values

Origin = Callable[[Model], "Federation"]
HELD_ELEMENTS = 1 << 22  # largest clients x parameters of models that are held while they are scored


class Federation:
    """Clients, a model, and `map`.

    Build one with `from_arrays` or `from_table`. What clients hold is behind `runtime`; this object knows
    names, sizes, clusters and what was answered.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        model: Model,
        names: Sequence[str],
        rows: dict[str, Tensor],
        clusters: Tensor | None = None,
        cluster_names: Sequence[str] | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        dropout: float = 0.0,
        table: Any = None,
        truth: Tensor | None = None,
        byzantine: Mapping[Any, Attack | str] | None = None,
        texts: dict[str, Any] | None = None,
        origin: Origin | None = None,
    ) -> None:
        if not 0.0 <= dropout < 1.0:
            raise SettingError(f"dropout is {dropout}; it must be at least 0 and below 1")
        self.runtime, self.model, self.seed, self.dtype, self.device = runtime, model, seed, dtype, device
        self.names, self.clusters, self.dropout = list(names), clusters, dropout
        self.found: Tensor | None = None  # clusters [n] that a method found and uses as if they were known
        self.cluster_names = list(cluster_names) if cluster_names is not None else None
        self.table, self.truth = table, truth
        self.texts = texts  # where they are and how they were read, for who wants them again
        self.origin = origin  # how the same clients are built for another model
        self.byzantine = as_attacks(byzantine, self.names)
        on_nodes = (
            runtime is not None and runtime.capabilities.models_stay
        )  # None: a run that is read from its folder
        self.aggregate = ON_NODES if on_nodes else Aggregate()
        self.privacy: ClientPrivacy | None = None  # budget and noise of clients, where they are kept private
        self.noise: Noise | None = None
        self.promised: Privacy | None = None  # what this run may cost
        self.late: LateAnswers | None = None  # answers on their way, where rounds do not wait for all
        self.n, self.d = len(self.names), model.d
        self.rows = rows  # number of rows [n] by split
        self.sizes = rows["train"].to(device=device, dtype=dtype).unsqueeze(-1)
        self.everyone = torch.arange(self.n, device=device)
        self.ledger, self._draws = Ledger(), ServerDraws(seed)
        self.left_out: list[tuple[int, int, str]] = []  # round, client, reason
        self.shortened: list[tuple[int, int, str]] = []  # round, client, phase
        self.begun = torch.zeros(self.n, dtype=torch.bool, device=device)
        self.round, self._calls, self._all_begun = 0, 0, False
        self._state: State | None = None
        # the last cohort, whence others come, and its round and size
        self._sampled: tuple[Tensor | None, Any, tuple[int, int] | None] = None, None, None

    @classmethod
    def from_arrays(
        cls,
        xs: Sequence[Any],
        ys: Sequence[Any],
        model: Model,
        clusters: Sequence[Any] | Tensor | None = None,
        names: Sequence[str] | None = None,
        *,
        dropout: float = 0.0,
        byzantine: Mapping[Any, Attack | str] | None = None,
        **options: Any,
    ) -> Federation:
        """Build a federation from one array of inputs and one of targets per client.

        Options: `split` (train, validation, test), `seed`, `dtype`, `device`, `loop` (clients one by one), `truth`
        ([n, d] true parameters of generated data), `augment` (a function of minibatches).
        """
        parts = build.from_arrays(xs, ys, model, clusters, names, **options)
        return cls(**vars(parts), dropout=dropout, byzantine=byzantine)

    @classmethod
    def from_clients(
        cls,
        clients: Clients,
        model: Model,
        *,
        dropout: float = 0.0,
        byzantine: Mapping[Any, Attack | str] | None = None,
        **options: Any,
    ) -> Federation:
        """Build a federation from what a reader, partitioner or generator of `coterie.data` returned.

        Options are those of `from_arrays`.
        """
        parts = build.from_clients(clients, model, **options)
        return cls(**vars(parts), dropout=dropout, byzantine=byzantine)

    @classmethod
    def from_rows(
        cls,
        x: Tensor,
        y: Tensor,
        sizes: Tensor,
        *,
        dropout: float = 0.0,
        byzantine: Mapping[Any, Attack | str] | None = None,
        **options: Any,
    ) -> Federation:
        """Build a federation from the rows of all clients one after the other, `sizes` [n] of them each.

        Options are those of `from_arrays`.
        """
        parts = build.from_rows(x, y, sizes, **options)
        return cls(**vars(parts), dropout=dropout, byzantine=byzantine)

    @classmethod
    def from_table(
        cls,
        source: Any,
        client: str,
        target: str,
        *,
        dropout: float = 0.0,
        byzantine: Mapping[Any, Attack | str] | None = None,
        **options: Any,
    ) -> Federation:
        """Build a federation from a CSV or Parquet file, or a data frame, with a client column."""
        parts = from_table(source, client, target, **options)

        def origin(model: Model) -> Federation:
            other = {**options, "model": model}
            return cls.from_table(source, client, target, dropout=dropout, byzantine=byzantine, **other)

        other_models = None if parts.model.whole_clients else origin  # no other model takes survival times
        return cls(**vars(parts), dropout=dropout, byzantine=byzantine, origin=other_models)

    @classmethod
    def from_texts(
        cls,
        source: Any,
        model: Model,
        *,
        dropout: float = 0.0,
        byzantine: Mapping[Any, Attack | str] | None = None,
        **options: Any,
    ) -> Federation:
        """Build a federation from texts: a folder with a file or folder per client, a table, or a dict.

        A table has the columns `client` and `text`. The model is `models.causal_lm(...)`. Options: `context` (tokens
        in a row, 512), `tokens` (at most so many of a client), `split` (by document, 0.8, 0.1, 0.1), `seed`, `dtype`,
        `device`, `cache`, `clusters`.
        """
        parts = from_texts(source, model, **options)
        return cls(**vars(parts), dropout=dropout, byzantine=byzantine)

    def fresh(
        self,
        seed: int | None = None,
        dropout: float | None = None,
        byzantine: Mapping[Any, Attack | str] | None = None,
    ) -> Federation:
        """Return the same clients and rows with an empty ledger and no state kept."""
        made = Federation(
            self.runtime.fresh(seed),
            model=self.model,
            names=self.names,
            rows=self.rows,
            clusters=self.clusters,
            cluster_names=self.cluster_names,
            seed=self.seed if seed is None else seed,
            dtype=self.dtype,
            device=self.device,
            dropout=self.dropout if dropout is None else dropout,
            table=self.table,
            truth=self.truth,
            byzantine=self.byzantine if byzantine is None else byzantine,
            texts=self.texts,
            origin=self.origin,
        )
        made.aggregate = self.aggregate
        return made

    def with_model(self, model: Model) -> Federation:
        """Return the same clients, with the same rows in each split, encoded for another model.

        Raises `SettingError` if the federation was not made from a table.
        """
        if self.model.whole_clients:
            raise SettingError(
                "survival times are learned by Cox regression, not by models that methods bring along; choose local, "
                "fedavg, fine-tuned, ditto or rtfa"
            )
        if self.origin is None:
            raise SettingError(
                "only a federation from a table can be encoded for another model; build one with model="
            )
        return self.origin(model)

    @property
    def models_stay(self) -> bool:
        """Whether deployed models stay with the clients, so that this process has none of them."""
        return self.runtime.capabilities.models_stay

    def known_clusters(self, method: str = "this method") -> Tensor:
        """Return the known cluster of every client [n], or the found one; raise `SettingError` if there are none."""
        if self.found is not None:
            return self.found
        if self.clusters is None:
            raise SettingError(f"{method} needs known clusters: pass `--cluster COLUMN` or `clusters=`")
        return self.clusters

    def initial_model(self) -> Tensor:
        """Return the starting parameters [d], a function of the seed."""
        return self.model.initial(self.seed, self.dtype, self.device)

    def sample(self, t: int, fraction: float = 1.0) -> Tensor | None:
        """Return the ids of a random cohort for round t (at least one client); None means everybody."""
        if fraction >= 1.0:
            return None
        count = max(1, round(fraction * self.n))
        ids = self._draws.cohort(t, self.n, count).to(self.device)
        self._sampled = ids, lambda later: self._draws.cohort(later, self.n, count), (t, count)
        return ids

    def uniform(self, purpose: str, t: int, count: int = 1) -> Tensor:
        """Return draws from [0, 1) on the server, [count], a function of seed, purpose and round."""
        return self._draws.uniform(purpose, t, count)

    def coin(self, purpose: str, t: int, which: int = 0) -> float:
        """Return one draw from [0, 1) that server and clients both know from the seed."""
        return randomness.number(self.seed, purpose, t, which)

    def coins(self, purpose: str, first: int, last: int) -> Tensor:
        """Return `coin` of the rounds from first to last, [rounds]."""
        return randomness.uniform(randomness.key(self.seed, purpose, torch.arange(first, last + 1), 0))

    def map(
        self,
        phase: Callable[..., Any],
        *,
        to: Tensor | Sequence[int] | None = None,
        each: dict[str, Tensor] | None = None,
        link: str = "client-server",
        compress: Compressor | str | None = None,
        **shared: Any,
    ) -> Replies:
        """Run a phase on clients and collect the answers.

        Keywords are sent to everyone visited, `each` sends row k to client `to[k]` (which may repeat).
        Clients may drop out, and a client that answers NaN or infinity is left out and counted. What crosses no
        wire (`link=INSIDE`: a client of a decentralised method and its own part of the state) is not metered.

        With `compress`, such as "rand-7", every vector a phase returns is encoded by the client and decoded
        here, and the ledger counts the encoded floats and bytes; single numbers go as they are. A phase that
        needs to know what arrives asks `client.compress(value)` and returns that.
        """
        algorithm: FederatedAlgorithm = phase.__self__  # type: ignore[attr-defined]
        ids = None if to is None else torch.as_tensor(to, dtype=torch.long)
        each = each or {}
        self._check_rows(phase.__name__, ids, each)
        begins = not self._all_begun and algorithm.begin is not None
        if self.dropout or begins:
            ids = self._moved(ids)
        ids, each = self._drop(ids, each)
        if self.late is not None and self.late.simulated:
            ids, each = self._leave_at_work(self.late, ids, each)
        if begins:
            if phase.__name__ == "begin":
                replies = self._call(algorithm, "begin", ids, shared, each, link)
                self._mark_begun(replies.ids)
                return replies
            if self._state is not None:
                ids, each = self._welcome(algorithm, ids, each)
        encoder = None if compress is None else compressor(compress)
        return self._call(algorithm, phase.__name__, ids, shared, each, link, encoder)

    def all_begun(self, algorithm: FederatedAlgorithm) -> bool:
        """Return True if no client has to run `begin` first."""
        return self._all_begun or algorithm.begin is None

    def has_rows(self, split: str) -> bool:
        """Return True if any client has rows in this split."""
        return bool(self.rows[split].sum() > 0)

    def evaluate(
        self, algorithm: FederatedAlgorithm, state: State, split: str, metrics: Sequence[Metric] = ()
    ) -> dict[str, Tensor]:
        """Return metrics [n] of what `deploy` gives each client, on one split; NaN where a client has no such rows.

        These are the loss, the main metric of the task, and further `metrics`.
        """
        asked = self._asked(metrics)

        def run(call: Call, visits: Visits, welcome: dict[str, Sent] | None) -> Answer:
            return self.runtime.evaluate(call, visits, split, asked, welcome)

        answers = self.deployed_by(algorithm, state, run)
        self._meter("evaluate", "deploy", "client-server", {}, {}, self.n, answers)
        return self._scores(answers, asked)

    def deploy_and_evaluate(
        self, algorithm: FederatedAlgorithm, state: State, split: str, metrics: Sequence[Metric] = ()
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return what `evaluate` and `personal` do, with one call of `deploy`; None for models too large to hold."""
        if not self.runtime.capabilities.fast_forward or self.n * self.d > HELD_ELEMENTS:
            return self.evaluate(algorithm, state, split, metrics), None
        asked, models = self._asked(metrics), self.personal(algorithm, state)
        answers = self.runtime.score(models, split, asked)
        self._meter("evaluate", "deploy", "client-server", {}, {}, self.n, answers)
        return self._scores(answers, asked), models

    def score(self, models: Tensor, split: str, metrics: Sequence[Metric] = ()) -> dict[str, Tensor]:
        """Return metrics [n] of given models [n, d] on one split, as `evaluate` does."""
        asked = self._asked(metrics)
        return self._scores(self.runtime.score(models.to(self.device), split, asked), asked)

    def pooled(self, models: Tensor, split: str, metrics: Sequence[Metric] = ()) -> dict[str, float]:
        """Return metrics of given models [n, d] over the rows of all clients together on one split."""
        asked = self._asked(metrics)
        sums = self.runtime.score(models, split, asked)
        return {
            metric.name: self.unit_of(metric) * float(metric.pooled(sums[metric.name], sums["rows"]))
            for metric in asked
        }

    def row_values(self, models: Tensor, split: str, metrics: Sequence[Metric] = ()) -> dict[str, Tensor]:
        """Return the value of every row [rows] in metrics that are means over rows, squared for roots of means.

        Others are left out; the result is empty where rows are not visible here, or are whole texts.
        """
        if not self.runtime.capabilities.rows_visible or self.model.task == "language":
            return {}
        means = [metric for metric in self._asked(metrics) if metric.is_mean]
        values = row_values(self.model, models, self.runtime.rows(split), means)
        power = {metric.name: 2 if metric.is_root else 1 for metric in means}
        return {
            metric.name: self.unit_of(metric) ** power[metric.name] * values[metric.name] for metric in means
        }

    def _asked(self, metrics: Sequence[Metric]) -> list[Metric]:
        return list(dict.fromkeys([LOSS, main_metric(self.model.task), *metrics]))

    def _scores(self, answers: dict[str, Tensor], metrics: Sequence[Metric]) -> dict[str, Tensor]:
        empty = answers["rows"] == 0
        values = {metric: self.unit_of(metric) * metric.finish(answers[metric.name]) for metric in metrics}
        return {
            metric.name: torch.where(empty, torch.nan, value).squeeze(-1) for metric, value in values.items()
        }

    def unit_of(self, metric: Metric) -> float:
        """Return what a metric of encoded targets is multiplied by to be in the target's units."""
        return self.table.target_scale if self.table is not None and metric.scales_with_target else 1.0

    def personal(self, algorithm: FederatedAlgorithm, state: State) -> Tensor:
        """Return the deployed models [n, d] or, where models stay with the clients, the round [n, 1] of each."""
        return broadcast.compact(self.deployed_by(algorithm, state, self.runtime.deploy)[""])

    def deployed_by(
        self,
        algorithm: FederatedAlgorithm,
        state: State,
        run: Callable[[Call, Visits, dict[str, Any] | None], Answer],
    ) -> dict[str, Tensor]:
        """Run `deploy` everywhere; clients that have not begun do so for this occasion only."""
        self._use_found(state)
        shared, each = algorithm.deploy_inputs(self, state)
        groups: list[tuple[Tensor | None, dict[str, Any] | None]] = [(None, None)]
        if algorithm.begin is not None and not self._all_begun:
            welcome = arguments(algorithm.begin, state)
            groups = [(self.everyone[self.begun], None), (self.everyone[~self.begun], welcome)]
            groups = [(ids, start) for ids, start in groups if ids is not None and len(ids)]
        answers: dict[str, Tensor] = {}
        for ids, start in groups:
            rows = each if ids is None else {name: value[ids] for name, value in each.items()}
            call = Call(algorithm, "deploy", self.round, 0, shared, rows)
            for name, value in run(call, Visits(ids), start).named.items():
                if ids is None:
                    answers[name] = value
                else:
                    answers.setdefault(name, value.new_empty((self.n, *value.shape[1:])))[ids] = value
        return answers

    def _call(
        self,
        algorithm: FederatedAlgorithm,
        phase: str,
        ids: Tensor | None,
        shared: dict[str, Any],
        each: dict[str, Tensor],
        link: str,
        compress: Compressor | None = None,
    ) -> Replies:
        drawn = ids is not None and ids is self._sampled[0]
        again = None if ids is None or drawn else lambda: self._moved(occurrences(ids))
        visits = Visits(self._moved(ids), again, *(self._sampled[1:] if drawn else ()))
        asked = self.everyone if visits.at is None else visits.at
        late = self.late if phase in algorithm.tolerates_late else None
        wait = None if late is None else late.settings
        call = Call(algorithm, phase, self.round, self._calls, shared, each, compress, wait)
        self._calls += 1
        kind = "setup" if self.round == 0 or phase == "begin" else "train"
        answer = self.runtime.run(call, visits) if len(asked) else Answer({})
        if answer.pending is not None:  # what they were sent has travelled
            own = {name: value[answer.pending] for name, value in each.items()}
            self._meter(kind, phase, link, shared, own, int(answer.pending.sum()), {})
        if answer.came is not None:
            asked, each = asked[answer.came], {name: value[answer.came] for name, value in each.items()}
            self._note_absent(phase, answer)
        due = None if late is None else late.due(call, asked)
        if answer.away is not None and (self.byzantine or self.privacy is not None or due is not None):
            answer = answer.away.fetched(answer)
        if self.byzantine:
            base = randomness.key(self.seed, "byzantine", self.round, self._calls)
            answer = lied(answer, asked, self.byzantine, base)
        if late is not None and (due is not None or answer.late):
            return collected(self, late, replace(call, each=each), asked, answer, due, link)
        told = {} if self.privacy is not None else answer.named  # sums are metered when they are taken
        self._meter(kind, phase, link, shared, each, len(asked), told, answer.encoded)
        named, held = answer.named, answer.held
        if held is not None and self.privacy is not None:
            held = NoisyNodes(held, self.privacy, replace(call, each=each), asked)
        elif named and self.privacy is not None and self.noise is not None:
            rows = self.sizes[asked]
            place = HeldBy(named, asked, rows, replace(call, each=each), answer.good)
            held = PrivateHeld(place, self.privacy, self.noise)
        origin = None if self.aggregate.plain else started_from(replace(call, each=each), len(asked))
        if answer.good is not None:
            self.left_out += [(self.round, int(k), f"{phase}: not finite") for k in asked[~answer.good]]
            asked, origin = asked[answer.good], None if origin is None else origin[answer.good]
            if answer.away is None:
                named = {name: value[answer.good] for name, value in named.items()}
        sizes = self.sizes if asked is self.everyone else self.sizes.index_select(0, asked)
        if held is not None:
            return self._summed(algorithm, phase, link, asked, sizes, held)
        note = self.noting(phase)
        if answer.away is not None:
            return AwayReplies(
                asked,
                named,
                sizes,
                self.aggregate,
                note,
                origin,
                held=answer.away,
                asks=phase,
                away=answer.away,
            )
        return Replies(asked, named, sizes, self.aggregate, note, origin)

    def noting(self, phase: str) -> Callable[[Tensor, Tensor], None]:
        """Return what takes down whose replies to a phase are left out of a mean, and whose are shortened."""

        def note(far: Tensor, long: Tensor) -> None:
            self.left_out += [(self.round, int(k), f"{phase}: too far from the others") for k in far]
            self.shortened += [(self.round, int(k), phase) for k in long]

        return note

    def _leave_at_work(
        self, late: LateAnswers, ids: Tensor | None, each: dict[str, Tensor]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Leave out clients that are still at work on an earlier call."""
        asked = self.everyone if ids is None else self._moved(ids)
        assert asked is not None
        idle = late.idle(asked)
        if bool(idle.all()):
            return ids, each
        return asked[idle], {name: value[idle] for name, value in each.items()}

    def _summed(
        self,
        algorithm: FederatedAlgorithm,
        phase: str,
        link: str,
        asked: Tensor,
        sizes: Tensor,
        held: Held,
    ) -> Replies:
        """Return replies of which only sums are known; each sum is metered as an answer of every client in it."""

        def meter(total: Total) -> None:
            kind = "setup" if self.round == 0 else "train"
            sent = {"": total.values.unsqueeze(0).expand(len(total.ids), *total.values.shape)}
            self._meter(kind, phase, link, {}, {}, len(total.ids), sent)

        asks = f"{algorithm.name} (phase {phase})"
        return SummedReplies(asked, {}, sizes, held=held, asks=asks, meter=meter)

    def _moved(self, ids: Tensor | None) -> Tensor | None:
        """Return ids on the clients' device, without waiting for the copy."""
        return None if ids is None else ids.to(self.device, non_blocking=True)

    def _note_absent(self, phase: str, answer: Answer) -> None:
        self.left_out += [(self.round, client, f"{phase}: {why}") for client, why in answer.why.items()]
        if answer.forgot is not None:
            self.begun[answer.forgot] = False
            self._all_begun = False

    def exchange(self, name: str, link: str, down: Tensor | None = None, up: Tensor | None = None) -> None:
        """Meter what the server exchanges with others that hold no data, such as cluster heads: a row for each."""
        entry = Entry(self.round, "setup" if self.round == 0 else "train", name, link)
        self.ledger.add(entry, weigh(down), weigh(up))

    def _meter(
        self,
        kind: str,
        phase: str,
        link: str,
        shared: dict[str, Any],
        each: dict[str, Tensor],
        visited: int,
        named: dict[str, Tensor],
        encoded: dict[str, Encoded] | None = None,
    ) -> None:
        if link == INSIDE:
            return
        floats, size = payload(shared.values())
        own_floats, own_size = payload(each.values())
        floats, size = floats * visited + own_floats, size * visited + own_size
        encoded = encoded or {}
        up_floats, up_size = payload(value for name, value in named.items() if name not in encoded)
        up_floats += visited * sum(item.floats for item in encoded.values())
        up_size += visited * sum(item.size for item in encoded.values())
        down = (visited if floats else 0, floats, size)
        up = (visited if up_floats else 0, up_floats, up_size)
        self.ledger.add(Entry(self.round, kind, phase, link), down, up)

    def _check_rows(self, phase: str, ids: Tensor | None, each: dict[str, Tensor]) -> None:
        count = self.n if ids is None else len(ids)
        for name, value in each.items():
            if len(value) != count:
                raise SettingError(f"map({phase}): {name!r} has {len(value)} rows for {count} visits")

    def _drop(self, ids: Tensor | None, each: dict[str, Tensor]) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Leave out clients that drop out of this call, as the hash decides."""
        if self.dropout == 0.0:
            return ids, each
        asked = self.everyone if ids is None else ids
        base = randomness.key(self.seed, "dropout", self.round, self._calls)
        keys = randomness.fold(base, asked)
        here = randomness.uniform(keys) >= self.dropout
        return asked[here], {name: value[here] for name, value in each.items()}

    def _welcome(
        self, algorithm: FederatedAlgorithm, ids: Tensor | None, each: dict[str, Tensor]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Let clients that are visited for the first time begin, from the state of this round.

        A client whose `begin` gives NaN or infinity has nothing to go on from: it is left out of the call.
        """
        assert self._state is not None and algorithm.begin is not None
        asked = self.everyone if ids is None else ids
        new = torch.unique(asked[~self.begun[asked]])
        if len(new):
            whole = None if len(new) == self.n else new
            sent = arguments(algorithm.begin, self._state)
            self._mark_begun(self._call(algorithm, "begin", whole, sent, {}, "client-server").ids)
        ready = self.begun[asked]
        if ready.all():
            return ids, each
        return asked[ready], {name: value[ready] for name, value in each.items()}

    def _mark_begun(self, ids: Tensor) -> None:
        self.begun[ids] = True
        self._all_begun = bool(self.begun.all())

    def restore_begun(self, begun: Tensor) -> None:
        """Set which clients had begun when a checkpoint was written."""
        self.begun, self._all_begun = begun, bool(begun.all())

    def reopened(self, which: str) -> Federation:
        """Return the same clients elsewhere, with nothing kept and more of their rows in training, where they agree."""
        runtime, rows = self.runtime.reopened(which)
        return Federation(
            runtime,
            model=self.model,
            names=self.names,
            rows=rows,
            clusters=self.clusters,
            cluster_names=self.cluster_names,
            seed=self.seed,
            dtype=self.dtype,
            device=self.device,
            dropout=self.dropout,
            table=self.table,
        )

    def _use_found(self, state: State | None) -> None:
        """Use the clusters that a method found and has in its state."""
        if state is not None and "found_clusters" in state:
            self.found = state.found_clusters

    def enter_round(self, t: int, state: State | None) -> None:
        """Begin a round: set the coordinates of all random draws and let newcomers in."""
        self.round, self._calls, self._state = t, 0, state
        self._use_found(state)
        for ids, rows in self.runtime.begin_round(t, state):
            for split, count in rows.items():
                self.rows[split][ids] = count.to(self.rows[split])
            self.sizes[ids] = rows["train"].to(self.sizes).unsqueeze(-1)

    def __repr__(self) -> str:
        train = int(self.rows["train"].sum())
        return (
            f"Federation({self.n} clients, {train} training rows, {type(self.model).__name__}, d = {self.d})"
        )

    def _repr_html_(self) -> str:
        """Return the clients and their rows as HTML, for notebooks."""
        options = {} if self.table is None else self.table.options
        target = f", to predict {options['target']!r}" if "target" in options else ""
        head = f"Federation of {self.n:,} clients: {type(self.model).__name__}, {self.d:,} parameters{target}"
        splits = list(self.rows)
        counts = zip(*(self.rows[split].tolist() for split in splits), strict=True)
        rows = [
            [name, *(f"{count:,}" for count in own)] for name, own in zip(self.names, counts, strict=True)
        ]
        return html.paragraph(head) + html.table(
            [options.get("client", "client"), *(f"{split} rows" for split in splits)], rows
        )

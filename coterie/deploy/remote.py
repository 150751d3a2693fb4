"""The server's side of a federation across a network: it knows clients, sizes and answers, and no rows.

`RemoteRuntime` works over any transport. A node that does not answer in time, or whose answer cannot be used, is left
out of the call and named in the notes; a node that is back is noticed between rounds.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import NotReopened
from coterie.data.column_types import some
from coterie.deploy import consent, messages, wire
from coterie.deploy.answers import (
    LARGE,
    TOO_LARGE,
    CallId,
    Reply,
    check,
    excess,
    explain,
    require_counts,
    usable,
    usual_shape,
    words,
)
from coterie.deploy.at_work import AtWork
from coterie.deploy.relay import RelayCaller
from coterie.deploy.secure_sums import RemoteHeld, SumCaller
from coterie.deploy.transport import Envelope, Forgot, Late, NodeCaller
from coterie.engine.protocol import Answer, Call, Capabilities, Method, Runtime, Sent, Visits
from coterie.engine.state import State
from coterie.models.base import Model
from coterie.models.metrics import Metric

PATIENCE = 120.0  # seconds for a node to read its table
HELLO_LASTS = 1800.0  # seconds a greeting waits for a node that is away
HELLO_WAITS = 1.0  # seconds between rounds for an answer to a greeting that is on its way


@dataclass
class Place:
    """A node as the server sees it.

    Attributes
    ----------
    name : str
        Name of the node.
    ids : Tensor
        Its clients, in the node's own order.
    clients : list of str
        Their names, in the same order.
    clusters : Tensor or None
        Their known clusters.
    told, counts
        Numbers of rows of its clients, in all and by split. They are fixed when they are first known.
    here : bool
        Whether the node takes part at present.
    stamp, floor : tuple of int or None
        Newest state whose answer has arrived, and oldest state that may be needed again.
    before : dict of Tensor or None
        Numbers of rows by split before the run was opened again with more of them in training.
    greeting, greeted
        Ticket and time of a greeting that was not answered yet.
    """

    name: str
    ids: Tensor
    clients: list[str]  # their names, in the order of `ids`, which is the node's own
    clusters: Tensor | None = None
    told: Tensor | None = None  # numbers of rows of its clients, as the node told them at the start
    counts: dict[str, Tensor] | None = None  # the same by split, fixed when it opened the run
    here: bool = False
    stamp: CallId | None = None
    floor: CallId | None = None
    before: dict[str, Tensor] | None = None
    greeting: str | None = None
    greeted: float = -math.inf


@dataclass
class Setup:
    """Settings of a run that nodes are told once."""

    run: str
    roles: dict[str, Any]
    seed: int
    split: tuple[float, float, float]
    model: Model
    settings: dict[str, Any]  # algorithm, model description, preprocessor
    hello: dict[str, Any]  # header of a greeting
    dtype: torch.dtype = torch.float64  # of parameters

    def header(self) -> dict[str, Any]:
        """Return the header of the message that opens the run on a node."""
        return {
            "kind": "open",
            "run": self.run,
            "roles": self.roles,
            "seed": self.seed,
            "split": list(self.split),
            "setup": self.settings,
        }


class RemoteRuntime(Runtime):
    """Clients on nodes, reached by messages.

    Parameters
    ----------
    caller
        Sends messages to the nodes.
    places
        The nodes.
    setup
        Settings of the run.
    n
        Number of clients.
    """

    capabilities = Capabilities(models_stay=True, reopens=True)

    def __init__(self, caller: NodeCaller, places: list[Place], setup: Setup, n: int) -> None:
        self.caller, self.places, self.setup, self.n = caller, places, setup, n
        self.train_rows = torch.zeros(n, 1, dtype=torch.float64)  # training rows of each client
        self._number()
        self.at_work = AtWork(self)
        self._shapes: dict[str, Any] = {}
        self._noted: set[tuple[str, int]] = set()
        sums = setup.settings.get("sums")
        self.relay = RelayCaller(self) if setup.settings.get("relay") else None
        self.sums = None if sums is None else SumCaller(caller, setup.run, bool(sums["secure"]))

    def _number(self) -> None:
        """Note the node of each client, and its place there."""
        self.place = torch.full((self.n,), -1)
        self.position = torch.zeros(self.n, dtype=torch.long)
        for k, place in enumerate(self.places):
            self.place[place.ids] = k
            self.position[place.ids] = torch.arange(len(place.ids))

    def adapted(self, algorithm: Method) -> Method:
        """Return the algorithm; in a relayed run what is left of it for the server."""
        return algorithm if self.relay is None else self.relay.adapted(algorithm)

    def fresh(self, seed: int | None = None) -> RemoteRuntime:
        """Return the same nodes with no state kept; the nodes' seed stays that of the run."""
        places = [replace(place, stamp=None, floor=None) for place in self.places]
        runtime = RemoteRuntime(self.caller, places, self.setup, self.n)
        runtime.train_rows = self.train_rows
        return runtime

    def reopened(self, which: str) -> tuple[RemoteRuntime, dict[str, Tensor]]:
        """Open the run again with more rows in training, on nodes whose policies allow it.

        Parameters
        ----------
        which
            'validation' or 'all'.

        Returns
        -------
        tuple of RemoteRuntime and dict of Tensor
            The clients with nothing kept, and their numbers of rows [n] by split; 0 where a node is not in it.

        Raises
        ------
        NotReopened
            No node allows it.
        """
        run = self.setup.run + consent.AGAIN
        settings = {**self.setup.settings, "refit": which}
        setup = replace(self.setup, run=run, settings=settings, hello={**self.setup.hello, "run": run})
        places = [
            Place(place.name, place.ids, place.clients, place.clusters, place.told, before=place.counts)
            for place in self._here()
        ]
        again = RemoteRuntime(self.caller, places, setup, self.n)
        names = ("train", "validation", "test")
        rows = {split: torch.zeros(self.n, dtype=torch.long) for split in names}
        for ids, counts in again.open([place.name for place in places], max(self.caller.deadline, PATIENCE)):
            for split in names:
                rows[split][ids] = counts[split]
        again.places = [place for place in places if place.here]
        if not again.places:
            raise NotReopened(
                f"no node lets {which} rows train; its owner can: refit = {which!r} under [data] of policy.toml"
            )
        again._number()
        return again, rows

    def run(self, call: Call, visits: Visits) -> Answer:
        """Run a phase on the nodes of these clients."""
        answer = self._ask("call", call, visits, None, lasting=True)
        return answer if self.sums is None else self._held(call, visits, answer)

    def _held(self, call: Call, visits: Visits, answer: Answer) -> Answer:
        """Return an answer whose values the nodes hold until a sum of them is asked for."""
        assert self.sums is not None
        asked = self.asked(visits)
        came = asked if answer.came is None else asked[answer.came]
        fine = came if answer.good is None else came[answer.good]
        ids = {
            self.places[k].name: fine[self.place[fine] == k] for k in sorted(set(self.place[fine].tolist()))
        }
        return replace(answer, held=RemoteHeld(self.sums, call, ids, self.train_rows))

    def evaluate(
        self,
        call: Call,
        visits: Visits,
        split: str,
        metrics: Sequence[Metric],
        welcome: dict[str, Sent] | None = None,
    ) -> Answer:
        """Return sums of metrics; a client whose node is away has NaN."""
        answer = self._ask("call", call, visits, welcome, split=split, metrics=metrics)
        asked = self.asked(visits)
        filled = self._filled(answer, len(asked), metrics)
        where = self.place[asked]
        for k in where.unique().tolist():
            mine = (where == k) & (filled["rows"].squeeze(-1) != 0)
            at = self.position[asked[mine]]
            if not self._counts_fit(self.places[k], split, filled["rows"][mine], at):
                for name in filled:
                    filled[name][mine] = 0.0 if name == "rows" else torch.nan
        return Answer(self._in_range(filled, metrics, asked))

    def deploy(self, call: Call, visits: Visits, welcome: dict[str, Sent] | None = None) -> Answer:
        """Let every node store its models; the answer is the round, or -1 where a node is away."""
        answer = self._ask("deploy", call, visits, welcome)
        count = self.n if visits.at is None else len(visits.at)
        came = torch.ones(count, dtype=torch.bool) if answer.came is None else answer.came
        return Answer({"": torch.where(came, call.round, -1).unsqueeze(-1)})

    def score(self, weights: Tensor, split: str, metrics: Sequence[Metric]) -> dict[str, Tensor]:
        """Return sums of metrics for the models kept under a round [n, 1]."""
        names = [metric.name for metric in metrics]
        envelopes: dict[str, Envelope] = {}
        self.at_work.settle(self.caller.deadline)
        for place in self._here():
            rounds = weights[place.ids].flatten()
            if (rounds >= 0).any():
                about = self._about("score", round=int(rounds.max()), split=split, metrics=names)
                envelopes[place.name] = (about, {})
        parts: dict[str, Tensor] = self._filled(Answer({}), self.n, metrics)
        for name, reply in self.caller.ask(envelopes).items():
            place = self.named(name)
            if isinstance(reply, wire.WireError):
                self.lose(place, reply)
                continue
            sums = messages.under("value.", reply[1])
            if not self._counts_fit(place, split, sums.get("rows"), torch.arange(len(place.ids))):
                continue
            for metric, value in sums.items():
                if metric in parts and value.shape == parts[metric][place.ids].shape:
                    parts[metric][place.ids] = value.to(self.setup.dtype)
        return self._in_range(parts, metrics, torch.arange(self.n))

    def finish(self, t: int, common: Tensor | None) -> list[str]:
        """Let the nodes write the models of round t for use; return the names of those that did."""
        tensors = {} if common is None else {"common": common}
        envelopes = {place.name: (self._about("finish", round=t), tensors) for place in self._here()}
        done = {
            name: reply
            for name, reply in self.caller.ask(envelopes).items()
            if not isinstance(reply, wire.WireError)
        }
        for name, (header, _) in done.items():
            told = header.get("trained_alone")
            said = [one for one in told if isinstance(one, str)] if isinstance(told, list) else []
            keeps = [client for client in self.named(name).clients if client in said]
            if keeps:
                verb, whose = ("keeps", "its") if len(keeps) == 1 else ("keep", "their")
                self.caller.note(
                    f"{name}: {some(keeps)} {verb} models trained alone: {whose} validation rows speak against those "
                    "of this run"
                )
        return list(done)

    def threads(self, batch: int, participation: float = 1.0) -> int:
        """Return 1: the server computes little."""
        return 1

    def stack_size(self, batch: int) -> int:
        """Return 0: clients are computed on their nodes."""
        return 0

    def data_tensors(self) -> tuple[Tensor, ...]:
        """Return on which node each client lives; the rows are not here."""
        return (self.place,)

    def snapshot(self) -> dict[str, Tensor]:
        """Return which state of each node belongs to a checkpoint; older states may then be removed."""
        for place in self.places:
            place.floor = place.stamp
        return {"state_files": torch.tensor([place.stamp or (-1, -1) for place in self.places])}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Continue from the states that a checkpoint names."""
        for place, (t, call) in zip(self.places, tensors["state_files"].tolist(), strict=True):
            place.stamp = place.floor = (t, call) if t >= 0 else None

    def open(self, names: Collection[str], deadline: float) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Open the run on nodes.

        Parameters
        ----------
        names
            The nodes to open it on.
        deadline
            Seconds to wait for them.

        Returns
        -------
        list of tuple
            Ids and numbers of rows by split, for the clients whose sizes were not known.
        """
        envelopes = {}
        for place in self.places:
            if place.name in names:
                tensors = {"ids": place.ids}
                if place.clusters is not None:
                    tensors["clusters"] = place.clusters
                envelopes[place.name] = ({**self.setup.header(), "clients": place.clients}, tensors)
        found = []
        for name, reply in self.caller.ask(envelopes, deadline).items():
            place = self.named(name)
            if isinstance(reply, wire.WireError):
                self.lose(place, reply)
                continue
            rows = messages.under("rows.", reply[1])
            try:
                texts = self.setup.hello.get("data") == "texts"  # their documents are split, not their rows
                again = "refit" in self.setup.settings
                split = None if texts or again else self.setup.split
                require_counts(rows, len(place.ids), place.told, split, place.before)
            except Exception as problem:
                self.lose(place, wire.WireError(explain(problem)))
                continue
            place.here = True
            self.caller.away.discard(place.name)
            if place.counts is None:
                place.counts, place.told = rows, rows["train"] + rows["validation"] + rows["test"]
                found.append((place.ids, rows))
                self.train_rows[place.ids] = rows["train"].double().unsqueeze(-1)
        return found

    def begin_round(self, t: int, state: State | None) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Greet nodes that are away, let in those that answered, and return their clients."""
        away = [place for place in self.places if not place.here]
        if not away:
            return []
        tickets = {place.greeting: place for place in away if place.greeting is not None}
        back = []
        replies = self.caller.transport.fetch(list(tickets), HELLO_WAITS) if tickets else {}
        for ticket, content in replies.items():
            place = tickets[ticket]
            place.greeting = None
            reply = self.caller.read(content, None)
            if not isinstance(reply, wire.WireError) and self._is_who(place, reply[0]):
                back.append(place)
        if back:
            self.caller.note(f"{', '.join(place.name for place in back)} is back")
        found = self.open([place.name for place in back], self.caller.deadline) if back else []
        self._greet([place for place in away if not place.here])
        return found

    def _greet(self, away: list[Place]) -> None:
        now = time.monotonic()
        stale = [place for place in away if place.greeting is None or now - place.greeted > HELLO_LASTS]
        envelopes = {
            place.name: wire.encode({**self.setup.hello, "nonce": secrets.token_hex(12)}, {})
            for place in stale
            if now - place.greeted > 1.0
        }
        tickets = self.caller.transport.send(envelopes, HELLO_LASTS) if envelopes else {}
        for place in stale:
            if place.name in tickets:
                place.greeting, place.greeted = tickets[place.name], now

    def _is_who(self, place: Place, header: dict[str, Any]) -> bool:
        told = header.get("told")
        if isinstance(told, dict) and told.get("clients") == place.clients:
            return True
        self.caller.note(
            f"{place.name} is left out: its clients are not those that the federation lists for it"
        )
        return False

    def _here(self) -> list[Place]:
        return [place for place in self.places if place.here]

    def asked(self, visits: Visits) -> Tensor:
        """Return who is visited, [visits]."""
        return torch.arange(self.n) if visits.at is None else visits.at

    def named(self, name: str) -> Place:
        """Return the node of this name."""
        return next(place for place in self.places if place.name == name)

    def _about(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "run": self.setup.run, **more}

    def lose(self, place: Place, problem: wire.WireError) -> None:
        """Go on without a node for this call, and without one that is silent until it is heard of again."""
        self.caller.note(f"{place.name} is left out: {problem}")
        if isinstance(problem, Late | Forgot):
            place.here = False
            self.caller.away.add(place.name)
        if isinstance(problem, Forgot):
            place.stamp = place.floor = None

    def _ask(
        self,
        kind: str,
        call: Call,
        visits: Visits,
        welcome: dict[str, Sent] | None,
        lasting: bool = False,
        split: str = "",
        metrics: Sequence[Metric] = (),
    ) -> Answer:
        self.at_work.settle(self.caller.deadline if kind == "deploy" else 0.0)
        asked = self.asked(visits)
        where = self.place[asked]
        mine: dict[str, Tensor] = {}
        envelopes = {}
        why: dict[int, str] = {}
        for k, place in enumerate(self.places):
            rows = (where == k).nonzero().squeeze(-1)
            if not len(rows):
                continue
            if not place.here:
                why |= dict.fromkeys(asked[rows].tolist(), f"node {place.name} is away")
                continue
            if place.name in self.at_work:  # it is neither asked again nor left out
                continue
            header, tensors = messages.ask(
                call, visits, rows, self.position[asked[rows]], welcome, lasting, split, metrics
            )
            about = self._about(kind, since=place.stamp, floor=place.floor)
            mine[place.name], envelopes[place.name] = rows, ({**header, **about}, tensors)
        if lasting and call.late is not None:
            replies = self.at_work.ask(call, visits, envelopes, mine)
        else:
            replies = self.caller.ask(envelopes)
        good, bad = self.sorted_out(call, replies, mine, kind, metrics)
        forgot = self.at_work.forgotten()
        for name, problem in bad.items():
            place = self.named(name)
            why |= dict.fromkeys(asked[mine[name]].tolist(), f"node {name}: {problem}")
            if isinstance(problem, Forgot):
                forgot.append(place.ids)
            self.lose(place, problem)
        if lasting:
            for name, reply in good.items():
                self.named(name).stamp = reply.stamp
        answer = self.joined_up(call, visits, asked, mine, good, why, forgot, bool(metrics))
        if not lasting:
            return answer
        return replace(answer, late=self.at_work.late(call.phase), pending=self.at_work.pending(call))

    def sorted_out(
        self,
        call: Call,
        answers: dict[str, wire.WireError | Envelope],
        mine: dict[str, Tensor],
        kind: str,
        metrics: Sequence[Metric],
    ) -> tuple[dict[str, Reply], dict[str, wire.WireError]]:
        """Return the replies that can be used, and what is wrong with the others."""
        good: dict[str, Reply] = {}
        bad: dict[str, wire.WireError] = {}
        model, sums = self.setup.model, sum(self._widths(metrics).values())
        held = self.sums is not None and kind == "call" and not metrics
        for name, envelope in answers.items():
            visits, since = len(mine[name]), self.named(name).stamp
            try:
                if isinstance(envelope, wire.WireError):
                    raise envelope
                if kind == "deploy":
                    good[name] = Reply(visits, {}, None, {}, since)
                else:
                    good[name] = check(envelope, call, visits, since, model, sums, held, self.setup.dtype)
            except wire.WireError as problem:
                bad[name] = problem
            except Exception as problem:
                bad[name] = wire.WireError(f"reply rejected: {explain(problem)}")
        if good and not held:
            key = f"{call.phase}/{kind}/{','.join(metric.name for metric in metrics)}"
            usual = usual_shape(list(good.values()), call, model, bool(metrics), self._shapes.get(key))
            if sum(reply.shape() == usual for reply in good.values()) > 1:  # one node alone fixes nothing
                self._shapes[key] = usual
            for name in [name for name, reply in good.items() if reply.shape() != usual]:
                shape = words(good.pop(name).shape())
                bad[name] = wire.WireError(
                    f"reply rejected: its shape differs from that of other nodes ({shape})"
                )
        return good, bad

    def joined_up(
        self,
        call: Call,
        visits: Visits,
        asked: Tensor,
        mine: dict[str, Tensor],
        good: dict[str, Reply],
        why: dict[int, str],
        forgot: list[Tensor],
        scores: bool,
    ) -> Answer:
        """Return the rows of all replies in the order of the visits."""
        gone = torch.cat(forgot) if forgot else None
        came = torch.zeros(len(asked), dtype=torch.bool)
        for name in good:
            came[mine[name]] = True
        if not good:
            return Answer({}, came=came, why=why, forgot=gone)
        good = dict(sorted(good.items(), key=lambda reply: int(mine[reply[0]][0])))  # not as they came
        places = torch.cat([mine[name] for name in good])
        order = places.argsort()
        in_order = bool((places[1:] > places[:-1]).all())  # models may be large: they are copied once
        parts = [reply.named for reply in good.values()]
        named = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        named = named if in_order else {name: value[order] for name, value in named.items()}
        encoded = next(iter(good.values())).encoded
        nth = None if visits.nth is None else visits.nth[came]
        unpacked = messages.unpack(self.setup.seed, call, asked[came], nth, named, encoded)
        mask = torch.cat([reply.mask() for reply in good.values()])[order]
        if not scores:  # scores have ranges of their own
            mask &= usable(named, int(came.sum()))
            mask &= self._plausible(call, named, self.place[asked[came]], mask)
            if not mask.all():
                self._note_wild(call.phase, came, mask, mine, good)
        everyone = bool(came.all()) and not why and gone is None
        return Answer(
            named,
            None if mask.all() else mask,
            unpacked,
            None if everyone else came,
            why,
            gone,
        )

    def _plausible(self, call: Call, named: dict[str, Tensor], owner: Tensor, mask: Tensor) -> Tensor:
        """Return which visits are of nodes whose numbers are not far larger than those of the others."""
        tensors = [
            value for value in (*call.shared.values(), *call.each.values()) if isinstance(value, Tensor)
        ]
        sent = max((float(max(value.max(), -value.min())) for value in tensors if value.numel()), default=0.0)
        usable_rows = named if bool(mask.all()) else {name: value[mask] for name, value in named.items()}
        ratios = excess(usable_rows, owner[mask], sent)
        fine = torch.ones_like(mask)
        for k, ratio in ratios.items():
            fine[(owner == k) & (ratio > TOO_LARGE)] = False
            if ratio > LARGE and (call.phase, k) not in self._noted:
                self._noted.add((call.phase, k))
                self.caller.note(
                    f"{self.places[k].name}: {call.phase} returned numbers {ratio:g} times those of the other nodes"
                )
        return fine

    def _note_wild(
        self, phase: str, came: Tensor, mask: Tensor, mine: dict[str, Tensor], good: dict[str, Reply]
    ) -> None:
        fine = came.clone()
        fine[came] = mask
        for name in good:
            count = int((~fine[mine[name]]).sum())
            if count:
                self.caller.note(
                    f"{name}: {phase} returned non-finite or too large values for {count} client(s)"
                )

    def _counts_fit(self, place: Place, split: str, rows: Tensor | None, at: Tensor) -> bool:
        """Return whether a node scored as many rows of its clients `at` as they have; note it if not."""
        if place.counts is None or rows is None or rows.shape != (len(at), 1):
            fit = False
        else:
            fit = torch.equal(rows.squeeze(-1).double(), place.counts[split][at].double())
        if not fit:
            self.caller.note(f"{place.name}: scores of another number of rows than it has; not used")
        return fit

    def _widths(self, metrics: Sequence[Metric]) -> dict[str, int]:
        """Return how many sums of each metric a client has."""
        model = self.setup.model
        return {metric.name: len(metric.no_rows(model.task, model.outputs or 1)) for metric in metrics}

    def _in_range(
        self, sums: dict[str, Tensor], metrics: Sequence[Metric], asked: Tensor
    ) -> dict[str, Tensor]:
        """Replace sums that give no possible value of a metric by NaN, and name the nodes that sent them."""
        for metric in metrics:
            fine = metric.in_range(sums[metric.name])
            for k in sorted(set(self.place[asked[~fine.squeeze(-1)]].tolist())):
                self.caller.note(
                    f"{self.places[k].name}: {metric.name} outside {metric.low:g} to {metric.high:g}; not used"
                )
            sums[metric.name] = torch.where(fine, sums[metric.name], torch.nan)
        return sums

    def _filled(self, answer: Answer, count: int, metrics: Sequence[Metric]) -> dict[str, Tensor]:
        """Return sums with a row for everybody: NaN where there is no answer."""
        values = {
            name: torch.full((count, width), torch.nan, dtype=self.setup.dtype)
            for name, width in self._widths(metrics).items()
        }
        values["rows"] = torch.zeros(count, 1, dtype=self.setup.dtype)
        came = torch.ones(count, dtype=torch.bool) if answer.came is None else answer.came
        for name, value in answer.named.items():
            if name in values and value.shape == values[name][came].shape:
                values[name][came] = value.to(self.setup.dtype)
        return values

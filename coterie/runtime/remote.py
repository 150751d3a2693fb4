"""The server's end of a federation across a network: it knows clients, sizes and answers, and no rows.

`Remote` offers what `Shard` offers, over any carrier of messages. A node that does not answer in time, or answers
with what cannot be used, is left out of the call by name; one that is back is noticed between rounds.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.models.base import Model
from coterie.models.metrics import main_metric
from coterie.runtime import messages, wire
from coterie.runtime.answers import Reply, Stamp, are_counts, check, usable, usual_shape, words
from coterie.runtime.post import Desk, Forgot, Late, Letter
from coterie.runtime.visits import Answer, Call, Visits

PATIENCE = 120.0  # seconds for a node to read its table
HELLO_LASTS = 1800.0  # seconds a greeting waits for a node that is away
HELLO_WAITS = 1.0  # seconds between rounds for an answer to a greeting that is on its way


@dataclass
class Place:
    """A node as the server sees it: its clients and the newest state whose answer has arrived."""

    name: str
    ids: Tensor
    clients: list[str]  # their names, in the order of `ids`, which is the node's own
    clusters: Tensor | None = None
    known: bool = False  # whether the sizes of its clients are known
    here: bool = False
    stamp: Stamp | None = None
    floor: Stamp | None = None
    greeting: str | None = None
    greeted: float = -math.inf


@dataclass
class Setup:
    """What nodes are told of a run once, and the server knows of all of them."""

    run: str
    roles: dict[str, Any]
    seed: int
    split: tuple[float, float, float]
    model: Model
    settings: dict[str, Any]  # algorithm, model description, preprocessor

    def header(self) -> dict[str, Any]:
        return {
            "kind": "open",
            "run": self.run,
            "roles": self.roles,
            "seed": self.seed,
            "split": list(self.split),
            "setup": self.settings,
        }


class Remote:
    """Clients on nodes, through messages. `place` [n] is the node of each client."""

    private = True

    def __init__(self, desk: Desk, places: list[Place], setup: Setup, n: int) -> None:
        self.desk, self.places, self.setup, self.n = desk, places, setup, n
        self.place = torch.full((n,), -1)
        self.position = torch.zeros(n, dtype=torch.long)
        for k, place in enumerate(places):
            self.place[place.ids] = k
            self.position[place.ids] = torch.arange(len(place.ids))
        self._shapes: dict[str, Any] = {}

    def fresh(self, seed: int | None = None) -> Remote:
        places = [replace(place, stamp=None, floor=None) for place in self.places]
        return Remote(self.desk, places, self.setup, self.n)

    def run(self, call: Call, visits: Visits, welcome: dict[str, Any] | None = None) -> Answer:
        return self._ask("call", call, visits, welcome, lasting=True)

    def evaluate(
        self, call: Call, visits: Visits, split: str, welcome: dict[str, Any] | None = None
    ) -> Answer:
        """Metrics; a client whose node is away has NaN."""
        answer = self._ask("call", call, visits, welcome, split=split)
        return Answer(self._filled(answer, self.n if visits.at is None else len(visits.at)))

    def deploy(self, call: Call, visits: Visits, welcome: dict[str, Any] | None = None) -> Answer:
        """Let every node keep its models; the answer is the round they are kept under, -1 where a node is away."""
        answer = self._ask("deploy", call, visits, welcome)
        count = self.n if visits.at is None else len(visits.at)
        came = torch.ones(count, dtype=torch.bool) if answer.came is None else answer.came
        return Answer({"": torch.where(came, call.round, -1).unsqueeze(-1)})

    def score(self, weights: Tensor, split: str) -> dict[str, Tensor]:
        """Metrics of the models kept under a round [n, 1]."""
        letters: dict[str, Letter] = {}
        for place in self._here():
            rounds = weights[place.ids].flatten()
            if (rounds >= 0).any():
                letters[place.name] = (self._about("score", round=int(rounds.max()), split=split), {})
        parts: dict[str, Tensor] = self._filled(Answer({}), self.n)
        for name, reply in self.desk.ask(letters).items():
            place = self._named(name)
            if isinstance(reply, wire.WireError):
                self._lose(place, reply)
                continue
            for metric, value in messages.under("value.", reply[1]).items():
                if metric in parts and value.shape == (len(place.ids), 1):
                    parts[metric][place.ids] = value.to(torch.float64)
        return parts

    def finish(self, t: int, common: Tensor | None) -> list[str]:
        """Let the nodes write the models of round t for use; who did."""
        tensors = {} if common is None else {"common": common}
        letters = {place.name: (self._about("finish", round=t), tensors) for place in self._here()}
        answers = self.desk.ask(letters)
        return [name for name, reply in answers.items() if not isinstance(reply, wire.WireError)]

    def threads(self, batch: int, participation: float = 1.0) -> int:
        return 1

    def stack_size(self, batch: int) -> int:
        return 0

    def data_tensors(self) -> tuple[Tensor, ...]:
        return (self.place,)

    def snapshot(self) -> dict[str, Tensor]:
        """Which state of each node belongs to this checkpoint; older ones are not needed from now on."""
        for place in self.places:
            place.floor = place.stamp
        return {"stamps": torch.tensor([place.stamp or (-1, -1) for place in self.places])}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        for place, (t, call) in zip(self.places, tensors["stamps"].tolist(), strict=True):
            place.stamp = place.floor = (t, call) if t >= 0 else None

    def open(self, names: Collection[str], deadline: float) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Get nodes ready for the run; ids and numbers of rows of those whose sizes were not known."""
        letters = {}
        for place in self.places:
            if place.name in names:
                tensors = {"ids": place.ids}
                if place.clusters is not None:
                    tensors["clusters"] = place.clusters
                letters[place.name] = ({**self.setup.header(), "clients": place.clients}, tensors)
        found = []
        for name, reply in self.desk.ask(letters, deadline).items():
            place = self._named(name)
            if isinstance(reply, wire.WireError):
                self._lose(place, reply)
                continue
            rows = messages.under("rows.", reply[1])
            if not are_counts(rows, len(place.ids)):
                self._lose(place, wire.WireError("sizes that cannot be read"))
                continue
            place.here = True
            self.desk.away.discard(place.name)
            if not place.known:
                place.known = True
                found.append((place.ids, rows))
        return found

    def joined(self) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Greet who is away, and let in who has answered a greeting."""
        away = [place for place in self.places if not place.here]
        if not away:
            return []
        tickets = {place.greeting: place for place in away if place.greeting is not None}
        back = []
        replies = self.desk.carrier.fetch(list(tickets), HELLO_WAITS) if tickets else {}
        for ticket, content in replies.items():
            place = tickets[ticket]
            place.greeting = None
            reply = self.desk.read(content, None)
            if not isinstance(reply, wire.WireError) and self._is_who(place, reply[0]):
                back.append(place)
        if back:
            self.desk.note(f"{', '.join(place.name for place in back)} is back")
        found = self.open([place.name for place in back], self.desk.deadline) if back else []
        self._greet([place for place in away if not place.here])
        return found

    def _greet(self, away: list[Place]) -> None:
        now = time.monotonic()
        stale = [place for place in away if place.greeting is None or now - place.greeted > HELLO_LASTS]
        header = {"kind": "hello", "run": self.setup.run, "roles": self.setup.roles}
        letters = {
            place.name: wire.encode({**header, "nonce": secrets.token_hex(12)}, {})
            for place in stale
            if now - place.greeted > 1.0
        }
        tickets = self.desk.carrier.send(letters, HELLO_LASTS) if letters else {}
        for place in stale:
            if place.name in tickets:
                place.greeting, place.greeted = tickets[place.name], now

    def _is_who(self, place: Place, header: dict[str, Any]) -> bool:
        told = header.get("told")
        if isinstance(told, dict) and told.get("clients") == place.clients:
            return True
        self.desk.note(f"{place.name} came with other clients than the federation has for it; left out")
        return False

    def _here(self) -> list[Place]:
        return [place for place in self.places if place.here]

    def _named(self, name: str) -> Place:
        return next(place for place in self.places if place.name == name)

    def _about(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "run": self.setup.run, **more}

    def _lose(self, place: Place, problem: wire.WireError) -> None:
        self.desk.note(f"{place.name} is left out: {problem}")
        if isinstance(problem, Late | Forgot):
            place.here = False
            self.desk.away.add(place.name)
        if isinstance(problem, Forgot):
            place.stamp = place.floor = None

    def _ask(
        self,
        kind: str,
        call: Call,
        visits: Visits,
        welcome: dict[str, Any] | None,
        lasting: bool = False,
        split: str = "",
    ) -> Answer:
        asked = torch.arange(self.n) if visits.at is None else visits.at
        where = self.place[asked]
        mine: dict[str, Tensor] = {}
        letters = {}
        why: dict[int, str] = {}
        for k, place in enumerate(self.places):
            rows = (where == k).nonzero().squeeze(-1)
            if not len(rows):
                continue
            if not place.here:
                why |= dict.fromkeys(asked[rows].tolist(), f"node {place.name} is away")
                continue
            header, tensors = messages.ask(
                call, visits, rows, self.position[asked[rows]], welcome, lasting, split
            )
            about = self._about(kind, since=place.stamp, floor=place.floor)
            mine[place.name], letters[place.name] = rows, ({**header, **about}, tensors)
        good, bad = self._sorted_out(call, self.desk.ask(letters), mine, kind, split)
        forgot = []
        for name, problem in bad.items():
            place = self._named(name)
            why |= dict.fromkeys(asked[mine[name]].tolist(), f"node {name}: {problem}")
            if isinstance(problem, Forgot):
                forgot.append(place.ids)
            self._lose(place, problem)
        if lasting:
            for name, reply in good.items():
                self._named(name).stamp = reply.stamp
        return self._joined_up(call, visits, asked, mine, good, why, forgot)

    def _sorted_out(
        self,
        call: Call,
        answers: dict[str, wire.WireError | Letter],
        mine: dict[str, Tensor],
        kind: str,
        split: str,
    ) -> tuple[dict[str, Reply], dict[str, wire.WireError]]:
        """Answers that can be used, and what is wrong with the others."""
        good: dict[str, Reply] = {}
        bad: dict[str, wire.WireError] = {}
        d = self.setup.model.d
        for name, letter in answers.items():
            visits, since = len(mine[name]), self._named(name).stamp
            try:
                if isinstance(letter, wire.WireError):
                    raise letter
                if kind == "deploy":
                    good[name] = Reply(visits, {}, None, {}, since)
                else:
                    good[name] = check(letter, call, visits, since, d)
            except wire.WireError as problem:
                bad[name] = problem
        if good:
            key = f"{call.phase}/{kind}/{bool(split)}"
            usual = usual_shape(list(good.values()), call, d, bool(split), self._shapes.get(key))
            self._shapes[key] = usual
            for name in [name for name, reply in good.items() if reply.shape() != usual]:
                shape = words(good.pop(name).shape())
                bad[name] = wire.WireError(f"values of another shape than those of the others ({shape})")
        return good, bad

    def _joined_up(
        self,
        call: Call,
        visits: Visits,
        asked: Tensor,
        mine: dict[str, Tensor],
        good: dict[str, Reply],
        why: dict[int, str],
        forgot: list[Tensor],
    ) -> Answer:
        """The rows of all answers in the order of the visits."""
        gone = torch.cat(forgot) if forgot else None
        came = torch.zeros(len(asked), dtype=torch.bool)
        for name in good:
            came[mine[name]] = True
        if not good:
            return Answer({}, came=came, why=why, forgot=gone)
        order = torch.cat([mine[name] for name in good]).argsort()
        parts = [reply.named for reply in good.values()]
        named = {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
        parcels = next(iter(good.values())).parcels
        nth = None if visits.nth is None else visits.nth[came]
        unpacked = messages.unpack(self.setup.seed, call, asked[came], nth, named, parcels)
        mask = torch.cat([reply.mask() for reply in good.values()])[order] & usable(named, int(came.sum()))
        if not mask.all():
            self._note_wild(call.phase, came, mask, mine, good)
        everyone = bool(came.all()) and not why
        return Answer(
            named,
            None if mask.all() else mask,
            unpacked,
            None if everyone else came,
            why,
            gone,
        )

    def _note_wild(
        self, phase: str, came: Tensor, mask: Tensor, mine: dict[str, Tensor], good: dict[str, Reply]
    ) -> None:
        fine = came.clone()
        fine[came] = mask
        for name in good:
            count = int((~fine[mine[name]]).sum())
            if count:
                self.desk.note(f"{name}: numbers of {count} client(s) in {phase} are not finite or too large")

    def _filled(self, answer: Answer, count: int) -> dict[str, Tensor]:
        """Metrics with a row for everybody: NaN where there is no answer."""
        values = {
            name: torch.full((count, 1), torch.nan, dtype=torch.float64)
            for name in ("loss", main_metric(self.setup.model.task))
        }
        values["rows"] = torch.zeros(count, 1, dtype=torch.float64)
        came = torch.ones(count, dtype=torch.bool) if answer.came is None else answer.came
        for name, value in answer.named.items():
            if name in values and value.shape == (int(came.sum()), 1):
                values[name][came] = value.to(torch.float64)
        return values

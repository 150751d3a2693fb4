"""Nodes that are still at work on an earlier call: what they were asked, and what they answer late."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.deploy import wire
from coterie.deploy.transport import Envelope, Forgot, Late, Posted
from coterie.engine.protocol import Call, LateReply, Visits

if TYPE_CHECKING:
    from coterie.deploy.remote import RemoteRuntime

LASTS = 3600.0  # seconds for which a message waits for a node that is slow


@dataclass(frozen=True)
class NodeTask:
    """What a node is at work on: the message, the call, all its visits, and which of them are the node's."""

    posted: Posted
    call: Call
    visits: Visits
    rows: Tensor


class AtWork:
    """The tasks of a federation's nodes, and the answers that came after the end of their round.

    Parameters
    ----------
    runtime
        The clients on nodes, which checks answers and knows the nodes.
    """

    def __init__(self, runtime: RemoteRuntime) -> None:
        self.runtime = runtime
        self.tasks: dict[str, NodeTask] = {}
        self.come: list[LateReply] = []
        self.forgot: list[Tensor] = []

    def __contains__(self, node: str) -> bool:
        return node in self.tasks

    def ask(
        self, call: Call, visits: Visits, envelopes: Mapping[str, Envelope], mine: Mapping[str, Tensor]
    ) -> dict[str, wire.WireError | Envelope]:
        """Send a call to nodes and wait until enough of them have answered it or an earlier one.

        Parameters
        ----------
        call, visits
            The call, and all its visits.
        envelopes, mine
            Message of each node, and which visits it is for.

        Returns
        -------
        dict of str
            What nodes answered to this call. The others are at work.
        """
        assert call.late is not None
        posted = self.runtime.caller.post(envelopes, LASTS)
        answers: dict[str, wire.WireError | Envelope] = {
            name: Late("not connected") for name in envelopes if name not in posted
        }
        for name, message in posted.items():
            self.tasks[name] = NodeTask(message, call, visits, mine[name])
        before = sum(len(reply.ids) for reply in self.come if reply.call.phase == call.phase)

        def enough(names: Collection[str]) -> bool:
            if call.late is None or call.late.buffer == 0:
                return posted.keys() <= set(names)
            return before + sum(len(self.tasks[name].rows) for name in names) >= call.late.buffer

        waiting = {name: task.posted for name, task in self.tasks.items()}
        for name, answer in self._collected(waiting, self.runtime.caller.deadline, enough).items():
            task = self.tasks.pop(name)
            if task.call is call:
                answers[name] = answer
            else:
                self._take(name, task, answer)
        for name, task in list(self.tasks.items()):
            age = call.round - task.call.round
            if age > call.late.staleness:
                self._give_up(name, f"no answer for {age} rounds")
        return answers

    def settle(self, limit: float) -> None:
        """Take the answers that are there, for the next call of their phase; wait for all if there is a limit."""
        if not self.tasks:
            return
        waiting = {name: task.posted for name, task in self.tasks.items()}
        for name, answer in self._collected(waiting, limit).items():
            self._take(name, self.tasks.pop(name), answer)
        if limit:
            for name in list(self.tasks):
                self._give_up(name, f"no answer within {limit:g} s")

    def pending(self, call: Call) -> Tensor | None:
        """Return which visits of a call are not answered yet [visits], or None."""
        rows = [task.rows for task in self.tasks.values() if task.call is call]
        if not rows:
            return None
        visits = next(task.visits for task in self.tasks.values() if task.call is call)
        found = torch.zeros(len(self.runtime.asked(visits)), dtype=torch.bool)
        found[torch.cat(rows)] = True
        return found

    def late(self, phase: str) -> tuple[LateReply, ...]:
        """Remove and return the late answers to calls of a phase."""
        found = tuple(reply for reply in self.come if reply.call.phase == phase)
        self.come = [reply for reply in self.come if reply.call.phase != phase]
        return found

    def forgotten(self) -> list[Tensor]:
        """Remove and return the clients of nodes that have lost what they kept."""
        found, self.forgot = self.forgot, []
        return found

    def _collected(
        self,
        waiting: Mapping[str, Posted],
        limit: float,
        enough: Callable[[Collection[str]], bool] = lambda names: False,
    ) -> dict[str, wire.WireError | Envelope]:
        caller = self.runtime.caller
        return caller.collect(waiting, limit, enough, parts=caller.deadline)

    def _take(self, name: str, task: NodeTask, answer: wire.WireError | Envelope) -> None:
        """Check a late answer as one in time is checked, and keep it for the next call of its phase."""
        runtime, place = self.runtime, self.runtime.named(name)
        good, bad = runtime.sorted_out(task.call, {name: answer}, {name: task.rows}, "call", ())
        if name in bad:
            if isinstance(bad[name], Forgot):
                self.forgot.append(place.ids)
            runtime.lose(place, bad[name])
            return
        place.stamp = good[name].stamp
        asked = runtime.asked(task.visits)
        found = runtime.joined_up(task.call, task.visits, asked, {name: task.rows}, good, {}, [], False)
        ids, named = asked[task.rows], found.named
        if found.good is not None:
            ids, named = ids[found.good], {key: value[found.good] for key, value in named.items()}
        if len(ids):
            self.come.append(LateReply(task.call, ids, named, found.encoded))

    def _give_up(self, name: str, why: str) -> None:
        """No longer wait for a node; it is asked again when it is heard of."""
        del self.tasks[name]
        self.runtime.lose(self.runtime.named(name), Late(why))

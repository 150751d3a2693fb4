"""Compute ahead what everybody was asked in the last round, while the server is busy with something else.

A call of a phase whose arguments are fields of the state, one row for each client, can be computed as soon as the
round begins, before the server asks for it. CoBo, for one, looks at pairs of clients first and asks for everybody's
gradient then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coterie._core import threads
from coterie.engine.client import Client
from coterie.engine.protocol import Call
from coterie.engine.state import State


@dataclass(frozen=True)
class Habit:
    """A call that came in the last round: its algorithm, phase and number, and the state field of each argument."""

    algorithm: Any
    phase: str
    call: int
    fields: dict[str, str]


class Prefetch:
    """One phase under way in a helper of the thread that trains.

    It changes no result: a reply is used if the very call it was computed for comes, and if nothing was kept.
    """

    def __init__(self, everybody: Callable[[Call], Client | None]) -> None:
        self._everybody = everybody
        self._round = -1
        self._state: State | None = None
        self._habit: Habit | None = None
        self._under_way: tuple[Call, Client, Callable[[], Any]] | None = None

    def begin_round(self, t: int, state: State | None) -> None:
        """Begin with the call that came in the round before, where a thread is free and the work is enough for it."""
        self._finish()
        follows, self._round, self._state = t == self._round + 1, t, state
        habit, self._habit = self._habit, None
        if habit is None or state is None or not follows or threads.spare_hands() < 2:
            return
        if not all(name in state for name in habit.fields.values()):
            return
        each = {name: getattr(state, field) for name, field in habit.fields.items()}
        call = Call(habit.algorithm, habit.phase, t, habit.call, {}, each)
        client = self._everybody(call)
        if client is not None:
            phase = getattr(habit.algorithm, habit.phase)
            self._under_way = call, client, threads.begun(lambda: phase(client, **each))

    def reply(self, call: Call, client: Client) -> Any:
        """Return what this call gives if it was computed ahead, else None; notice what may come again."""
        whole = client.whole and client._at is None and not call.shared and call.compress is None
        if whole and call.call > 0:
            self._notice(call)
        if self._under_way is None or self._under_way[0].phase != call.phase:
            return None
        begun = self._under_way[0]
        reply = self._finish()
        same = (call.algorithm, call.round, call.call) == (begun.algorithm, begun.round, begun.call)
        same = same and call.each.keys() == begun.each.keys()
        return reply if whole and same and all(call.each[k] is begun.each[k] for k in call.each) else None

    def _notice(self, call: Call) -> None:
        """Remember a call that was not the first of its round and whose arguments are fields of the state."""
        if self._state is None or call.round != self._round or not call.each:
            return
        known = {id(value): name for name, value in self._state.tensors().items()}
        if all(id(value) in known for value in call.each.values()):
            fields = {name: known[id(value)] for name, value in call.each.items()}
            self._habit = Habit(call.algorithm, call.phase, call.call, fields)

    def _finish(self) -> Any:
        """Wait for what is under way; None if there is nothing, if it failed, or if it kept something."""
        if self._under_way is None:
            return None
        _, client, finished = self._under_way
        self._under_way = None
        try:
            reply = finished()
        except Exception:  # the phase is run again when it is asked for, and raises then
            return None
        return None if client.written else reply

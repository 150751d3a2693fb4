"""What everybody will be asked later in a round, computed while the server is busy with something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from coterie.errors import CoterieError
from coterie.federation.client import Client
from coterie.runtime import workers
from coterie.runtime.visits import Call


class Early:
    """One phase under way in a helper of the thread that trains.

    Only replies that follow from what is sent are used: no random numbers, nothing put into `keep`.
    """

    def __init__(self) -> None:
        self._under_way: tuple[Call, Client, Callable[[], Any]] | None = None

    def begin(self, call: Call, client: Callable[[Callable[[], Tensor]], Client], products: int) -> None:
        """Begin with this call of everybody, whom `client` makes, where a thread is free and the work is enough for it.

        Not in the first round, which measures how networks are computed.
        """
        self._end()
        if call.round < 2 or workers.spare_hands() < 2 or products < workers.SHARED_PRODUCTS:
            return
        everybody, phase = client(_keys), getattr(call.algorithm, call.phase)
        self._under_way = call, everybody, workers.begun(lambda: phase(everybody, **call.each))

    def reply(self, call: Call, client: Client) -> Any:
        """What this call gives, if it is the one that was begun; else None."""
        if self._under_way is None or self._under_way[0].phase != call.phase:
            return None
        begun = self._under_way[0]
        reply = self._end()
        everybody = client.whole and client._at is None and call.round == begun.round
        same = call.each.keys() == begun.each.keys() and all(call.each[k] is begun.each[k] for k in call.each)
        return reply if everybody and same and not call.shared and call.compress is None else None

    def _end(self) -> Any:
        """Wait for what is under way; None if there is nothing or it came to nothing."""
        if self._under_way is None:
            return None
        _, client, end = self._under_way
        self._under_way = None
        try:
            reply = end()
        except Exception:  # it is raised again when the phase is asked for
            return None
        return None if client.written else reply


def _keys() -> Tensor:
    raise CoterieError("draws depend on the number of the call, which is not known yet")

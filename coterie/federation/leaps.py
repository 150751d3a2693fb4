"""Rounds taken at once: all clients as one stack, without a call for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from coterie.errors import CoterieError
from coterie.federation.client import Client
from coterie.federation.federation import Federation
from coterie.federation.ledger import Part


def together(fed: Federation, algorithm: Any) -> Client | None:
    """All clients as one stack; None where a call could turn out otherwise than for all alike.

    They must be in this process, have begun, fit into one stack, draw nothing, always answer and not lie.
    """
    shard, batch = fed.runtime, algorithm.batch
    if not getattr(shard, "leaps", False) or not fed.all_begun(algorithm) or fed.dropout or fed.byzantine:
        return None
    if shard.loop or shard.stack_size(batch) < fed.n or 0 < batch < shard.train.largest:
        return None
    return Client(shard, None, _no_draws, batch)


def settle(fed: Federation, client: Client, rounds: Sequence[int], traffic: Sequence[Part]) -> None:
    """Make what the clients of `together` keep lasting, and count the traffic that each of these rounds had."""
    for name, value in client.written.items():
        fed.runtime.store.write(name, None, value)
    fed.ledger.add_rounds(rounds, "train", traffic)


def visits(fed: Federation, algorithm: Any, phase: str, link: str) -> Part:
    """What a phase of all clients exchanges, as the algorithm declares it."""
    down, up = (
        (fed.n if floats else 0, fed.n * floats, fed.n * floats * fed.dtype.itemsize)
        for floats in algorithm.traffic(fed.d)[phase]
    )
    return Part(phase, link, down, up)


def _no_draws() -> Tensor:
    raise CoterieError("rounds that are taken at once draw nothing; take them one by one")

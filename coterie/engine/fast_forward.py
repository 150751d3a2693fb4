"""Help for algorithms that compute several rounds at once: all clients as one stack, without a call for each round."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.ledger import Traffic
from coterie.engine.protocol import FederatedAlgorithm


def stack(fed: Federation, algorithm: FederatedAlgorithm) -> Client | None:
    """Return all clients as one stack, or None where rounds must be run one by one.

    Rounds can be computed at once if the runtime supports it, all clients have begun and fit into one stack, and
    they draw no minibatches, never drop out and do not lie.
    """
    if not fed.runtime.capabilities.fast_forward:
        return None
    if not fed.all_begun(algorithm) or fed.dropout or fed.byzantine or not fed.aggregate.plain or fed.privacy:
        return None
    if fed.late is not None:
        return None
    return fed.runtime.stack(algorithm.batch)


def commit(fed: Federation, client: Client, rounds: Sequence[int], traffic: Sequence[Traffic]) -> None:
    """Keep what the clients of `stack` wrote, and add the traffic of each of these rounds to the ledger."""
    for name, value in client.written.items():
        fed.runtime.keep(name, value)
    fed.ledger.add_rounds(rounds, "train", traffic)


def declared_traffic(fed: Federation, algorithm: FederatedAlgorithm, phase: str, link: str) -> Traffic:
    """Return what a phase of all clients exchanges, as the algorithm declares it."""
    down, up = (
        (fed.n if floats else 0, fed.n * floats, fed.n * floats * fed.dtype.itemsize)
        for floats in algorithm.traffic_of(fed.model)[phase]
    )
    return Traffic(phase, link, down, up)

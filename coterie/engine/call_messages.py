"""Calls of a phase as JSON headers and named tensors, for clients that are not in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from coterie.engine.compressors import compressor
from coterie.engine.protocol import Call, FederatedAlgorithm, Sent, Visits
from coterie.models.metrics import Metric


def ask(
    call: Call,
    visits: Visits,
    mine: Tensor,
    at: Tensor | None,
    welcome: dict[str, Sent] | None = None,
    lasting: bool = False,
    split: str = "",
    metrics: Sequence[Metric] = (),
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return header and tensors of the message that asks a node or a worker for its visits of a call.

    Parameters
    ----------
    call, visits
        The call, and all its visits.
    mine
        Which of the visits go there, [k].
    at
        Positions of the visited clients there, [k]; None where the receiver knows them.
    welcome
        Arguments of `begin`, which the clients run first; None if they have begun.
    lasting
        Whether the clients keep what the phase puts into `keep`.
    split
        Score the deployed models on this split instead of returning values.
    metrics
        What is scored then.
    """
    tensors = {} if at is None else {"at": at}
    if visits.nth is not None:
        tensors["nth"] = visits.nth[mine]
    start = welcome or {}
    tensors |= {f"each.{name}": value[mine] for name, value in call.each.items()}
    tensors |= {f"shared.{name}": value for name, value in call.shared.items() if isinstance(value, Tensor)}
    tensors |= {f"welcome.{name}": value for name, value in start.items() if isinstance(value, Tensor)}
    header = {
        "algorithm": call.algorithm.name,
        "phase": call.phase,
        "round": call.round,
        "call": call.call,
        "numbers": {name: value for name, value in call.shared.items() if not isinstance(value, Tensor)},
        "begins": welcome is not None,
        "welcome_numbers": {name: value for name, value in start.items() if not isinstance(value, Tensor)},
        "lasting": lasting,
        "split": split,
        "metrics": [metric.name for metric in metrics],
        "compress": str(call.compress) if call.compress is not None else "",
    }
    return header, tensors


def read(
    algorithm: FederatedAlgorithm, header: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[Call, Visits, dict[str, Any] | None]:
    """Return the call, its visits and the arguments of `begin` that a message of `ask` holds."""
    call = Call(
        algorithm,
        header["phase"],
        header["round"],
        header["call"],
        {**header["numbers"], **under("shared.", tensors)},
        under("each.", tensors),
        compressor(header["compress"]) if header["compress"] else None,
    )
    welcome = {**header["welcome_numbers"], **under("welcome.", tensors)} if header["begins"] else None
    return call, Visits(tensors.get("at"), tensors.get("nth")), welcome


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

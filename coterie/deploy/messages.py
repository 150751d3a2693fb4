"""Calls of a phase and their answers as wire messages."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from coterie._core.errors import SettingError
from coterie.deploy import wire
from coterie.engine.compressors import compressor
from coterie.engine.encoding import Encoded, encoding_keys
from coterie.engine.local_runtime import LocalRuntime
from coterie.engine.protocol import Call, FederatedAlgorithm, Visits, visit_keys
from coterie.models.metrics import Metric, resolve


@functools.cache
def phases(algorithm: type[FederatedAlgorithm]) -> frozenset[str]:
    """Return what a node may run of an algorithm: the phases of which it says what they reveal."""
    return frozenset({"deploy", *algorithm.reveals, *(["begin"] if algorithm.begin is not None else [])})


def ask(
    call: Call,
    visits: Visits,
    mine: Tensor,
    at: Tensor,
    welcome: dict[str, Any] | None = None,
    lasting: bool = False,
    split: str = "",
    metrics: Sequence[Metric] = (),
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return header and tensors of the message that asks a node for its visits of a call.

    Parameters
    ----------
    call, visits
        The call, and all its visits.
    mine
        Which of the visits go to this node, [k].
    at
        Positions of the visited clients on the node, [k].
    welcome
        Arguments of `begin`, which the clients run first; None if they have begun.
    lasting
        Whether the clients keep what the phase puts into `keep`.
    split
        Score the deployed models on this split instead of returning values.
    metrics
        What is scored then.
    """
    tensors = {"at": at}
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


def run(
    runtime: LocalRuntime, algorithm: FederatedAlgorithm, header: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Run on a node what a message asks for.

    Parameters
    ----------
    runtime
        The node's clients.
    algorithm
        The algorithm that the node was opened with; a message cannot name another.
    header, tensors
        The message.

    Returns
    -------
    tuple of dict
        Header and tensors of the answer.

    Raises
    ------
    WireError
        The message names another algorithm, or what is not a phase of this one.
    """
    if header["algorithm"] != algorithm.name or header["phase"] not in phases(type(algorithm)):
        raise wire.WireError(f"{algorithm.name} has no phase {header['phase']!r}")
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
    visits = Visits(tensors.get("at"), tensors.get("nth"))
    if header["split"]:
        asked = named_metrics(runtime, header)
        answer = runtime.evaluate(call, visits, header["split"], asked, welcome)
    else:
        answer = runtime.run(call, visits, welcome, lasting=header["lasting"], packed=True)
    reply = {f"value.{name}": value for name, value in answer.named.items()}
    if answer.good is not None:
        reply["good"] = answer.good
    encoded = {
        name: [item.ordinal, item.length, wire.NAMES[item.dtype]] for name, item in answer.encoded.items()
    }
    return {"encoded": encoded}, reply


def named_metrics(runtime: LocalRuntime, header: dict[str, Any]) -> list[Metric]:
    """Return the metrics that a message names, from this process's registry."""
    try:
        return [resolve(str(name), runtime.model.task) for name in header["metrics"]]
    except SettingError as problem:
        raise wire.WireError(str(problem)) from None


def unpack(
    seed: int,
    call: Call,
    asked: Tensor,
    nth: Tensor | None,
    named: dict[str, Tensor],
    sent: dict[str, tuple[int, int, str]],
) -> dict[str, Encoded]:
    """Decode, in `named`, what came compressed from the visits to `asked`; return what each value cost."""
    encoded: dict[str, Encoded] = {}
    for name, (ordinal, length, dtype_name) in sent.items():
        one, packed, dtype = call.compress, named[name], wire.DTYPES[dtype_name]
        assert one is not None
        keys = visit_keys(seed, call, asked, nth)
        named[name] = one.decode(packed, encoding_keys(keys, ordinal), length, dtype)
        encoded[name] = Encoded(ordinal, length, dtype, one.floats(length), packed.shape[-1])
    return encoded


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

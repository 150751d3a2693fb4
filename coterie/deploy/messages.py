"""What a node makes of a call of a phase, and what the server makes of its answer."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from coterie._core.errors import SettingError
from coterie.deploy import wire
from coterie.engine.call_messages import ask as ask
from coterie.engine.call_messages import read
from coterie.engine.call_messages import under as under
from coterie.engine.encoding import Encoded, encoding_keys
from coterie.engine.local_runtime import LocalRuntime
from coterie.engine.protocol import Call, FederatedAlgorithm, visit_keys
from coterie.models.metrics import Metric, resolve


@functools.cache
def phases(algorithm: type[FederatedAlgorithm]) -> frozenset[str]:
    """Return what a node may run of an algorithm: the phases of which it says what they reveal."""
    return frozenset({"deploy", *algorithm.reveals, *(["begin"] if algorithm.begin is not None else [])})


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
    call, visits, welcome = read(algorithm, header, tensors)
    if header["split"]:
        asked = named_metrics(runtime, header)
        answer = runtime.evaluate(call, visits, header["split"], asked, welcome)
    elif header["phase"] == "deploy":
        answer = runtime.deploy(call, visits, welcome)
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

"""What server and nodes say to each other about one call of a phase, as wire messages."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from coterie.federation.compressors import compressor
from coterie.federation.parcels import Parcel, parcel_keys
from coterie.runtime import wire
from coterie.runtime.shard import Shard
from coterie.runtime.visits import Call, Visits, visit_keys

SERVER_SIDE = {
    "start",
    "round",
    "leap",
    "handout",
    "common",
    "observe",
    "traffic",
    "replace",
    "settings",
    "from_theory",
    "mixture",
}


def phases(algorithm: Any) -> set[str]:
    """The allow-list: public methods that are not the server's."""
    return {
        name
        for name in dir(type(algorithm))
        if not name.startswith("_") and name not in SERVER_SIDE and callable(getattr(type(algorithm), name))
    }


def ask(
    call: Call,
    visits: Visits,
    mine: Tensor,
    at: Tensor,
    welcome: dict[str, Any] | None = None,
    lasting: bool = False,
    split: str = "",
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of the visits `mine` of a call, to clients at the positions `at` of their node."""
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
        "compress": str(call.compress) if call.compress is not None else "",
    }
    return header, tensors


def run(
    shard: Shard, algorithm: Any, header: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Run what was asked on these clients; header and tensors of the answer."""
    if header["algorithm"] != algorithm.name or header["phase"] not in phases(algorithm):
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
        answer = shard.evaluate(call, visits, header["split"], welcome)
    else:
        answer = shard.run(call, visits, welcome, lasting=header["lasting"], packed=True)
    reply = {f"value.{name}": value for name, value in answer.named.items()}
    if answer.good is not None:
        reply["good"] = answer.good
    parcels = {
        name: [parcel.ordinal, parcel.length, wire.NAMES[parcel.dtype]]
        for name, parcel in answer.parcels.items()
    }
    return {"parcels": parcels}, reply


def unpack(
    seed: int,
    call: Call,
    asked: Tensor,
    nth: Tensor | None,
    named: dict[str, Tensor],
    sent: dict[str, tuple[int, int, str]],
) -> dict[str, Parcel]:
    """Decode, in `named`, what came compressed from the visits to `asked`."""
    parcels: dict[str, Parcel] = {}
    for name, (ordinal, length, dtype_name) in sent.items():
        one, packed, dtype = call.compress, named[name], wire.DTYPES[dtype_name]
        assert one is not None
        keys = visit_keys(seed, call, asked, nth)
        named[name] = one.decode(packed, parcel_keys(keys, ordinal), length, dtype)
        parcels[name] = Parcel(ordinal, length, dtype, one.floats(length), packed.shape[-1])
    return parcels


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

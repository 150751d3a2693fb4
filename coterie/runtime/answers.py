"""Is an answer what was asked for? A node may be broken or hostile, and the server goes on either way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.federation.client import all_finite
from coterie.runtime import messages, wire
from coterie.runtime.post import Letter
from coterie.runtime.visits import Call

SPARE_BYTES = 1 << 20  # what an answer may weigh beyond twice what is expected of its phase

Stamp = tuple[int, int]  # the round and call that left a state


@dataclass(frozen=True)
class Reply:
    """One node's answer to a call, checked as far as one can alone."""

    visits: int
    named: dict[str, Tensor]
    good: Tensor | None
    parcels: dict[str, Any]
    stamp: Stamp | None

    def shape(self) -> Any:
        values = ((name, str(value.dtype), tuple(value.shape[1:])) for name, value in self.named.items())
        return tuple(sorted(values)), tuple(sorted((name, tuple(p)) for name, p in self.parcels.items()))

    def mask(self) -> Tensor:
        return torch.ones(self.visits, dtype=torch.bool) if self.good is None else self.good


def usable(named: dict[str, Tensor], count: int) -> Tensor:
    """Which rows are finite, and small enough to be squared."""
    mask = torch.ones(count, dtype=torch.bool)
    for value in named.values():
        if value.is_floating_point():
            limit = math.sqrt(torch.finfo(value.dtype).max)
            if not all_finite([value]) or bool((value.abs() > limit).any()):
                mask &= (value.abs() <= limit).reshape(count, -1).all(1)
    return mask


def _is_stamp(at: Any) -> bool:
    return isinstance(at, list) and len(at) == 2 and all(isinstance(part, int) for part in at)


def _are_parcels(parcels: Any, call: Call, tensors: dict[str, Tensor]) -> bool:
    """Whether what is said to be compressed is there and has the size it must have."""
    if not isinstance(parcels, dict) or (parcels and call.compress is None):
        return False
    for name, told in parcels.items():
        value = tensors.get(f"value.{name}")
        if value is None or value.dtype != torch.uint8 or not isinstance(told, list) or len(told) != 3:
            return False
        ordinal, length, dtype = told
        if not isinstance(ordinal, int) or not isinstance(length, int) or dtype not in wire.DTYPES:
            return False
        assert call.compress is not None
        if length < 1 or value.shape[-1] != call.compress.size(length, wire.DTYPES[dtype]):
            return False
    return True


def are_counts(rows: dict[str, Tensor], count: int) -> bool:
    return rows.keys() == {"train", "validation", "test"} and all(
        value.dtype == torch.int64 and value.shape == (count,) and bool((value >= 0).all())
        for value in rows.values()
    )


def _floats(shape: Any) -> int:
    return sum(math.prod(part) for _, _, part in shape[0])


def check(letter: Letter, call: Call, visits: int, since: Stamp | None, d: int) -> Reply:
    """A node's answer to a call; WireError says why it cannot be used."""
    header, tensors = letter
    parcels, at = header.get("parcels"), header.get("at")
    stamp = (int(at[0]), int(at[1])) if isinstance(at, list) and _is_stamp(at) else None
    if stamp not in (since, (call.round, call.call)):
        raise wire.WireError("the answer belongs to another call")
    if not isinstance(parcels, dict) or not _are_parcels(parcels, call, tensors):
        raise wire.WireError("compressed values that cannot be read")
    declared = max(call.algorithm.traffic(d).get(call.phase, (0, 0))[1], 4 * d + 64)
    size = sum(value.numel() * value.element_size() for value in tensors.values())
    if size > SPARE_BYTES + 2 * visits * declared * 8:
        raise wire.WireError(f"{size} bytes, far more than {call.phase} sends")
    named, good = messages.under("value.", tensors), tensors.get("good")
    if any(value.dim() == 0 or len(value) != visits for value in named.values()):
        raise wire.WireError(f"values with another number of rows than the {visits} visits")
    if good is not None and (good.dtype != torch.bool or good.shape != (visits,)):
        raise wire.WireError("a list of good visits that cannot be read")
    return Reply(visits, named, good, parcels, stamp)


def usual_shape(replies: list[Reply], call: Call, d: int, scores: bool, before: Any) -> Any:
    """Names, types and shapes as in earlier rounds, else as the phase declares, else as most clients have them."""
    votes: dict[Any, int] = {}
    for reply in replies:
        votes[reply.shape()] = votes.get(reply.shape(), 0) + reply.visits
    declared = call.algorithm.traffic(d).get(call.phase, (0, 0))[1]
    counts = declared > 0 and not scores and call.compress is None

    def rank(shape: Any) -> tuple[bool, bool, int]:
        return shape == before, not counts or _floats(shape) == declared, votes[shape]

    return max(votes, key=rank)


def words(shape: Any) -> str:
    """A shape for a log."""
    return ", ".join(f"{name or 'value'} {list(part)} {kind}" for name, kind, part in shape[0]) or "nothing"

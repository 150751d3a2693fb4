"""What crosses between server and clients: a call of a phase, who is visited, and what they answer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coterie.federation import randomness
from coterie.federation.compressors import Compressor
from coterie.federation.parcels import Parcel


@dataclass(frozen=True)
class Call:
    """One call of a phase: what to run, when, and what was sent. Tensors in `each` have a row per visit."""

    algorithm: Any
    phase: str
    round: int
    call: int
    shared: dict[str, Any]
    each: dict[str, Tensor]
    compress: Compressor | None = None


@dataclass(frozen=True)
class Visits:
    """Who is visited: positions in the shard (None: everybody, once), and which visit of the call it is.

    `repeats` is `nth` or counts it when somebody asks; `coming` tells who will be visited in a later round, as far as
    that can be known.
    """

    at: Tensor | None
    repeats: Tensor | Callable[[], Tensor | None] | None = None
    coming: Callable[[int], Tensor] | None = None

    @functools.cached_property
    def nth(self) -> Tensor | None:
        """How many visits of the call to the same client are before each; None where nobody is visited twice."""
        return self.repeats() if callable(self.repeats) else self.repeats


@dataclass(frozen=True)
class Answer:
    """Named values with a row per visit, which visits were good (None: all), and what was sent compressed.

    Values are tensors; those of one stack that is not sent anywhere may be models that are `Unwritten`.

    Across a network some visits are not answered at all: `came` [visits] marks those that are (None: all), the
    other fields have rows for them only, `why` tells what kept the other clients, and `forgot` are clients that
    have lost what they kept and must begin again.
    """

    named: dict[str, Any]
    good: Tensor | None = None
    parcels: dict[str, Parcel] = field(default_factory=dict)
    came: Tensor | None = None
    why: dict[int, str] = field(default_factory=dict)
    forgot: Tensor | None = None


def visit_keys(seed: int, call: Call, ids: Tensor, nth: Tensor | None) -> Tensor:
    """The coordinates of every visit of a call as hash keys, which client and server can both compute."""
    base = randomness.key(seed, call.phase, call.round, call.call)
    keys = randomness.fold(base, ids)
    return keys if nth is None else torch.where(nth > 0, randomness.key(keys, nth), keys)

"""What a phase returns on its way through a compressor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.errors import SettingError
from coterie.federation import randomness
from coterie.federation.compressors import Codes, Compressor

if TYPE_CHECKING:
    from coterie.federation.client import Client


@dataclass(frozen=True)
class Parcel:
    """A compressed value: which compression of its visit it was, its length and dtype, and what it costs."""

    ordinal: int
    length: int
    dtype: torch.dtype
    floats: int
    size: int
    pack: Callable[[], Tensor] | None = field(default=None, repr=False, compare=False)

    @property
    def bytes(self) -> Tensor:
        """uint8 [..., size], made when a wire needs it."""
        assert self.pack is not None
        return self.pack()


@dataclass
class Sealer:
    """Compresses for the clients of one stack during one phase, and remembers what it compressed."""

    compressor: Compressor | None = None
    phase: str = ""
    given: list[Tensor] = field(default_factory=list)
    sent: list[tuple[Tensor, Parcel]] = field(default_factory=list)

    def compress(self, client: Client, value: Tensor) -> Tensor:
        """What the server will decode of `value` [..., length]."""
        one = self.compressor
        if one is None:
            return value
        one.check(value.shape[-1])
        ordinal = len(self.sent)
        keys = parcel_keys(client.keys, ordinal)
        self.given.append(value)
        total = value
        if one.remembers:
            error = f"error of {self.phase} {ordinal}"
            total = value + client.kept_or_zero(error, value)
        codes = one.codes(total, keys)
        decoded = one.value(codes, keys, value.shape[-1])
        if one.remembers:
            setattr(client.keep, error, total - decoded)
        self.sent.append((decoded, self._parcel(ordinal, value, codes)))
        return decoded

    def seal(self, client: Client, named: dict[str, Tensor]) -> dict[str, Parcel]:
        """Compress the vectors of a reply that the phase has not compressed itself; changes `named`."""
        parcels: dict[str, Parcel] = {}
        for name, value in named.items():
            if not value.is_floating_point() or value.dim() <= len(client.lead) or value.shape[-1] == 1:
                continue
            done = [parcel for decoded, parcel in self.sent if decoded is value]
            if not done:
                if value.dim() != len(client.lead) + 1:
                    raise SettingError(
                        f"phase {self.phase!r}: {name!r} has shape {tuple(value.shape)}; only vectors, with one "
                        "axis after the clients', can be compressed"
                    )
                named[name] = self.compress(client, value)
                done = [self.sent[-1][1]]
            parcels[name] = done[0]
        return parcels

    def _parcel(self, ordinal: int, value: Tensor, codes: Codes) -> Parcel:
        one, length = self.compressor, value.shape[-1]
        assert one is not None
        size = one.size(length, value.dtype)
        return Parcel(ordinal, length, value.dtype, one.floats(length), size, lambda: one.pack(codes))


def parcel_keys(visits: Tensor, ordinal: int) -> Tensor:
    """Keys of the random choices of a visit's compressions."""
    return randomness.fold(randomness.fold(visits, "compress"), ordinal)

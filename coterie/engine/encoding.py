"""Compress what a phase returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie._core import randomness
from coterie._core.errors import SettingError
from coterie.engine.compressors import Codes, Compressor

if TYPE_CHECKING:
    from coterie.engine.client import Client


@dataclass(frozen=True)
class Encoded:
    """A compressed value: which compression of its visit it is, its length and dtype, and its cost."""

    ordinal: int
    length: int
    dtype: torch.dtype
    floats: int
    size: int
    pack: Callable[[], Tensor] | None = field(default=None, repr=False, compare=False)

    @property
    def bytes(self) -> Tensor:
        """The bytes to send, uint8 [..., size], packed when a transport needs them."""
        assert self.pack is not None
        return self.pack()


@dataclass
class Encoder:
    """Compresses for the clients of one stack during one phase, and remembers what it compressed."""

    compressor: Compressor | None = None
    phase: str = ""
    given: list[Tensor] = field(default_factory=list)
    sent: list[tuple[Tensor, Encoded]] = field(default_factory=list)

    def compress(self, client: Client, value: Tensor) -> Tensor:
        """Return what the server will decode of `value` [..., length]."""
        one = self.compressor
        if one is None:
            return value
        one.check(value.shape[-1])
        ordinal = len(self.sent)
        keys = encoding_keys(client.keys, ordinal)
        self.given.append(value)
        total = value
        if one.remembers:
            error = f"error of {self.phase} {ordinal}"
            total = value + client.kept_or_zero(error, value)
        codes = one.codes(total, keys)
        decoded = one.value(codes, keys, value.shape[-1])
        if one.remembers:
            setattr(client.keep, error, total - decoded)
        self.sent.append((decoded, self._encoded(ordinal, value, codes)))
        return decoded

    def encode_reply(self, client: Client, named: dict[str, Tensor]) -> dict[str, Encoded]:
        """Compress the vectors of a reply that the phase has not compressed itself; `named` is changed in place."""
        encoded: dict[str, Encoded] = {}
        for name, value in named.items():
            if not value.is_floating_point() or value.dim() <= len(client.lead) or value.shape[-1] == 1:
                continue
            done = [item for decoded, item in self.sent if decoded is value]
            if not done:
                if value.dim() != len(client.lead) + 1:
                    raise SettingError(
                        f"phase {self.phase!r}: {name!r} has shape {tuple(value.shape)}; only vectors, with one "
                        "axis after the clients', can be compressed"
                    )
                named[name] = self.compress(client, value)
                done = [self.sent[-1][1]]
            encoded[name] = done[0]
        return encoded

    def _encoded(self, ordinal: int, value: Tensor, codes: Codes) -> Encoded:
        one, length = self.compressor, value.shape[-1]
        assert one is not None
        size = one.size(length, value.dtype)
        return Encoded(ordinal, length, value.dtype, one.floats(length), size, lambda: one.pack(codes))


def encoding_keys(visits: Tensor, ordinal: int) -> Tensor:
    """Return the keys of the random choices of compression number `ordinal` of each visit."""
    return randomness.fold(randomness.fold(visits, "compress"), ordinal)

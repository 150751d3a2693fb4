"""Compressors: what a client sends instead of a vector, down to the bytes.

A compressor turns a vector x [..., d] into C(x) by way of *codes*, a few small tensors that pack into bytes without
loss, so that the server decodes exactly what the client computed. Random choices come from keys that both sides know
and cost nothing to send. An unbiased compressor has E C(x) = x and E|C(x) - x|^2 <= omega |x|^2; a biased one adds the
error of a message to the client's next one (error feedback) unless that is switched off.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie._core import randomness
from coterie._core.errors import SettingError

Codes = tuple[Tensor, ...]
WORD = 32  # bits of codes that count as one float


@dataclass(frozen=True)
class Compressor:
    """Base class: compress vectors along the last axis.

    `str(c)` is the text that `compressor` reads. Subclasses say what their codes are and how they pack into bytes.
    """

    unbiased: ClassVar[bool] = True

    @property
    def remembers(self) -> bool:
        """Whether the error of a message is added to the client's next one."""
        return False

    def omega(self, d: int) -> float:
        """Return the variance factor of an unbiased compressor for vectors of length d."""
        raise SettingError(f"{self} is biased, so it has no omega; theory needs an unbiased compressor")

    def delta(self, d: int) -> float:
        """Return the contraction of a biased compressor for vectors of length d: |C(x) - x|^2 <= (1 - delta) |x|^2."""
        raise SettingError(f"{self} is not a contraction; error feedback needs top-K or sign")

    def floats(self, d: int) -> int:
        """Return how many numbers are sent for a vector of length d; codes count one for every 32 bits, rounded up."""
        raise NotImplementedError

    def size(self, d: int, dtype: torch.dtype) -> int:
        """Return how many bytes are sent for a vector of length d."""
        raise NotImplementedError

    def check(self, d: int) -> None:
        """Raise a SettingError for a length that this compressor cannot handle."""

    def codes(self, x: Tensor, keys: Tensor) -> Codes:
        """Return the codes to send for x [..., d]; `keys` [...] decide random choices."""
        raise NotImplementedError

    def value(self, codes: Codes, keys: Tensor, d: int) -> Tensor:
        """Return C(x) [..., d] from its codes."""
        raise NotImplementedError

    def pack(self, codes: Codes) -> Tensor:
        """Return codes as bytes, uint8 [..., size]."""
        raise NotImplementedError

    def unpack(self, packed: Tensor, d: int, dtype: torch.dtype) -> Codes:
        """Return the codes that `pack` was given."""
        raise NotImplementedError

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """Return C(x)."""
        self.check(x.shape[-1])
        return self.value(self.codes(x, keys), keys, x.shape[-1])

    def encode(self, x: Tensor, keys: Tensor) -> Tensor:
        """Return C(x) as bytes, uint8 [..., size]."""
        self.check(x.shape[-1])
        return self.pack(self.codes(x, keys))

    def decode(self, packed: Tensor, keys: Tensor, d: int, dtype: torch.dtype) -> Tensor:
        """Return C(x) from its bytes."""
        return self.value(self.unpack(packed, d, dtype), keys, d)


@dataclass(frozen=True)
class NoCompression(Compressor):
    """Send everything: C(x) = x; omega = 0, d floats."""

    def __str__(self) -> str:
        return "identity"

    def omega(self, d: int) -> float:
        return 0.0

    def delta(self, d: int) -> float:
        return 1.0

    def floats(self, d: int) -> int:
        return d

    def size(self, d: int, dtype: torch.dtype) -> int:
        return d * dtype.itemsize

    def codes(self, x: Tensor, keys: Tensor) -> Codes:
        return (x,)

    def value(self, codes: Codes, keys: Tensor, d: int) -> Tensor:
        return codes[0]

    def pack(self, codes: Codes) -> Tensor:
        return _to_bytes(codes[0])

    def unpack(self, packed: Tensor, d: int, dtype: torch.dtype) -> Codes:
        return (_from_bytes(packed, dtype),)


@dataclass(frozen=True)
class RandK(Compressor):
    """Keep k random coordinates, times d/k; omega = d/k - 1, k floats, since both sides hash the positions."""

    k: int

    def __str__(self) -> str:
        return f"rand-{self.k}"

    def check(self, d: int) -> None:
        _check_kept(self, self.k, d)

    def omega(self, d: int) -> float:
        self.check(d)
        return d / self.k - 1.0

    def floats(self, d: int) -> int:
        return self.k

    def size(self, d: int, dtype: torch.dtype) -> int:
        return self.k * dtype.itemsize

    def positions(self, keys: Tensor, d: int) -> Tensor:
        """Return the coordinates kept, [..., k]: where the hashes of 0..d-1 are smallest."""
        return randomness.slots(keys, d).topk(self.k, largest=False).indices

    def codes(self, x: Tensor, keys: Tensor) -> Codes:
        return (x.gather(-1, self.positions(keys, x.shape[-1])),)

    def value(self, codes: Codes, keys: Tensor, d: int) -> Tensor:
        kept = codes[0] * (d / self.k)
        return kept.new_zeros(*kept.shape[:-1], d).scatter(-1, self.positions(keys, d), kept)

    def pack(self, codes: Codes) -> Tensor:
        return _to_bytes(codes[0])

    def unpack(self, packed: Tensor, d: int, dtype: torch.dtype) -> Codes:
        return (_from_bytes(packed, dtype),)


@dataclass(frozen=True)
class TopK(Compressor):
    """Keep the k largest coordinates and their positions (2k floats); biased, |C(x) - x|^2 <= (1 - k/d)|x|^2."""

    k: int
    feedback: bool = True

    unbiased: ClassVar[bool] = False

    @property
    def remembers(self) -> bool:
        return self.feedback

    def __str__(self) -> str:
        return f"top-{self.k}{'' if self.feedback else '-plain'}"

    def check(self, d: int) -> None:
        _check_kept(self, self.k, d)

    def delta(self, d: int) -> float:
        self.check(d)
        return self.k / d

    def floats(self, d: int) -> int:
        return 2 * self.k

    def size(self, d: int, dtype: torch.dtype) -> int:
        return self.k * (dtype.itemsize + 4)

    def codes(self, x: Tensor, keys: Tensor) -> Codes:
        at = x.abs().topk(self.k).indices.sort().values
        return x.gather(-1, at), at.to(torch.int32)

    def value(self, codes: Codes, keys: Tensor, d: int) -> Tensor:
        kept, at = codes
        return kept.new_zeros(*kept.shape[:-1], d).scatter(-1, at.long(), kept)

    def pack(self, codes: Codes) -> Tensor:
        return torch.cat([_to_bytes(part) for part in codes], -1)

    def unpack(self, packed: Tensor, d: int, dtype: torch.dtype) -> Codes:
        cut = self.k * dtype.itemsize
        return _from_bytes(packed[..., :cut], dtype), _from_bytes(packed[..., cut:], torch.int32)


@dataclass(frozen=True)
class Natural(Compressor):
    """Round |x_j| at random to the power of two below or above (Horvath et al. 2019); omega = 1/8, 9 bits.

    The nine bits are a sign and the exponent of a float32; what is smaller than 2^-126 becomes 0 or 2^-126.
    """

    bits: ClassVar[int] = 9

    def __str__(self) -> str:
        return "natural"

    def omega(self, d: int) -> float:
        return 0.125

    def floats(self, d: int) -> int:
        return math.ceil(self.bits * d / WORD)

    def size(self, d: int, dtype: torch.dtype) -> int:
        return math.ceil(self.bits * d / 8)

    def codes(self, x: Tensor, keys: Tensor) -> Codes:
        part, power = torch.frexp(x.double().abs())
        draw = randomness.uniform(randomness.slots(keys, x.shape[-1]))
        exponent = (power - 1 + (draw < 2.0 * part - 1.0)).to(torch.int64)
        tiny = torch.where(draw < x.double().abs() * 2.0**126, 1, 0)
        code = torch.where(power - 1 < -126, tiny, exponent + 127)
        code = torch.where(x == 0, 0, code)
        code = torch.where(torch.isfinite(x) & (code < 255), code, 255)
        return (code + 256 * (x < 0), x.new_zeros(0))

    def value(self, codes: Codes, keys: Tensor, d: int) -> Tensor:
        code, like = codes
        exponent = code & 255
        size = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - 127)
        size = torch.where(exponent == 0, 0.0, torch.where(exponent == 255, torch.nan, size))
        return torch.where(code >= 256, -size, size).to(like.dtype)

    def pack(self, codes: Codes) -> Tensor:
        return _to_bits(codes[0], self.bits)

    def unpack(self, packed: Tensor, d: int, dtype: torch.dtype) -> Codes:
        return _from_bits(packed, self.bits, d), torch.zeros(0, dtype=dtype, device=packed.device)


@dataclass(frozen=True)
class Qsgd(Compressor):
    """Send the norm, and |x_j|/|x| rounded at random to a multiple of 1/s (Alistarh et al., NeurIPS 2017).

    omega = min(d/s^2, sqrt(d)/s); one float and d (1 + ceil(log2(s + 1))) bits.
    """

    s: int

    def __str__(self) -> str:
        return f"qsgd-{self.s}"

    @property
    def bits(self) -> int:
        """Bits per coordinate: a sign and a level."""
        return 1 + self.s.bit_length()

    def omega(self, d: int) -> float:
        return min(d / self.s**2, math.sqrt(d) / self.s)

    def floats(self, d: int) -> int:
        return 1 + math.ceil(self.bits * d / WORD)

    def size(self, d: int, dtype: torch.dtype) -> int:
        return dtype.itemsize + math.ceil(self.bits * d / 8)

    def codes(self, x: Tensor, keys: Tensor) -> Codes:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        draw = randomness.uniform(randomness.slots(keys, x.shape[-1]))
        share = torch.where(norm > 0, x.double().abs() / norm.double(), 0.0)
        level = torch.floor(self.s * share + draw).clamp(0, self.s).to(torch.int64)
        return norm, 2 * level + (x < 0)

    def value(self, codes: Codes, keys: Tensor, d: int) -> Tensor:
        norm, code = codes
        level = (code >> 1).to(norm.dtype) / self.s
        return norm * torch.where((code & 1) > 0, -level, level)

    def pack(self, codes: Codes) -> Tensor:
        return torch.cat([_to_bytes(codes[0]), _to_bits(codes[1], self.bits)], -1)

    def unpack(self, packed: Tensor, d: int, dtype: torch.dtype) -> Codes:
        cut = dtype.itemsize
        return _from_bytes(packed[..., :cut], dtype), _from_bits(packed[..., cut:], self.bits, d)


@dataclass(frozen=True)
class Sign(Compressor):
    """Send (|x|_1 / d) sign(x), with sign(0) = 1 (Karimireddy et al., ICML 2019); biased, one float and d bits."""

    feedback: bool = True

    unbiased: ClassVar[bool] = False

    @property
    def remembers(self) -> bool:
        return self.feedback

    def __str__(self) -> str:
        return f"sign{'' if self.feedback else '-plain'}"

    def delta(self, d: int) -> float:
        return 1.0 / d

    def floats(self, d: int) -> int:
        return 1 + math.ceil(d / WORD)

    def size(self, d: int, dtype: torch.dtype) -> int:
        return dtype.itemsize + math.ceil(d / 8)

    def codes(self, x: Tensor, keys: Tensor) -> Codes:
        return x.abs().mean(-1, keepdim=True), (x < 0).to(torch.int64)

    def value(self, codes: Codes, keys: Tensor, d: int) -> Tensor:
        scale, negative = codes
        return torch.where(negative > 0, -scale, scale)

    def pack(self, codes: Codes) -> Tensor:
        return torch.cat([_to_bytes(codes[0]), _to_bits(codes[1], 1)], -1)

    def unpack(self, packed: Tensor, d: int, dtype: torch.dtype) -> Codes:
        cut = dtype.itemsize
        return _from_bytes(packed[..., :cut], dtype), _from_bits(packed[..., cut:], 1, d)


FORMS = "identity, rand-K, top-K, top-K-plain, natural, qsgd-S, sign, sign-plain"


def compressor(text: str | Compressor) -> Compressor:
    """Return the compressor that a text names.

    Parameters
    ----------
    text
        One of identity, rand-K, top-K, top-K-plain, natural, qsgd-S, sign, sign-plain, with whole numbers K and S;
        "-plain" switches error feedback off. A compressor is returned as it is.

    Returns
    -------
    Compressor
        The compressor.

    Raises
    ------
    SettingError
        If there is no such compressor.

    Examples
    --------
    >>> from coterie.engine.compressors import compressor
    >>> compressor("rand-7").omega(112), compressor("qsgd-4").floats(112), str(compressor("top-3-plain"))
    (15.0, 15, 'top-3-plain')
    """
    if isinstance(text, Compressor):
        return text
    simple: dict[str, Compressor] = {
        str(one): one for one in (NoCompression(), Natural(), Sign(), Sign(feedback=False))
    }
    if text in simple:
        return simple[text]
    found = re.fullmatch(r"(rand|top|qsgd)-([1-9][0-9]{0,8})(-plain)?", text)
    if found is None or (found[3] and found[1] != "top"):
        raise SettingError(f"no compressor {text!r}; write one of {FORMS} (K and S whole numbers from 1)")
    number = int(found[2])
    if found[1] == "top":
        return TopK(number, feedback=not found[3])
    return RandK(number) if found[1] == "rand" else Qsgd(number)


def _check_kept(one: Compressor, k: int, d: int) -> None:
    if k > d:
        raise SettingError(f"{one} would keep {k} coordinates of a vector of {d}; choose k from 1 to {d}")


def _to_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _from_bytes(packed: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.clone(memory_format=torch.contiguous_format).view(dtype)


def _to_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack whole numbers below 2^bits one after the other, lowest bit first, into bytes [..., ceil(d bits / 8)]."""
    places = torch.arange(bits, device=codes.device)
    flat = ((codes.unsqueeze(-1) >> places) & 1).to(torch.uint8).flatten(-2)
    flat = torch.nn.functional.pad(flat, (0, -flat.shape[-1] % 8)).unflatten(-1, (-1, 8))
    weight = (1 << torch.arange(8, device=codes.device)).to(torch.uint8)
    packed: Tensor = (flat * weight).sum(-1, dtype=torch.uint8)
    return packed


def _from_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the `count` whole numbers that `_to_bits` packed."""
    places = torch.arange(8, device=packed.device, dtype=torch.uint8)
    flat = ((packed.unsqueeze(-1) >> places) & 1).flatten(-2)[..., : count * bits]
    weight = 1 << torch.arange(bits, device=packed.device)
    codes: Tensor = (flat.unflatten(-1, (count, bits)).long() * weight).sum(-1)
    return codes

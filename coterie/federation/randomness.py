"""Counter-based randomness: every draw is a pure function of its coordinates.

A *key* is an int64 hash of (seed, purpose, round, call, client, step, slot, ...). Nothing is stored
between draws, so results do not depend on chunking, on who else takes part, on the device, or on
whether a run was interrupted. The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014),
written in wrapping int64 tensor operations.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import torch
from torch import Tensor

Coordinate = int | str | Tensor
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def key(*coordinates: Coordinate) -> Tensor:
    """Fold coordinates into an int64 key; tensors broadcast against each other."""
    folded: int | Tensor = 0
    for coordinate in coordinates:
        if isinstance(folded, Tensor) or isinstance(coordinate, Tensor):
            folded = fold(torch.as_tensor(folded), coordinate)
        else:
            folded = _mix_int(folded + _step(coordinate))
    return torch.as_tensor(folded)


def fold(base: Tensor, coordinate: Coordinate) -> Tensor:
    """The keys that follow `base` when one more coordinate is known."""
    if isinstance(coordinate, Tensor):
        return _mix((coordinate + 1) * _GOLDEN + (base if base.dim() == 0 else base.to(coordinate.device)))
    return _mix(base + _step(coordinate))


def integers(keys: Tensor, n: int | Tensor) -> Tensor:
    """Uniform draws from 0..n-1 (n below 2^31; the bias is below n / 2^31)."""
    return ((keys >> 33) & 0x7FFFFFFF).mul_(n) >> 31


def uniform(keys: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Uniform draws from [0, 1)."""
    return (((keys >> 11) & 0x1FFFFFFFFFFFFF).double() * 2.0**-53).to(dtype)


def number(*coordinates: int | str) -> float:
    """One draw from [0, 1) without tensors: `uniform(key(*coordinates))` at a tenth of the time."""
    folded = _folded(coordinates[:-2])
    for coordinate in coordinates[-2:]:
        folded = _mix_int(folded + _step(coordinate))
    return ((folded >> 11) & 0x1FFFFFFFFFFFFF) * 2.0**-53


@functools.lru_cache(maxsize=64)
def _folded(coordinates: tuple[int | str, ...]) -> int:
    folded = 0
    for coordinate in coordinates:
        folded = _mix_int(folded + _step(coordinate))
    return folded


def normal(keys: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal draws (Box-Muller)."""
    first, second = slots(keys, 2).unbind(-1)
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(first)))
    angle = (2.0 * torch.pi) * uniform(second)
    return (radius * torch.cos(angle)).to(dtype)


def slots(keys: Tensor, count: int) -> Tensor:
    """Append an axis of `count` independent keys to each key."""
    return _mix(_ramp(count, keys.device) + keys.unsqueeze(-1))


def permutation(keys: Tensor, n: int) -> Tensor:
    """A random order of 0..n-1 for one key."""
    return torch.argsort(slots(keys, n), stable=True)


def choose(keys: Tensor, n: int, count: int) -> Tensor:
    """`count` different numbers of 0..n-1, in ascending order, at a cost that does not grow with n.

    They are the images of 0..count-1 under a four-round Feistel permutation of the smallest square
    power of two that holds n, re-applied to what falls outside (cycle walking).
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    rounds = slots(keys, 4).tolist()

    def permute(value: np.ndarray) -> np.ndarray:
        left, right = value >> half, value & mask
        for round_key in rounds:
            left, right = right, left ^ (_mix(right * _GOLDEN + round_key) & mask)
        return left << half | right

    chosen = permute(np.arange(count))
    while len(
        outside := np.flatnonzero(chosen >= n)
    ):  # small arrays: numpy calls take a third of torch's time
        chosen[outside] = permute(chosen[outside])
    return torch.from_numpy(np.sort(chosen)).to(keys.device)


@functools.lru_cache(maxsize=64)
def _ramp(count: int, device: torch.device) -> Tensor:
    return (torch.arange(count, device=device) + 1) * _GOLDEN


@functools.lru_cache(maxsize=1024)
def _step(coordinate: int | str) -> int:
    if isinstance(coordinate, str):
        coordinate = int.from_bytes(hashlib.blake2b(coordinate.encode(), digest_size=7).digest(), "big")
    return _signed((coordinate + 1) * _GOLDEN)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64 finaliser; overwrites its argument, which callers have just made."""
    x ^= (x >> 30) & 0x3FFFFFFFF
    x *= _MIX1
    x ^= (x >> 27) & 0x1FFFFFFFFF
    x *= _MIX2
    x ^= (x >> 31) & 0x1FFFFFFFF
    return x


def _mix_int(x: int) -> int:
    x &= 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return _signed(x ^ (x >> 31))


def _signed(x: int) -> int:
    """The int64 that x wraps around to."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)

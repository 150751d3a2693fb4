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
    plain = next((k for k, part in enumerate(coordinates) if isinstance(part, Tensor)), len(coordinates))
    folded = torch.tensor(_fold_plain(coordinates[:plain]))  # type: ignore[arg-type]
    for coordinate in coordinates[plain:]:
        folded = fold(folded, coordinate)
    return folded


def fold(base: Tensor, coordinate: Coordinate) -> Tensor:
    """The keys that follow `base` when one more coordinate is known."""
    if not isinstance(coordinate, Tensor):
        return _mix(base + _step(coordinate))
    if coordinate.device.type == "cpu" and coordinate.dim():
        return torch.from_numpy(_mix_array((coordinate.numpy() + 1) * _GOLDEN + base.cpu().numpy()))
    return _mix((coordinate + 1) * _GOLDEN + (base if base.dim() == 0 else base.to(coordinate.device)))


def integers(keys: Tensor, n: int | Tensor) -> Tensor:
    """Uniform draws from 0..n-1 (n below 2^31; the bias is below n / 2^31)."""
    if keys.device.type == "cpu" and keys.dim():
        drawn = (keys.numpy().view(np.uint64) >> np.uint64(33)).view(np.int64)
        drawn *= n.numpy() if isinstance(n, Tensor) else n
        drawn >>= 31
        return torch.from_numpy(drawn)
    return ((keys >> 33) & 0x7FFFFFFF).mul_(n) >> 31


def uniform(keys: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Uniform draws from [0, 1)."""
    return (((keys >> 11) & 0x1FFFFFFFFFFFFF).double() * 2.0**-53).to(dtype)


def number(*coordinates: int | str) -> float:
    """One draw from [0, 1) without tensors: `uniform(key(*coordinates))` at a tenth of the time."""
    return ((_fold_plain(coordinates) >> 11) & 0x1FFFFFFFFFFFFF) * 2.0**-53


def _fold_plain(coordinates: tuple[int | str, ...]) -> int:
    """The last two are those that change from one key to the next."""
    folded = _folded(coordinates[:-2])
    for coordinate in coordinates[-2:]:
        folded = _mix_int(folded + _step(coordinate))
    return folded


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
    if keys.device.type == "cpu":
        return torch.from_numpy(_mix_array(keys.numpy()[..., None] + _ramp(count, keys.device).numpy()))
    return _mix(_ramp(count, keys.device) + keys.unsqueeze(-1))


def permutation(keys: Tensor, n: int) -> Tensor:
    """A random order of 0..n-1 for one key."""
    return torch.argsort(slots(keys, n), stable=True)


def choose(keys: Tensor, n: int, count: int) -> Tensor:
    """`count` different numbers of 0..n-1 for each key, in ascending order, at a cost that does not grow with n.

    They are the images of 0..count-1 under a four-round Feistel permutation of the smallest square
    power of two that holds n, re-applied to what falls outside (cycle walking).
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    rounds = np.moveaxis(slots(keys, 4).cpu().numpy(), -1, 0)[..., None]

    def permute(value: np.ndarray, rounds: np.ndarray) -> np.ndarray:
        left, right = value >> half, value & mask
        for round_key in rounds:
            left, right = right, left ^ (_mix_array(right * _GOLDEN + round_key) & mask)
        return left << half | right

    chosen = permute(np.arange(count), rounds)
    rounds = np.broadcast_to(rounds, (4, *chosen.shape))
    while (outside := chosen >= n).any():
        chosen[outside] = permute(chosen[outside], rounds[:, outside])
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
    if x.device.type == "cpu":
        _mix_array(x.numpy())
        return x
    x ^= (x >> 30) & 0x3FFFFFFFF
    x *= _MIX1
    x ^= (x >> 27) & 0x1FFFFFFFFF
    x *= _MIX2
    x ^= (x >> 31) & 0x1FFFFFFFF
    return x


def _mix_array(x: np.ndarray) -> np.ndarray:
    """The same in half of torch's time: there are shifts that bring zeros in, and calls cost less."""
    bits = x.view(np.uint64)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return x


def _mix_int(x: int) -> int:
    x &= 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return _signed(x ^ (x >> 31))


def _signed(x: int) -> int:
    """The int64 that x wraps around to."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)

"""Counter-based random numbers: every draw is a pure function of its coordinates.

A *key* is an int64 hash of (seed, purpose, round, call, client, step, slot, ...). No state is stored between
draws, so results do not depend on chunking, on which other clients take part, on the device, or on whether a run was
interrupted. The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), in wrapping int64 arithmetic.
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
    """Return the int64 key of these coordinates; tensors among them broadcast against each other."""
    plain = next((k for k, part in enumerate(coordinates) if isinstance(part, Tensor)), len(coordinates))
    base = _fold_plain(coordinates[:plain])  # type: ignore[arg-type]  # no tensors here
    if plain < len(coordinates) and _in_numpy(coordinates[plain]):
        folded, plain = _fold_array(base, coordinates[plain]), plain + 1  # type: ignore[arg-type]  # a tensor
    else:
        folded = torch.tensor(base)
    for coordinate in coordinates[plain:]:
        folded = fold(folded, coordinate)
    return folded


def fold(base: Tensor, coordinate: Coordinate) -> Tensor:
    """Return the keys that extend `base` by one more coordinate."""
    if not isinstance(coordinate, Tensor):
        return _mix(base + _step(coordinate))
    if _in_numpy(coordinate):
        return _fold_array(base.cpu().numpy(), coordinate)
    return _mix((coordinate + 1) * _GOLDEN + (base if base.dim() == 0 else base.to(coordinate.device)))


def _in_numpy(coordinate: Coordinate) -> bool:
    return isinstance(coordinate, Tensor) and coordinate.device.type == "cpu" and coordinate.dim() > 0


def _fold_array(base: int | np.ndarray, coordinate: Tensor) -> Tensor:
    return torch.from_numpy(_mix_array((coordinate.numpy() + 1) * _GOLDEN + base))


def integers(keys: Tensor, n: int | Tensor) -> Tensor:
    """Draw uniformly from 0..n-1, for n below 2^31 (the bias is below n / 2^31)."""
    if keys.device.type == "cpu" and keys.dim():
        drawn = (keys.numpy().view(np.uint64) >> np.uint64(33)).view(np.int64)
        drawn *= n.numpy() if isinstance(n, Tensor) else n
        drawn >>= 31
        return torch.from_numpy(drawn)
    return ((keys >> 33) & 0x7FFFFFFF).mul_(n) >> 31


def uniform(keys: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw uniformly from [0, 1)."""
    return (((keys >> 11) & 0x1FFFFFFFFFFFFF).double() * 2.0**-53).to(dtype)


def number(*coordinates: int | str) -> float:
    """Return one draw from [0, 1): `uniform(key(*coordinates))` without tensors, in a tenth of the time."""
    return ((_fold_plain(coordinates) >> 11) & 0x1FFFFFFFFFFFFF) * 2.0**-53


def _fold_plain(coordinates: tuple[int | str, ...]) -> int:
    """Fold all coordinates; only the last two change from one key to the next, so the others are cached."""
    folded = _folded(coordinates[:-2])
    for coordinate in coordinates[-2:]:
        folded = _mix_int(folded + _step(coordinate))
    return folded


@functools.lru_cache(maxsize=64)
def _folded(coordinates: tuple[int | str, ...]) -> int:
    """Fold coordinates that many keys share."""
    folded = 0
    for coordinate in coordinates:
        folded = _mix_int(folded + _step(coordinate))
    return folded


def normal(keys: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw from the standard normal distribution (Box-Muller)."""
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
    """Return a random order of 0..n-1 for one key."""
    return torch.argsort(slots(keys, n), stable=True)


def choose(keys: Tensor, n: int, count: int) -> Tensor:
    """Draw `count` different numbers from 0..n-1 for each key, ascending, at a cost that does not grow with n.

    They are the images of 0..count-1 under a four-round Feistel permutation of the smallest square power of two that
    holds n; images outside 0..n-1 are permuted again (cycle walking).
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
    """Apply SplitMix64's finaliser in place; callers pass a tensor that they have just made."""
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
    """Apply the finaliser in place with numpy, in half of torch's time: shifts are logical and calls are cheap."""
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
    """Return the int64 that x wraps around to."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)

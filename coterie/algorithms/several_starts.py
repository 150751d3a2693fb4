"""Different starting points for methods that train several models at once."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie._core import randomness
from coterie.engine.federation import Federation


def several_starts(fed: Federation, purpose: str, count: int, spread: float) -> Tensor:
    """Return `count` starting models [count, d]: draws of the model's own start, each with noise of sd `spread`."""
    number = torch.arange(count, device=fed.device)
    noise = randomness.normal(randomness.slots(randomness.key(fed.seed, purpose, number), fed.d), fed.dtype)
    seeds = [int(randomness.key(fed.seed, f"{purpose} start", k)) & 0x7FFFFFFF for k in range(count)]
    first = torch.stack([fed.model.initial(seed, fed.dtype, fed.device) for seed in seeds])
    return first + spread * noise

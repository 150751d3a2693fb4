"""What a phase returned: named tensors, and whether their numbers are finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from coterie._core.errors import SettingError
from coterie.models.fast.lazy_models import finite_witness


def as_reply(value: Tensor | dict[str, Tensor] | None, phase: str) -> dict[str, Tensor]:
    """Return what a phase returned, by name."""
    if value is None:
        return {}
    named = value if isinstance(value, dict) else {"": value}
    if all(isinstance(v, Tensor) for v in named.values()):
        return named
    raise SettingError(
        f"phase {phase!r} returned a {type(value).__name__}; a phase returns a tensor, a dict of tensors, or nothing"
    )


def all_finite(values: Sequence[Tensor]) -> bool:
    """Return whether all numbers are finite: a sum is only if every term is (one that overflows is looked at again)."""
    return all(math.isfinite(total.item()) for total in witnesses(values))


def witnesses(values: Sequence[Tensor]) -> list[Tensor]:
    """Return a number for each different floating tensor that is finite only if the tensor is."""
    different = {id(value): value for value in values if value.is_floating_point()}
    return [finite_witness(value) for value in different.values()]

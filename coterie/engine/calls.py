"""Details of a call: which state fields a phase takes, who is visited twice, what is sent."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.engine.state import State


def payload(values: Iterable[Any]) -> tuple[int, int]:
    """Return the floats and bytes of what is sent; a plain number is one float of eight bytes."""
    floats, size = 0, 0
    for value in values:
        count, each = (value.numel(), value.element_size()) if isinstance(value, Tensor) else (1, 8)
        floats, size = floats + count, size + count * each
    return floats, size


@functools.lru_cache(maxsize=256)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[1:]


def arguments(method: Callable[..., Any], state: State) -> dict[str, Any]:
    """Return the state fields that a phase takes, by name (its first parameter is the client)."""
    names = _parameters(method.__func__)[1:]  # type: ignore[attr-defined]
    missing = [name for name in names if name not in state]
    if missing:
        raise SettingError(f"{method.__qualname__} asks for {missing}, which {state} does not have")
    return {name: getattr(state, name) for name in names}


def occurrences(ids: Tensor) -> Tensor | None:
    """Return how often each id occurred before, or None when all differ."""
    values = ids.cpu().numpy()  # small arrays: numpy calls take a third of torch's time
    if (values[1:] > values[:-1]).all():  # so they are when sampled
        return None
    order = values.argsort(kind="stable")
    ordered = values[order]
    before = np.arange(len(values)) - ordered.searchsorted(ordered)
    if not before.any():
        return None
    seen = np.empty_like(values)
    seen[order] = before
    return torch.from_numpy(seen).to(ids.device)

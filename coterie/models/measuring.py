"""Measure which of several ways to compute the same is fastest on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from coterie._core.errors import SettingError

Gradient = Callable[..., Tensor]
"""(w [k, d], *rows [k, B, ...]) -> Tensor."""


_untimed = threading.local()


@contextmanager
def untimed() -> Iterator[None]:
    """Choose nothing by timing inside the block, so that the same numbers come out on any day."""
    before, _untimed.on = is_untimed(), True
    try:
        yield
    finally:
        _untimed.on = before


def is_untimed() -> bool:
    """Return True inside `untimed`."""
    return getattr(_untimed, "on", False)


def fastest(backends: dict[str, Gradient], prepares: bool, w: Tensor, *rows: Tensor) -> tuple[str, Tensor]:
    """Return the name of the fastest of several ways to compute the same, and its result.

    "looped" always works; another way that raises is dropped. `prepares`: the first call of a way is not timed.
    Small differences are measured again. Inside `untimed` it is "looped".
    """
    if is_untimed():
        return "looped", backends["looped"](w, *rows)
    backends["looped"](w[:1], *(part[:1] for part in rows))
    results, seconds = {}, {}
    for way, compute in backends.items():
        try:
            if way != "looped" and prepares:
                compute(w, *rows)
            seconds[way], results[way] = _timed(compute, w, *rows)
        except (RuntimeError, SettingError):
            if way == "looped":
                raise
    for _ in range(4):
        if max(seconds.values()) > 4 * min(seconds.values()) or sum(seconds.values()) > 0.2:
            break
        seconds = {way: min(seconds[way], _timed(backends[way], w, *rows)[0]) for way in seconds}
    best = min(seconds, key=seconds.__getitem__)
    return best, results[best]


def _timed(function: Gradient, *arguments: Tensor) -> tuple[float, Tensor]:
    start = time.perf_counter()
    result = function(*arguments)
    if result.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, result

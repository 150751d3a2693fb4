"""Threads that compute clients side by side."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Work = TypeVar("Work")
Result = TypeVar("Result")


@functools.lru_cache(maxsize=1)
def workers(count: int) -> ThreadPoolExecutor:
    """Threads that compute stacks side by side, each alone in its operations."""
    before, ready = torch.get_num_threads(), threading.Barrier(count)

    def alone() -> None:
        torch.get_num_threads()  # the first look takes the number of the thread that asks for workers
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="stack")
    for started in [pool.submit(alone) for _ in range(count)]:
        started.result()
    torch.set_num_threads(before)
    return pool


def side_by_side(function: Callable[[Work], Result], works: Sequence[Work]) -> list[Result]:
    """The function of each, computed at once; the thread that asks takes the first."""
    first, *others = works
    waiting = [workers(len(works)).submit(function, work) for work in others]
    return [function(first), *(other.result() for other in waiting)]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=workers.cache_clear)  # threads do not come along

"""Threads that compute clients side by side."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from coterie.runtime.processors import Elsewhere

Work = TypeVar("Work")
Result = TypeVar("Result")

SHARED_PRODUCTS = 1 << 22  # multiplications below which waking a thread costs more than it saves
LARGEST_REUSED = (1 << 25) - (1 << 13)  # bytes; glibc returns larger blocks to the system in any case


def reuse_memory() -> None:
    """Let freed memory be used again: by default glibc returns it, and fresh pages cost more than to add numbers up.

    glibc takes the size of what it last returned for the least that is worth it, and returns this before it is used.
    """
    torch.empty(LARGEST_REUSED, dtype=torch.uint8)


@functools.lru_cache(maxsize=1)
def workers(count: int) -> ThreadPoolExecutor:
    """Threads that compute stacks side by side, each alone in its operations."""
    before, ready = torch.get_num_threads(), threading.Barrier(count)

    def begin() -> None:
        _alone()
        ready.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="stack")
    for started in [pool.submit(begin) for _ in range(count)]:
        started.result()
    torch.set_num_threads(before)
    return pool


def _alone() -> None:
    """Let this thread compute its operations by itself; whoever started it sets torch's number again."""
    torch.get_num_threads()  # the first look takes the number of the thread that asks for workers
    torch.set_num_threads(1)


class Helper:
    """A thread that computes one thing at a time for the thread that made it, woken in half the time of a pool.

    What it has not begun when its answer is needed is computed by who asks: on a busy machine it may come late.
    """

    def __init__(self) -> None:
        self._asked, self._free, self._done = threading.Lock(), threading.Lock(), threading.Lock()
        self._task: list[Any] = []  # function and work, later result and problem
        for lock in (self._asked, self._free, self._done):
            lock.acquire()
        before, parts = torch.get_num_threads(), (self._asked, self._free, self._done, self._task)
        thread = threading.Thread(target=_help, args=parts, name="helper", daemon=True)
        thread.start()
        self._done.acquire()
        self._elsewhere = Elsewhere(thread)
        torch.set_num_threads(before)

    def ask(self, function: Callable[[Any], Any], work: Any) -> None:
        self._task[:] = [function, work]
        self._elsewhere.hold()
        self._open(self._free)
        self._open(self._asked)

    def answer(self) -> list[Any]:
        """What was asked for and None, or None and what was raised."""
        if self._free.acquire(blocking=False):
            return _tried(*self._task)
        if not self._done.acquire(blocking=False):
            self._elsewhere.release()
            self._done.acquire()
        return self._task.copy()

    @staticmethod
    def _open(lock: threading.Lock) -> None:
        """It may be open still: the thread need not have noticed that it was asked before."""
        if lock.locked():
            lock.release()

    def __del__(self) -> None:
        self._task.clear()
        self._open(self._free)
        self._open(self._asked)


def _help(asked: threading.Lock, free: threading.Lock, done: threading.Lock, task: list[Any]) -> None:
    """What the thread of a helper does until it is asked for nothing: what is `free` is taken by it or by who asked."""
    _alone()
    done.release()
    while asked.acquire():
        if not free.acquire(blocking=False):
            continue
        if not task:
            return
        task[:] = _tried(*task)
        done.release()


def _tried(function: Callable[[Any], Any], work: Any) -> list[Any]:
    try:
        return [function(work), None]
    except BaseException as problem:
        return [None, problem]


class _Mine(threading.local):
    """Of each thread: its helpers, and how many threads may compute what it has to; a helper is by itself."""

    def __init__(self) -> None:
        self.helpers: list[Helper] = []
        self.hands = 1
        self.begun = 0  # helpers that compute something for later


_mine = _Mine()


@contextmanager
def helped(count: int) -> Iterator[None]:
    """Let this thread share out its work to `count` threads, itself among them."""
    before = _mine.hands, _mine.begun
    _mine.hands, _mine.begun = count, 0
    try:
        yield
    finally:
        _mine.hands, _mine.begun = before


def spare_hands() -> int:
    """Threads that may compute what this one has to, itself among them."""
    return _mine.hands - _mine.begun


def begun(function: Callable[[], Result]) -> Callable[[], Result]:
    """Let a helper compute something while this thread goes on; what is returned waits for it."""
    helper = _mine.helpers.pop() if _mine.helpers else Helper()
    helper.ask(lambda _: function(), None)
    _mine.begun += 1

    def end() -> Result:
        result, problem = helper.answer()
        _mine.helpers.append(helper)
        _mine.begun -= 1
        if problem is not None:
            raise problem
        return result

    return end


def side_by_side(function: Callable[[Work], Result], works: Sequence[Work]) -> list[Result]:
    """The function of each, computed at once; the thread that asks takes the first."""
    first, *others = works
    helpers, _mine.helpers = _mine.helpers, []  # they are not free for what the function asks for
    while len(helpers) < len(others):
        helpers.append(Helper())
    busy = helpers[: len(others)]
    for helper, work in zip(busy, others, strict=True):
        helper.ask(function, work)
    with helped(1):
        answers = [_tried(function, first), *(helper.answer() for helper in busy)]
    _mine.helpers = helpers
    for _, problem in answers:
        if problem is not None:
            raise problem
    return [result for result, _ in answers]


def shared_out(function: Callable[[slice], Result], length: int, products: int) -> list[Result]:
    """The function of parts of 0..length, side by side where there are hands and so many multiplications are enough."""
    count = min(spare_hands(), length) if products >= SHARED_PRODUCTS else 1
    if count <= 1:
        return [function(slice(0, length))]
    cuts = [length * k // count for k in range(count + 1)]
    return side_by_side(function, [slice(*cut) for cut in itertools.pairwise(cuts)])


def _forget() -> None:
    """Threads do not come along when a process forks."""
    workers.cache_clear()
    _mine.helpers = []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

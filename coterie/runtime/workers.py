"""Threads that compute clients side by side."""

from __future__ import annotations

import functools
import itertools
import os
import queue
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
PARTS = 2  # of some work for each thread, where one may come late


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


class Task:
    """Something that is computed once, by whoever takes it first."""

    def __init__(self, function: Callable[[Any], Any], work: Any) -> None:
        self._call, self._answer = (function, work), [None, None]
        self._free, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()

    def take(self) -> None:
        """Compute it unless somebody has begun."""
        if self._free.acquire(blocking=False):
            self._answer = _tried(*self._call)
            self._done.release()

    def answer(self, waits: Callable[[], None]) -> list[Any]:
        """What it gave and None, or None and what was raised; `waits` is called before another thread is waited for."""
        self.take()
        if not self._done.acquire(blocking=False):
            waits()
            self._done.acquire()
        return self._answer


class Helper:
    """A thread that computes one thing after the other for the thread that made it, woken in half the time of a pool.

    What it has not begun when an answer is needed is computed by who asks: on a busy machine it may come late.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        before, ready = torch.get_num_threads(), Task(lambda _: None, None)
        thread = threading.Thread(target=_help, args=(self._tasks,), name="helper", daemon=True)
        thread.start()
        self._elsewhere = Elsewhere(thread)
        self._tasks.put(ready)
        ready._done.acquire()
        torch.set_num_threads(before)

    def ask(self, function: Callable[[Any], Any], work: Any) -> Callable[[], list[Any]]:
        """Put this at the end of what the thread has to do; what is returned is `Task.answer`."""
        task = Task(function, work)
        self._elsewhere.hold()
        self._tasks.put(task)
        return functools.partial(task.answer, self._elsewhere.release)

    def __del__(self) -> None:
        self._tasks.put(None)


def _help(tasks: queue.SimpleQueue[Task | None]) -> None:
    """What the thread of a helper does until it is asked for nothing."""
    _alone()
    while (task := tasks.get()) is not None:
        task.take()
        del task  # what it gave is not ours to keep


def _tried(function: Callable[[Any], Any], work: Any) -> list[Any]:
    try:
        return [function(work), None]
    except BaseException as problem:
        return [None, problem]


class _Mine(threading.local):
    """Of each thread: its helpers, and how many threads may compute what it has to; a helper is by itself."""

    def __init__(self) -> None:
        self.helpers: list[Helper] = []
        self.busy: list[Helper] = []  # those that compute something for later
        self.hands = 1


_mine = _Mine()


@contextmanager
def helped(count: int) -> Iterator[None]:
    """Let this thread share out its work to `count` threads, itself among them."""
    before = _mine.hands, _mine.busy
    _mine.hands, _mine.busy = count, []
    try:
        yield
    finally:
        _mine.hands, _mine.busy = before


def spare_hands() -> int:
    """Threads that may compute what this one has to at once, itself among them."""
    return _mine.hands - len(_mine.busy)


def begun(function: Callable[[], Result]) -> Callable[[], Result]:
    """Let a helper compute something while this thread goes on; what is returned waits for it."""
    helper, busy = _mine.helpers.pop() if _mine.helpers else Helper(), _mine.busy
    answer = helper.ask(lambda _: function(), None)
    busy.append(helper)

    def end() -> Result:
        result, problem = answer()
        busy.remove(helper)
        _mine.helpers.append(helper)
        if problem is not None:
            raise problem
        return result

    return end


def side_by_side(function: Callable[[Work], Result], works: Sequence[Work]) -> list[Result]:
    """The function of each, computed at once; the thread that asks takes the first."""
    return _shared(function, works, len(works) - 1)


def shared_out(function: Callable[[slice], Result], length: int, products: int) -> list[Result]:
    """The function of parts of 0..length, side by side where there are hands and so many multiplications are enough.

    Helpers that are busy with something else take some of the parts if they are done in time.
    """
    parts = PARTS * _mine.hands if _mine.busy else _mine.hands
    count = min(parts, length) if products >= SHARED_PRODUCTS and _mine.hands > 1 else 1
    if count <= 1:
        return [function(slice(0, length))]
    cuts = [length * k // count for k in range(count + 1)]
    return _shared(function, [slice(*cut) for cut in itertools.pairwise(cuts)], spare_hands() - 1)


def _shared(function: Callable[[Work], Result], works: Sequence[Work], count: int) -> list[Result]:
    """The function of each work; this thread begins with the first, `count` helpers and busy ones with the last."""
    helpers, _mine.helpers = _mine.helpers, []  # they are not free for what the function asks for
    while len(helpers) < count:
        helpers.append(Helper())
    asked = itertools.cycle([*helpers[:count], *_mine.busy])
    answers = [next(asked).ask(function, work) for work in works[:0:-1]]
    with helped(1):
        found = [_tried(function, works[0]), *(answer() for answer in answers[::-1])]
    _mine.helpers = helpers
    for _, problem in found:
        if problem is not None:
            raise problem
    return [result for result, _ in found]


def _forget() -> None:
    """Threads do not come along when a process forks."""
    workers.cache_clear()
    _mine.helpers = []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

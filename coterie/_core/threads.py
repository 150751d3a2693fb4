"""Threads that compute the work of several clients at the same time."""

from __future__ import annotations

import functools
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from coterie._core.affinity import Elsewhere

Work = TypeVar("Work")
Result = TypeVar("Result")

SHARED_PRODUCTS = 1 << 22  # multiplications below which waking a thread costs more than it saves
PARTS = 2  # slices per thread, so that a thread that comes late delays less


@functools.lru_cache(maxsize=1)
def workers(count: int) -> ThreadPoolExecutor:
    """Return a pool of threads, each of which runs its torch operations on a single core."""
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
    """Make this thread run its torch operations on one core; the thread that started it restores torch's setting."""
    torch.get_num_threads()  # the first call would otherwise override the number set below
    torch.set_num_threads(1)


class Task:
    """A computation that runs once, in whichever thread takes it first."""

    def __init__(self, function: Callable[[Any], Any], work: Any) -> None:
        self._call, self._answer = (function, work), [None, None]
        self._free, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()

    def take(self) -> None:
        """Compute the task unless another thread has begun it."""
        if self._free.acquire(blocking=False):
            self._answer = _tried(*self._call)
            self._done.release()

    def answer(self, waits: Callable[[], None]) -> list[Any]:
        """Return [result, None] or [None, exception]; call `waits` before waiting for another thread."""
        self.take()
        if not self._done.acquire(blocking=False):
            waits()
            self._done.acquire()
        return self._answer


class Helper:
    """A thread that computes tasks in order for the thread that made it; waking it takes half the time of a pool.

    A task that the helper has not begun when its result is needed is computed by the thread that asks, because the
    helper may come late on a busy machine.
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
        """Queue a task and return a function that gives its `Task.answer`."""
        task = Task(function, work)
        self._elsewhere.hold()
        self._tasks.put(task)
        return functools.partial(task.answer, self._elsewhere.release)

    def __del__(self) -> None:
        self._tasks.put(None)


def _help(tasks: queue.SimpleQueue[Task | None]) -> None:
    """Run tasks from the queue until None arrives."""
    _alone()
    while (task := tasks.get()) is not None:
        task.take()
        del task  # do not keep its result alive while waiting


def _tried(function: Callable[[Any], Any], work: Any) -> list[Any]:
    """Return [result, None], or [None, exception] if the function raises."""
    try:
        return [function(work), None]
    except BaseException as problem:
        return [None, problem]


class _Mine(threading.local):
    """Per-thread state: idle helpers, busy helpers, and how many threads share this thread's work (1 in a helper)."""

    def __init__(self) -> None:
        self.helpers: list[Helper] = []
        self.busy: list[Helper] = []  # helpers that run a `begun` computation
        self.hands = 1


_mine = _Mine()


@contextmanager
def helped(count: int) -> Iterator[None]:
    """Let the calling thread share its work among `count` threads, itself included."""
    before = _mine.hands, _mine.busy
    _mine.hands, _mine.busy = count, []
    try:
        yield
    finally:
        _mine.hands, _mine.busy = before


def spare_hands() -> int:
    """Return how many threads, the caller included, are free to share its work now."""
    return _mine.hands - len(_mine.busy)


def begun(function: Callable[[], Result]) -> Callable[[], Result]:
    """Start a computation in a helper thread and return a function that waits for its result."""
    helper, busy = _mine.helpers.pop() if _mine.helpers else Helper(), _mine.busy
    answer = helper.ask(lambda _: function(), None)
    busy.append(helper)

    def end() -> Result:
        result: Result
        result, problem = answer()
        busy.remove(helper)
        _mine.helpers.append(helper)
        if problem is not None:
            raise problem
        return result

    return end


def side_by_side(function: Callable[[Work], Result], works: Sequence[Work]) -> list[Result]:
    """Return the function of each item, computed at the same time; the calling thread takes the first item."""
    return _shared(function, works, len(works) - 1)


def shared_out(function: Callable[[slice], Result], length: int, products: int) -> list[Result]:
    """Apply the function to slices of 0..length, in parallel if `products` multiplications are worth waking threads.

    Helpers that are busy with something else take some of the slices if they finish in time.
    """
    parts = PARTS * _mine.hands if _mine.busy else _mine.hands
    count = min(parts, length) if products >= SHARED_PRODUCTS and _mine.hands > 1 else 1
    if count <= 1:
        return [function(slice(0, length))]
    cuts = [length * k // count for k in range(count + 1)]
    return _shared(function, [slice(*cut) for cut in itertools.pairwise(cuts)], spare_hands() - 1)


def _shared(function: Callable[[Work], Result], works: Sequence[Work], count: int) -> list[Result]:
    """Apply the function to every item; this thread begins with the first, the helpers with the last."""
    helpers, _mine.helpers = _mine.helpers, []  # the function itself must not use them
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


@contextmanager
def one_scipy_thread() -> Iterator[None]:
    """Keep SciPy's linear algebra on one thread inside the block.

    Its optimisers work on vectors of few numbers, and the second thread of its BLAS library waits by spinning: that
    takes more processor time than the work, and much more beside other work. Torch's threads are not touched.
    """
    with _scipy_blas().limit(limits=1):
        yield


@functools.cache
def _scipy_blas() -> Any:
    """Return the handle of the BLAS library that SciPy brings along; it controls nothing where there is none."""
    import scipy.linalg  # noqa: F401  # loads it
    from threadpoolctl import ThreadpoolController

    found = ThreadpoolController().select(user_api="blas")
    paths = [one.filepath for one in found.lib_controllers]
    own = [path for path in paths if any(part.startswith("scipy") for part in Path(path).parts[-3:-1])]
    return found.select(filepath=own)


def _forget() -> None:
    """Drop all threads in the child process, because threads do not survive a fork."""
    workers.cache_clear()
    _mine.helpers = []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

"""Where helping threads run: Linux likes to wake a thread on the processor of who wakes it, even if another is idle.

There it would wait until its asker has nothing to do; after a pause that lasted for the first 30 rounds of CoBo.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading


class Elsewhere:
    """Keeps a thread that sleeps away from the processor of the thread that is about to wake it."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread, self._held, self._here = thread.native_id, False, None
        self._allowed: set[int] = set()
        if sys.platform == "linux":
            self._here = getattr(ctypes.CDLL(None), "sched_getcpu", None)
            self._allowed = os.sched_getaffinity(0)

    def hold(self) -> None:
        """To be called before the thread is woken."""
        if self._here is not None and len(self._allowed) > 1:
            self._held = self._move(self._allowed - {self._here()})

    def release(self) -> None:
        """Whoever waits for the thread leaves it its own processor."""
        if self._held:
            self._held = not self._move(self._allowed)

    def _move(self, processors: set[int]) -> bool:
        try:
            os.sched_setaffinity(self._thread, processors)  # type: ignore[arg-type]
        except OSError:  # the system does not let us
            self._here = None
            return False
        return True

"""Keep a helper thread off the processor of the thread that wakes it.

Linux tends to wake a thread on the processor of its waker, even if another processor is idle. The helper then waits
until the waker has nothing to do; after a pause, that slowed the next 30 rounds of CoBo.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading


class Elsewhere:
    """Moves a sleeping thread away from the processor of the thread that is about to wake it (Linux only)."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread, self._held, self._here = thread.native_id, False, None
        self._allowed: set[int] = set()
        if sys.platform == "linux":
            self._here = getattr(ctypes.CDLL(None), "sched_getcpu", None)
            self._allowed = os.sched_getaffinity(0)

    def hold(self) -> None:
        """Bar the thread from the caller's processor; call this before waking it."""
        if self._here is not None and len(self._allowed) > 1:
            self._held = self._move(self._allowed - {self._here()})

    def release(self) -> None:
        """Let the thread run on every processor again, because the caller is about to wait for it."""
        if self._held:
            self._held = not self._move(self._allowed)

    def _move(self, processors: set[int]) -> bool:
        if self._thread is None:
            return False
        try:
            os.sched_setaffinity(self._thread, processors)
        except OSError:  # the system does not let us
            self._here = None
            return False
        return True

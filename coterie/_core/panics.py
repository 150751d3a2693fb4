"""Damaged files at which polars panics: one short error instead of pages of native traces on the terminal."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise `OSError` where polars panics inside the block, and drop what it writes to standard error then.

    Everything else that was written there in the meantime is passed on at the end.
    """
    from polars.exceptions import PanicException

    with _held_back() as held:
        try:
            yield
        except PanicException:
            held.clear()
            raise OSError("its parts do not fit together") from None


class _Held:
    """What was written to standard error while it was held back."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def clear(self) -> None:
        os.ftruncate(self.descriptor, 0)

    def text(self) -> bytes:
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        return os.read(self.descriptor, os.fstat(self.descriptor).st_size)


@contextmanager
def _held_back() -> Iterator[_Held]:
    """Redirect standard error, that of native code too, to a temporary file, and pass it on at the end."""
    if sys.stderr is not None:
        sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        held = _Held(file.fileno())
        try:
            terminal = os.dup(2)
        except OSError:  # closed: nothing is shown anyway
            yield held
            return
        os.dup2(held.descriptor, 2)
        try:
            yield held
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            if text := held.text():
                os.write(2, text)

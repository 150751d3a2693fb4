"""Damaged files at which polars panics: one short error instead of pages of native traces on the terminal."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise `OSError` where polars panics inside the block, and drop what it writes to standard error then.

    Everything else that was written there in the meantime is passed on at the end.
    """
    from polars.exceptions import PanicException

    with tempfile.TemporaryFile() as written:
        terminal = _redirected_to(written.fileno())
        try:
            yield
        except PanicException:
            os.ftruncate(written.fileno(), 0)
            raise OSError("its parts do not fit together") from None
        finally:
            if terminal is not None:
                os.dup2(terminal, STDERR)
                os.close(terminal)
                written.seek(0)
                if text := written.read():
                    os.write(STDERR, text)


def _redirected_to(descriptor: int) -> int | None:
    """Redirect standard error, that of native code too; return what it was, or None if it is closed."""
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        terminal = os.dup(STDERR)
    except OSError:
        return None
    os.dup2(descriptor, STDERR)
    return terminal

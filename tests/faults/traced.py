"""Commands in processes of their own that die at their nth change of a folder.

Files that are opened to be written, renamed, removed and made count as changes. A process is a fork of this one, which
has imported everything, so that a machine does more than import torch hundreds of times; it is killed all the same.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")
NEEDED = (
    *("coterie.cli.training", "coterie.cli.models", "coterie.report.page", "coterie.select.tune"),
    *("polars", "plotly.graph_objects", "plotly.offline", "jinja2", "optuna", "onnx", "onnxruntime"),
    *("transformers", "peft", "tokenizers", "coterie.train.export_onnx", "coterie.train.export_torchscript"),
)
POLL = 0.02  # seconds


def warm_up() -> None:
    """Import what commands import; what is not installed is left to the command that needs it."""
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "HF_HUB_OFFLINE": "1"}
    for name in NEEDED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


class Process:
    """A command that runs.

    Parameters
    ----------
    words
        Arguments of `coterie`.
    said
        File for what it says.
    watched, nth
        A folder, and at which of its changes to die; 0 never dies. A negative number dies at the same change, but
        first cuts a file in half that is about to be renamed, as a disk does that lost power.
    counts
        File for the number of changes and the seconds until the first.
    """

    def __init__(
        self,
        words: list[str],
        said: Path,
        watched: Path | None = None,
        nth: int = 0,
        counts: Path | None = None,
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.said = said
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.setsid()
                with open(said, "wb") as stream:
                    os.dup2(stream.fileno(), 1)
                    os.dup2(stream.fileno(), 2)
                codes: list[int] = []  # in a thread, since TorchScript writes down the stack of its callers
                run = threading.Thread(target=lambda: codes.append(_run(words, watched, nth, counts)))
                run.start()
                run.join()
                code = codes[0]
            finally:
                os._exit(code)

    def wait(self, limit: float) -> int | None:
        """Return the exit code, minus the signal that ended it; None if it runs on."""
        end = time.monotonic() + limit
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                return None
            time.sleep(POLL)

    def kill(self) -> int:
        """Kill it and all that it started, and return its exit code."""
        os.killpg(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def path_of(event: str, arguments: tuple[Any, ...]) -> str | None:
    """Return the path that an audit event is about to change, or None."""
    if event == "open":
        path, _, flags = arguments
        changes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return os.fspath(path) if changes and isinstance(path, str | os.PathLike) else None
    if event in CHANGES and isinstance(arguments[0], str | os.PathLike):
        return os.fspath(arguments[0])
    return None


def _run(words: list[str], watched: Path | None, nth: int, counts: Path | None) -> int:
    """Run a command, count changes, and die at the one that was asked for."""
    from coterie.cli import main

    folder, began, seen, first = str(watched and watched.absolute()), time.monotonic(), 0, 0.0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen, first
        path = path_of(event, arguments)
        if path is None or not os.path.abspath(path).startswith(folder):
            return
        seen += 1
        first = first or time.monotonic() - began
        if seen == abs(nth):
            if nth < 0 and event == "os.rename" and os.path.isfile(path):
                os.truncate(path, os.path.getsize(path) // 2)
            os.killpg(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    code = 0
    try:
        main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    if counts is not None:
        counts.write_text(f"{seen} {first}")
    return code

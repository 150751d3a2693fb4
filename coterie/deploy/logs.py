"""Logs of servers and nodes: lines for people, or one JSON object a line for programs."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from coterie._core import files
from coterie._core.errors import CoterieError, SettingError
from coterie._core.printable import printable
from coterie.deploy.job import NOTES, PROGRESS

FORMATS = ("text", "json")
WARNING = "warning: "
LOOK_EVERY = 1.0  # seconds
MOST_AT_ONCE = 64 << 10  # bytes of new notes that are read at a time


class Log:
    """Writes messages of a server or a node, each on a line of its own.

    Parameters
    ----------
    who
        Name of the server or node.
    form
        'text' or 'json'.
    stream
        Where to write; standard output if not given.

    Examples
    --------
    >>> log = Log("cleveland", "text")
    >>> log("warning: the certificate expires in 3 days")
    cleveland: warning: the certificate expires in 3 days
    """

    def __init__(self, who: str, form: str = "text", stream: TextIO | None = None) -> None:
        if form not in FORMATS:
            raise SettingError(f"--log {form!r}: choose 'text' or 'json'")
        self.who, self.form, self.stream = who, form, stream
        self._lock = threading.Lock()

    def __call__(self, text: str, level: str = "info", **fields: Any) -> None:
        """Write a message; `fields` say the same to programs."""
        if text.startswith(WARNING):
            level = "warning"
        if self.form == "json":
            text = text.removeprefix(WARNING)
            at = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            line = json.dumps({"time": at, "level": level, "who": self.who, "message": text, **fields})
        else:
            line = f"{self.who}: {printable(text, 2000)}" if self.who else printable(text, 2000)
        with self._lock, contextlib.suppress(OSError):  # a full disk of the log stops nobody
            print(line, file=self.stream or sys.stdout, flush=True)

    def take_over(self) -> None:
        """Write what libraries have to say (Python's `logging`) in the same form; text is left to them."""
        if self.form == "json":
            logging.basicConfig(level=logging.WARNING, handlers=[_Records(self)], force=True)


class _Records(logging.Handler):
    """Hands records of Python's `logging` to a log."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        self.log(record.getMessage(), record.levelname.lower(), logger=record.name)


class JobWatcher:
    """Tells the server's log what happens in runs: their states, and the notes about nodes.

    Parameters
    ----------
    jobs
        The folder with a folder for each job.
    log
        Receives the messages.
    """

    def __init__(self, jobs: Path, log: Log) -> None:
        self.jobs, self.log = jobs, log
        self._states = {job.name: self._state(job) for job in self._folders()}
        self._read = {job.name: _size(job / NOTES) for job in self._folders()}

    def start(self) -> None:
        """Look every second, in a thread of its own."""
        threading.Thread(target=self._watch, args=(threading.Event(),), daemon=True).start()

    def _watch(self, never: threading.Event) -> None:
        while not never.wait(LOOK_EVERY):
            self.look()

    def look(self) -> None:
        """Tell what is new."""
        for job in self._folders():
            for line in self._notes(job):
                self.log(f"{job.name}: {line}", "warning", run=job.name, note=line)
            told = self._state(job)
            if told and told != self._states.get(job.name):
                self._states[job.name] = told
                state, rounds, problem = told
                fields: dict[str, Any] = {"run": job.name, "state": state, "rounds": rounds}
                reason = f": {problem}" if problem else ""
                level = "error" if state == "failed" else "info"
                self.log(
                    f"{job.name}: {state}{reason}", level, **fields, **({"error": problem} if problem else {})
                )

    def _folders(self) -> list[Path]:
        return sorted(path for path in self.jobs.glob("*") if path.is_dir())

    def _state(self, job: Path) -> tuple[str, int, str] | None:
        try:
            told = files.read_json(job / PROGRESS)
            return printable(told["state"]), int(told["rounds"]), printable(told.get("error") or "", 1000)
        except (CoterieError, OSError, KeyError, TypeError, ValueError):
            return None

    def _notes(self, job: Path) -> list[str]:
        """Return the whole lines that are new; a line that is being written waits."""
        begin = self._read.get(job.name, 0)
        if _size(job / NOTES) <= begin:
            return []
        with open(job / NOTES, "rb") as stream:
            stream.seek(begin)
            new = stream.read(MOST_AT_ONCE)
        whole = new[: new.rfind(b"\n") + 1] or (new if len(new) == MOST_AT_ONCE else b"")
        self._read[job.name] = begin + len(whole)
        return [printable(line[9:], 1000) for line in whole.decode("utf-8", "replace").splitlines()]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0

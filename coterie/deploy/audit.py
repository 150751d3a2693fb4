"""A tamper-evident log: every line has the hash of the line before it.

Whoever changes, removes or inserts a line breaks the chain at that place. Whoever cuts the end off, or writes the whole
log anew, is found by comparing with the other side: each node's answers carry the hash of its newest line, which the
server's log keeps (`verify` with `heads`).
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from coterie._core import files
from coterie._core.errors import CoterieError, RunError
from coterie._core.printable import printable

START = "0" * 64
FILE = "audit.log"


class AuditError(CoterieError):
    """A log that was changed, or cannot be written."""


class AuditLog:
    """Appends entries to a log file; an entry is on disk when `write` returns.

    Parameters
    ----------
    path
        The file; it is continued if it exists, and must be whole.
    sync
        Whether an entry is on disk, not only with the operating system, when `write` returns.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = AuditLog(Path(folder) / "audit.log")
    ...     first = log.write(what="started")
    ...     second = log.write(what="stopped")
    ...     [entry["what"] for entry in verify(log.path)]
    ['started', 'stopped']
    """

    def __init__(self, path: Path, sync: bool = True) -> None:
        self.path, self.sync = path, sync
        self.entries, self.head = 0, START
        if path.exists():
            for self.entries, entry in enumerate(verify(path), 1):
                self.head = entry["hash"]

    def write(self, **entry: Any) -> str:
        """Append an entry and return its hash; raise `AuditError` if it cannot be stored."""
        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        content = {"n": self.entries + 1, "at": at, **_plain(entry), "before": self.head}
        head = _hash(content)
        line = json.dumps({**content, "hash": head}, sort_keys=True) + "\n"
        try:
            files.append(self.path, line.encode(), self.sync)  # no half line: the log stays readable
        except OSError as problem:
            raise AuditError(f"{self.path} cannot be written ({problem.strerror or problem})") from problem
        self.entries, self.head = self.entries + 1, head
        return head


def verify(path: Path, heads: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the entries of a log, checking the chain.

    Parameters
    ----------
    path
        The log.
    heads
        Hashes that the other side has seen of this log; all of them must be in it.

    Raises
    ------
    AuditError
        Names the first line that does not fit, or says how many hashes are missing.
    """
    before, missing = START, set(heads) - {START}
    try:
        with open(path, encoding="utf-8", newline="\n") as stream:
            for number, line in enumerate(stream, 1):
                entry = _entry(line)
                found = entry.pop("hash", None)
                whole = entry.get("n") == number and entry.get("before") == before and found == _hash(entry)
                if not whole or not line.endswith("\n"):
                    raise AuditError(
                        f"{path}, line {number}: the chain is broken; this line or one before was changed"
                    )
                before = str(found)
                missing.discard(before)
                yield {**entry, "hash": before}
    except FileNotFoundError:
        raise RunError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise AuditError(f"{path} cannot be read ({problem})") from None
    if missing:
        raise AuditError(
            f"{path}: {len(missing)} entries that the other side has seen are not in it; its end was cut off, or it "
            "was written anew"
        )


def heads_seen(path: Path, node: str) -> list[str]:
    """Return the hashes of a node's log that a server's log, which is verified, has kept."""
    return [str(entry["head"]) for entry in verify(path) if entry.get("node") == node and entry.get("head")]


def _entry(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry with its texts made safe to print."""
    return {
        name: value if value is None or isinstance(value, bool | int | float) else printable(value)
        for name, value in entry.items()
    }

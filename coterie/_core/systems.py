"""Where operating systems differ: flushing, replacing and locking files, secrets, and processes.

Everything else in the package uses what Linux, macOS and Windows have in common. Callers never ask which system it is.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

from coterie._core.errors import SettingError

_PATIENCE = 2.0  # seconds that another program, such as a virus scanner, may hold a file open on Windows
_NO_FOLDER_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EISDIR, errno.EBADF}
_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{k}" for port in ("com", "lpt") for k in range(10))}


def maps_block_files() -> bool:
    """Return True where a file that is mapped into memory cannot be replaced or removed."""
    return sys.platform == "win32"


def flush(descriptor: int) -> None:
    """Write a file through to the disk; on macOS past the disk's own cache, which fsync leaves alone there."""
    if sys.platform == "darwin":
        import fcntl

        with contextlib.suppress(OSError):  # some file systems do not offer it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def flush_folder(path: Path) -> None:
    """Write the names in a folder to the disk, where the system lets one; Windows does so by itself."""
    if sys.platform == "win32":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as problem:  # network and FUSE file systems may not know how
        if problem.errno not in _NO_FOLDER_FLUSH:
            raise
    finally:
        os.close(folder)


def replace(source: Path, target: Path) -> None:
    """Rename a file or folder; a file at `target` goes, and so does an empty folder.

    On Windows a file cannot be renamed while another program reads it, so this tries for two seconds.
    """
    if sys.platform == "win32" and target.is_dir():
        target.rmdir()
    _patiently(lambda: os.replace(source, target))


def discard(path: Path) -> None:
    """Remove a file if it is there; on Windows one that is in use goes when this process ends."""
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        if sys.platform != "win32":
            raise
        atexit.register(_try_to_remove, path)


def _try_to_remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _patiently(act: Any) -> None:
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            act()
            return
        except PermissionError:
            if sys.platform != "win32" or time.monotonic() > end:
                raise
            time.sleep(0.05)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Lock a file until the block or the process ends; yield False if another process has locked it."""
    with open(path, "a+", encoding="utf-8") as stream:
        yield _lock(stream)


def _lock(stream: IO[str]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            stream.seek(0)
            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def file_names(names: Iterable[str]) -> list[str]:
    """Return names of files for these texts that every system allows, different even where case does not count.

    Parameters
    ----------
    names
        Any texts, such as names of clients.

    Returns
    -------
    list of str
        In the same order; where two would be alike, all begin with their number.

    Examples
    --------
    >>> file_names(["north/east: 1", "con", ".."])
    ['north_east_1', '_con', '_']
    >>> file_names(["A", "a"])
    ['0-A', '1-a']
    """
    made = [re.sub(r"[^\w.-]+", "_", name).strip("._") or "_" for name in names]
    made = [f"_{name}" if name.partition(".")[0].lower() in _RESERVED else name for name in made]
    if len({name.casefold() for name in made}) < len(made):
        return [f"{k}-{name}" for k, name in enumerate(made)]
    return made


def private_folder(path: Path) -> Path:
    """Create a folder, and those above it, that only its owner can read; return it."""
    if not path.exists():
        private_folder(path.parent)
        path.mkdir(mode=0o700)
        keep_private(path)
    return path


def keep_private(path: Path) -> None:
    """Let only its owner read a file or folder that exists."""
    if sys.platform != "win32":
        path.chmod(0o700 if path.is_dir() else 0o600)
        return
    rights = "(OI)(CI)F" if path.is_dir() else "F"
    command = ["icacls", str(path), "/inheritance:r", "/grant:r", f"*S-1-3-4:{rights}"]  # S-1-3-4: the owner
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise SettingError(f"{path} cannot be kept from other users: {done.stdout or done.stderr}".strip())


def open_private(path: Path, flags: int) -> int:
    """Return a descriptor of a file for bytes; one that is new can be read by its owner only.

    Parameters
    ----------
    path
        The file.
    flags
        As for `os.open`, such as `os.O_WRONLY | os.O_CREAT | os.O_EXCL`.
    """
    new = not path.exists()
    descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o600)
    if new and sys.platform == "win32":
        keep_private(path)
    return descriptor


def others_can_read(path: Path) -> bool:
    """Return True if other users may read a file. Windows has lists in place of bits, which are not looked at."""
    return sys.platform != "win32" and bool(path.stat().st_mode & 0o077)


def is_alive(pid: int) -> bool:
    """Return True if a process runs; one that has ended and that its parent has not asked about yet does not."""
    if sys.platform == "win32":  # os.kill(pid, 0) would send it Ctrl-C
        kernel: Any = ctypes.WinDLL("kernel32")
        handle, code = kernel.OpenProcess(0x1000, False, pid), ctypes.c_ulong()
        kernel.GetExitCodeProcess(handle, ctypes.byref(code))
        kernel.CloseHandle(handle)
        return bool(handle) and code.value == 259
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _has_ended(pid)


def _has_ended(pid: int) -> bool:
    """Return True for a zombie, to which signals can still be sent."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
        return True
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return told.startswith("Z")


def apart() -> dict[str, Any]:
    """Return arguments of `Popen` for a process that Ctrl-C does not reach; on Linux it dies with its parent."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    if sys.platform == "linux":
        return {"start_new_session": True, "preexec_fn": _die_with_parent}
    return {"start_new_session": True}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def wait_for_orphanhood() -> None:
    """Return when the parent of this process is gone."""
    parent = os.getppid()
    while os.getppid() == parent and is_alive(parent):
        time.sleep(0.2)


def end(process: subprocess.Popen[bytes], within: float) -> None:
    """End a process that was started with `apart`, and what it has started.

    Parameters
    ----------
    process
        The process.
    within
        Seconds that it has to end by itself.
    """
    if sys.platform == "win32":
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True, check=False)
        process.wait()
        return
    process.send_signal(signal.SIGCONT)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: the group is gone already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def become(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Let a program take the place of this process; where that is not possible, wait for it and exit as it does.

    Parameters
    ----------
    words
        Name of the program and its arguments.
    environment
        Its environment variables; `PATH` says where the program is.
    """
    program = shutil.which(words[0], path=environment["PATH"])
    if program is None:
        raise SettingError(f"{words[0]} is not installed, or not in PATH")
    if (
        sys.platform == "win32"
    ):  # os.execve would return to the shell at once, and splits arguments at their spaces
        raise SystemExit(subprocess.run([program, *words[1:]], env=environment, check=False).returncode)
    os.execve(program, list(words), environment)


def error_of(number: int) -> OSError:
    """Return the system's error of this number, which Windows counts in its own way."""
    if sys.platform == "win32":
        found: OSError = ctypes.WinError(number)
        return found
    return OSError(number, os.strerror(number))


def quoted(words: Sequence[str]) -> str:
    """Return a command as one types it into the system's shell; Windows knows no single quotes."""
    return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)


def script(words: Sequence[str]) -> tuple[str, str]:
    """Return name and content of a script that runs a command in the script's folder, with the caller's arguments."""
    if sys.platform == "win32":
        line = quoted(words).replace("%", "%%")
        return "start.cmd", f'@chcp 65001 >nul\r\n@cd /d "%~dp0" && {line} %*\r\n'
    return "start.sh", f'#!/bin/sh\ncd "$(dirname "$0")" && exec {quoted(words)} "$@"\n'


def find_program(names: Iterable[str]) -> str | None:
    """Return the first of these programs that is installed, or None.

    Parameters
    ----------
    names
        As one types them, such as `chromium`; where Windows and macOS put programs that are not typed, files such as
        `Google/Chrome/Application/chrome.exe` and `Google Chrome.app`.
    """
    for name in names:
        if name.endswith(".exe"):
            homes = ("PROGRAMFILES", "PROGRAMFILES(X86)", "LOCALAPPDATA") if sys.platform == "win32" else ()
            places = [Path(os.environ[home], name) for home in homes if os.environ.get(home)]
        elif name.endswith(".app"):
            inside = Path(name, "Contents", "MacOS", name.removesuffix(".app"))
            roots = ["/Applications", str(Path.home() / "Applications")]
            places = [Path(root, inside) for root in roots] if sys.platform == "darwin" else []
        else:
            places = [Path(found)] if (found := shutil.which(name)) else []
        if there := next((place for place in places if place.exists()), None):
            return str(there)
    return None


def has_libuv() -> bool:
    """Return True where torch is built with libuv, which its TCP stores take for granted; on Windows it is not."""
    return sys.platform != "win32"

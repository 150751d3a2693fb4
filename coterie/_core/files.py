"""Files that are written whole or not at all: under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import errno
import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from coterie._core import broadcast, manifest, systems
from coterie._core.errors import RunError
from coterie._core.manifest import sha256
from coterie._core.panics import panics_as_errors

if TYPE_CHECKING:
    import polars

__all__ = ["sha256"]

_RESTORE = "Restore it from a copy, or train again."


def write_with(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to disk, and rename it to `path`."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _telling_errors(write, temporary)
            with open(temporary, "rb+") as stream:
                systems.flush(stream.fileno())
            systems.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        systems.flush_folder(path.parent)
    except OSError as problem:
        why = problem.strerror or str(problem)
        raise RunError(
            f"{path} cannot be written ({why}). Choose another place, or see to permissions and free space."
        ) from problem


def _telling_errors(write: Callable[[Path], object], path: Path) -> None:
    """Call `write`; errors of the system that polars and safetensors have as text only become those of Python."""
    try:
        write(path)
    except OSError:
        raise
    except Exception as problem:
        number = re.search(r"\(os error (\d+)\)", str(problem))
        if number is None:
            raise
        raise systems.error_of(int(number[1])) from problem


def require_writable(path: Path) -> None:
    """Raise a RunError, before any work is done, if nothing can be written at this path."""
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise RunError(f"{path} cannot be made: {parent} is a file, not a folder. Choose another place.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RunError(f"{path} cannot be made: {parent} may not be written to. Choose another place.")


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8."""
    write_with(path, lambda temporary: temporary.write_bytes(text.encode()))


def append(path: Path, content: bytes, sync: bool = True) -> None:
    """Append to a file, all of it or nothing; a new file can be read by its owner only.

    Parameters
    ----------
    path
        The file.
    content
        What to append.
    sync
        Whether it is on disk, not only with the operating system, on return.

    Raises
    ------
    OSError
        The file is as it was.
    """
    descriptor = systems.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                systems.flush(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def seal(folder: Path, name: str, text: str) -> None:
    """Write the manifest of a run folder, then the last of its files, which makes the folder valid or complete."""
    write_text(folder / manifest.MANIFEST, manifest.render(folder, {name: text}))
    write_text(folder / name, text)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON; NaN and infinity are refused."""
    write_text(path, as_json(value))


def as_json(value: Any) -> str:
    """Return the text that `write_json` writes."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """Read a JSON file of a run folder."""
    manifest.check(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} does not exist; is {path.parent} a run folder?") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise RunError(f"{path} is damaged ({problem}). {_RESTORE}") from None


def read_parquet(path: Path) -> polars.DataFrame:
    """Read a Parquet file of a run folder."""
    import polars as pl

    manifest.check(path)
    try:
        with panics_as_errors():
            return pl.read_parquet(path, glob=False)
    except FileNotFoundError:
        raise RunError(f"{path} does not exist; is {path.parent} a run folder?") from None
    except (pl.exceptions.PolarsError, OSError) as problem:
        raise RunError(f"{path} is damaged ({problem}). {_RESTORE}") from None


def write_tensors(path: Path, tensors: dict[str, Tensor], note: dict[str, Any] | None = None) -> None:
    """Write tensors as safetensors, with an optional JSON note in the header.

    A stack whose rows are all equal, such as FedAvg's models, is written as one row and its count.
    """
    from safetensors.torch import save_file

    shared = {name: len(value) for name, value in tensors.items() if broadcast.is_broadcast(value)}
    rows = {name: value[:1] if name in shared else value for name, value in tensors.items()}
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in rows.items()}
    notes = {"note": note, "shared": shared or None}
    metadata = {name: json.dumps(value) for name, value in notes.items() if value is not None}

    write_with(path, lambda temporary: save_file(plain, temporary, metadata=metadata or None))


def disk_is_full(problem: BaseException) -> bool:
    """Return True if an error, or one that led to it, is that of a disk without space.

    Examples
    --------
    >>> disk_is_full(OSError(errno.ENOSPC, "No space left on device")), disk_is_full(ValueError())
    (True, False)
    """
    cause: BaseException | None = problem
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        cause = cause.__cause__
    return False


def read_tensors(path: Path, expected: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the note of a file that `write_tensors` wrote.

    Damage raises a RunError; with the `expected` SHA-256 even one changed byte does.
    """
    from safetensors import SafetensorError, safe_open

    if expected is not None and path.exists() and sha256(path) != expected:
        raise RunError(f"{path} is damaged: it does not match its recorded hash. {_RESTORE}")
    if expected is None:
        manifest.check(path)
    try:
        with safe_open(path, framework="pt") as stream:
            header = stream.metadata() or {}
            note, shared = (json.loads(header.get(name, "{}")) for name in ("note", "shared"))
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}
            if systems.maps_block_files():
                tensors = {name: value.clone() for name, value in tensors.items()}
            for name, count in shared.items():
                tensors[name] = tensors[name][0].expand(count, *tensors[name].shape[1:])
            return tensors, note
    except FileNotFoundError:
        raise RunError(f"{path} does not exist") from None
    except (SafetensorError, json.JSONDecodeError, KeyError, OSError) as problem:
        raise RunError(f"{path} is damaged ({problem}). {_RESTORE}") from None


def write_toml(path: Path, tables: dict[str, Any]) -> None:
    """Write plain TOML: values at the top, then one table for each nested dict."""
    write_text(path, as_toml(tables))


def as_toml(tables: dict[str, Any]) -> str:
    """Return the text that `write_toml` writes."""
    lines = [f"{key} = {_toml(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += [
                "",
                f"[{name}]",
                *(f"{key} = {_toml(value)}" for key, value in table.items() if value is not None),
            ]
    return "\n".join(lines).lstrip() + "\n"


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    manifest.check(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise RunError(f"{path}: {problem}") from None


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(str(value), ensure_ascii=False)

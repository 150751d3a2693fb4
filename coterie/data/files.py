"""Open data files: compressed or not, in folders or tar archives, with errors that name the file."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from coterie._core.errors import DataError

_STREAMS: dict[str, tuple[bytes, Callable[[bytes], bytes]]] = {
    ".gz": (b"\x1f\x8b", gzip.decompress),
    ".bz2": (b"BZh", bz2.decompress),
    ".xz": (b"\xfd7zXZ\x00", lzma.decompress),
}
_BROKEN = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error, tarfile.TarError)
_BLOCK = 512


def read_bytes(path: str | Path) -> bytes:
    """Return the contents of a file, decompressed if it is gzip, bzip2 or xz."""
    path = existing(path)
    if path.is_dir():
        raise DataError(f"{path} is a folder; give a file")
    raw = _read(path)
    for suffix, (magic, decompress) in _STREAMS.items():
        if raw.startswith(magic):
            return _filled(path, _decompressed(path, raw, decompress))
        if path.suffix == suffix and raw:
            raise DataError(
                f"{path} is named {suffix} but is no {suffix} stream; rename it or fetch it again"
            )
    return _filled(path, raw)


def read_text(path: str | Path) -> str:
    """Return the contents of a UTF-8 file; an error names the line of a byte that is not UTF-8."""
    return decode(read_bytes(path), str(path))


def decode(raw: bytes, where: str) -> str:
    """Return bytes as UTF-8 text."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{where}, line {line}: byte 0x{raw[error.start]:02x} is not UTF-8; convert the file to UTF-8"
        ) from None


def members(
    path: str | Path, wanted: Callable[[PurePosixPath], bool]
) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Yield name and contents of the wanted files of a folder (sorted) or of a tar archive (in its order).

    Nothing is unpacked to disk; links and special files in an archive are skipped.

    Parameters
    ----------
    path
        The folder or archive.
    wanted
        Whether to read the file of a name.

    Returns
    -------
    Iterator
        Names, relative to the folder or archive, and contents.
    """
    path = existing(path)
    return _folder_members(path, wanted) if path.is_dir() else _archive_members(path, wanted)


def existing(path: str | Path) -> Path:
    """Return the path, or raise an error if nothing is there."""
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path} does not exist; check the name or fetch the data first")
    return path


def _folder_members(
    folder: Path, wanted: Callable[[PurePosixPath], bool]
) -> Iterator[tuple[PurePosixPath, bytes]]:
    inside = PurePosixPath(folder.resolve().name)
    for file in sorted(folder.rglob("*")):
        name = inside / file.relative_to(folder).as_posix()
        if file.is_file() and wanted(name):
            yield name, _read(file)


def _archive_members(
    path: Path, wanted: Callable[[PurePosixPath], bool]
) -> Iterator[tuple[PurePosixPath, bytes]]:
    try:
        archive = tarfile.open(path)
    except _BROKEN as error:
        raise DataError(
            f"{path} is neither a folder nor a readable tar archive ({_first_line(error)})"
        ) from None
    with archive:
        while (entry := _next(archive, path)) is not None:
            name = PurePosixPath(entry.name)
            if entry.isfile() and wanted(name):
                yield name, _contents(archive, entry, path)


def _next(archive: tarfile.TarFile, path: Path) -> tarfile.TarInfo | None:
    """Return the next entry, and check the closing block of zeros, since tarfile ends silently at a damaged header."""
    try:
        entry = archive.next()
        if entry is None and archive.fileobj is not None:
            archive.fileobj.seek(archive.offset)
            if archive.fileobj.read(_BLOCK) != bytes(_BLOCK):
                raise EOFError("no end-of-archive mark")
        return entry
    except _BROKEN as error:
        raise _damaged(path, error) from None


def _contents(archive: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> bytes:
    try:
        stream = archive.extractfile(entry)
        return stream.read() if stream is not None else b""
    except _BROKEN as error:
        raise _damaged(path, error) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None


def _decompressed(path: Path, raw: bytes, decompress: Callable[[bytes], bytes]) -> bytes:
    try:
        return decompress(raw)
    except _BROKEN as error:
        raise _damaged(path, error) from None


def _filled(path: Path, raw: bytes) -> bytes:
    if not raw:
        raise DataError(f"{path} is empty; fetch it again")
    return raw


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is truncated or corrupt ({_first_line(error)}); fetch it again")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]

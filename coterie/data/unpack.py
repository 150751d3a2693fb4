"""Read files whole, unpacked where they are packed, within a limit of memory."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie._core.errors import DataError
from coterie._core.panics import panics_as_errors

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
MEMORY_PER_BYTE = 10  # what reading a byte of text takes at most, measured
MOST_RATIO = 200  # tables are packed 3 to 50 times; what unpacks further is not a table
_SMALL = 1 << 26  # up to here the ratio does not matter
_PIECE = 1 << 22
_BLOCK = 1 << 17  # bytes that a block of zstandard holds at most


def most_bytes() -> int:
    """Return how large a table may be in memory: half of the machine's memory, or COTERIE_MEMORY gigabytes."""
    wanted = os.environ.get("COTERIE_MEMORY", "")
    try:
        if wanted:
            return int(float(wanted) * 1e9)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (ValueError, OSError, AttributeError, OverflowError):
        return 4 << 30


def require_memory(path: Path, needed: int, what: str) -> None:
    """Raise a DataError if reading a file takes more memory than there is for it.

    Parameters
    ----------
    path
        The file, for the message.
    needed
        Bytes it takes in memory.
    what
        What the file holds, for the message.
    """
    if needed > most_bytes():
        raise DataError(
            f"{path}: {what} would take about {needed / 1e9:.1f} GB of memory, more than the {most_bytes() / 1e9:.1f} "
            "GB that are allowed. Take fewer rows or columns, or raise the limit with COTERIE_MEMORY=GIGABYTES."
        )


def read_bytes(path: Path) -> bytes:
    """Return the contents of a file, unpacked by its suffix.

    Parameters
    ----------
    path
        A file, plain or .gz, .bz2, .xz, .zst.

    Returns
    -------
    bytes
        The contents.

    Raises
    ------
    DataError
        If the file cannot be read or unpacked, or takes too much memory.
    """
    suffix = path.suffix.lower()
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    try:
        if suffix == ".zst":
            return _unpack_zstandard(path)
        with openers.get(suffix, open)(path, "rb") as stream:
            return _read(path, stream, suffix in openers)
    except PermissionError:
        raise DataError(f"{path}: you may not read this file. Change its permissions.") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(
            f"{path}: cannot be unpacked ({error}). The file is truncated or is not a {suffix} file: "
            "copy or download it again."
        ) from None


def _read(path: Path, stream: Any, packed: bool) -> bytes:
    """Read a stream piece by piece, and stop where it becomes too much."""
    pieces, size = [], 0
    while piece := stream.read(_PIECE):
        pieces.append(piece)
        size += len(piece)
        _require_size(path, size, packed)
    return b"".join(pieces)


def _require_size(path: Path, size: int, packed: bool) -> None:
    if packed and size > max(_SMALL, MOST_RATIO * path.stat().st_size):
        raise DataError(
            f"{path}: unpacks to more than {MOST_RATIO} times its size, so it is not a table. If it is one, unpack it "
            "before."
        )
    require_memory(path, MEMORY_PER_BYTE * size, f"text of more than {size / 1e6:.0f} MB")


def _unpack_zstandard(path: Path) -> bytes:
    """Decompress with polars, since Python 3.11 has no zstandard: read one text cell, bad bytes marked 0xff."""
    import polars as pl

    _require_size(path, _most_unpacked(path.read_bytes()), True)

    def cells(encoding: str) -> str:
        frame = pl.read_csv(
            path,
            has_header=False,
            schema={"text": pl.String},
            separator="\x1c",
            eol_char="\x1d",
            quote_char=None,
            encoding=encoding,
            glob=False,
        )
        return "\x1d".join(cell or "" for cell in frame["text"])

    try:
        with panics_as_errors():
            return cells("utf8").encode()
    except pl.exceptions.ComputeError as error:
        if "utf-8" not in str(error):
            raise OSError(str(error)) from None
    data = cells("utf8-lossy").replace("\ufffd", "\udcff").encode("utf-8", "surrogateescape")
    if data.startswith(b"\x28\xff\x2f\xff"):  # older polars hands a damaged file over still packed
        raise OSError("incomplete frame")
    return data


def _most_unpacked(data: bytes) -> int:
    """Return how many bytes zstandard frames unpack to at most, from the headers of their blocks (RFC 8878)."""
    total, at = 0, 0
    while at + 5 <= len(data):
        number = int.from_bytes(data[at : at + 4], "little")
        if number & 0xFFFFFFF0 == 0x184D2A50:  # a frame to skip
            at += 8 + int.from_bytes(data[at + 4 : at + 8], "little")
            continue
        flags = data[at + 4]
        single, dictionary, size = bool(flags & 32), (0, 1, 2, 4)[flags & 3], flags >> 6
        at += 5 + (not single) + dictionary + ((1 if single else 0), 2, 4, 8)[size]
        last = False
        while not last and at + 3 <= len(data):
            header = int.from_bytes(data[at : at + 3], "little")
            last, kind, length = bool(header & 1), header >> 1 & 3, header >> 3
            at += 3 + (1 if kind == 1 else length)
            total += _BLOCK if kind == 2 else length
        at += 4 * bool(flags & 4)
    return total

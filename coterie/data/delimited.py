"""Read delimited text into a frame of text columns, with errors that name the line.

Well-formed files go through polars. Anything irregular goes through the csv module, which is slower but either copes
(blank lines, stray quotes, spaces before quotes) or says at which line it cannot.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coterie._core.errors import DataError
from coterie.data.unpack import COMPRESSIONS, read_bytes

if TYPE_CHECKING:
    import polars

SUFFIXES = (".csv", ".tsv", ".tab", ".txt")
_QUOTE, _NEWLINE, _RETURN = b'"\n\r'


def is_delimited(path: Path) -> bool:
    """Return True if the name ends like delimited text, compressed or not."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in SUFFIXES


def load(path: Path) -> tuple[polars.DataFrame, str]:
    """Return every column as text, exactly as in the file, and the separator that was found."""
    data = _content(path)
    text = _decode(path, data)
    separator = _separator(path, text)
    records = _records(path, text, separator)
    names = _names(path, next(records)[1])
    first = list(itertools.islice(records, 1))
    if first and len(names) > 1 and _regular(data, separator, len(names)):
        frame = _parse(data, separator, names)
        if frame is not None:
            return frame, separator
    return _parse_slowly(path, itertools.chain(first, records), names), separator


def lines(path: Path) -> list[int]:
    """Return the line on which each data row starts (slow: for error messages)."""
    text = _decode(path, _content(path))
    records = _records(path, text, _separator(path, text))
    return [line for line, _ in records][1:]


def _content(path: Path) -> bytes:
    """Return the file decompressed, without a byte order mark, with line ends that polars knows."""
    data = read_bytes(path)
    data = data.removeprefix(codecs.BOM_UTF8)
    if not data.strip():
        raise DataError(f"{path}: the file is empty. Expected a line of column names, then one line per row.")
    return data if b"\n" in data else data.replace(b"\r", b"\n")


def _decode(path: Path, data: bytes) -> str:
    """Return the text, or raise an error that says where it stops being UTF-8."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        guess, encoding = ("UTF-16", "utf-16") if wide else ("latin-1 (Western Excel)", "latin1")
        raise DataError(
            f"{path}: the byte at offset {error.start} (line {line}) is not UTF-8. If the file is {guess}, "
            f'save it from Excel as "CSV UTF-8", or convert it: {_conversion(path, encoding)}'
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DataError(
            f"{path}: line {line} holds a NUL character, so this is not a text table. If it is UTF-16, "
            f"convert it: {_conversion(path, 'utf-16le')}"
        )
    return text


def _conversion(path: Path, encoding: str) -> str:
    """Return the command that converts the file to UTF-8."""
    plain = path.name.removesuffix(path.suffix) if path.suffix.lower() in COMPRESSIONS else path.name
    unpack = "" if plain == path.name else "unpack it, then "
    return f"{unpack}iconv -f {encoding} -t utf-8 {plain} > utf8-{plain}"


def _separator(path: Path, text: str) -> str:
    """Return the separator that cuts the first lines alike and into most values, or failing that the header."""
    tabbed = any(suffix.lower() in (".tsv", ".tab") for suffix in path.suffixes)
    start = text[: 1 << 20]

    def score(separator: str) -> tuple[bool, int]:
        records = (
            len(fields)
            for fields in csv.reader(io.StringIO(start, newline=""), delimiter=separator)
            if fields
        )
        try:
            header, *rows = itertools.islice(records, 20)
        except csv.Error:
            return False, 0
        return header > 1 and all(row == header for row in rows), header

    return max("\t,;|" if tabbed else ",;\t|", key=score)


def _records(path: Path, text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (first line, fields) of every record that is not blank, the header included."""
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True
    )
    line = 1
    try:
        for fields in reader:
            if len(fields) > 1 or "".join(fields).strip():
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}: line {line}: cannot be cut into values ({error}). Close the quotes, and write a quote "
            'inside a quoted value twice ("").'
        ) from None


def _names(path: Path, header: list[str]) -> list[str]:
    """Return column names without surrounding spaces; a nameless column is named after its position."""
    names = [name.strip() or f"column_{place}" for place, name in enumerate(header, 1)]
    for name, count in Counter(names).items():
        if count > 1:
            places = ", ".join(str(place) for place, other in enumerate(names, 1) if other == name)
            raise DataError(
                f"{path}: {count} columns are called {name!r} (columns {places}). "
                "Rename or remove all but one."
            )
    return names


def _regular(data: bytes, separator: str, width: int) -> bool:
    """Return True if quotes only enclose whole values and every record has `width` values."""
    body = np.frombuffer(b"\n" + data.rstrip(b"\r\n") + b"\n", dtype=np.uint8)
    quote, newline, separators = body == _QUOTE, body == _NEWLINE, body == ord(separator)
    inside = (np.cumsum(quote, dtype=np.uint8) & 1).astype(bool)
    opening, closing = np.flatnonzero(quote & inside), np.flatnonzero(quote & ~inside)
    if len(opening) != len(closing):
        return False
    neighbour = quote | newline | separators
    if not (neighbour[opening - 1] & (neighbour | (body == _RETURN))[closing + 1]).all():
        return False
    ends = np.flatnonzero(newline & ~inside)
    cuts = np.flatnonzero(separators & ~inside)
    return bool((np.diff(np.searchsorted(cuts, ends)) == width - 1).all())


def _parse(data: bytes, separator: str, names: list[str]) -> polars.DataFrame | None:
    """Parse with polars, which is fast; return None if it finds fault with the file after all."""
    import polars as pl

    schema = dict.fromkeys(names, pl.String)
    try:
        return pl.read_csv(data, has_header=False, skip_rows=1, schema=schema, separator=separator)
    except pl.exceptions.PolarsError:
        return None


def _parse_slowly(path: Path, records: Iterator[tuple[int, list[str]]], names: list[str]) -> polars.DataFrame:
    """Parse with the csv module, which is slow but can say which line is too long or too short."""
    import polars as pl

    rows = []
    for line, fields in records:
        if len(fields) != len(names):
            raise DataError(
                f"{path}: line {line} has {len(fields)} values, but the header names {len(names)} columns. "
                "Add or remove separators there, and put quotes around values that contain one."
            )
        rows.append(fields)
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    return pl.DataFrame(
        {name: list(column) for name, column in zip(names, columns, strict=True)},
        schema=dict.fromkeys(names, pl.String),
    )

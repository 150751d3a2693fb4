"""Texts by client: a folder or file for each, or a table with a client and a text column."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie._core.errors import DataError, SettingError, nearest
from coterie.data import tables
from coterie.data.files import decode as as_text
from coterie.data.files import existing, read_bytes

_TABLES = (".csv", ".tsv", ".parquet", ".pq")
_PACKED = (".gz", ".bz2", ".xz", ".zst")
_BLANK = re.compile(r"\n[ \t]*\n")


@dataclass(frozen=True)
class Texts:
    """The documents of every client.

    Parameters
    ----------
    names
        Names of the clients.
    documents
        Documents of each client: one or more, none of them blank.

    Examples
    --------
    >>> from coterie.data.texts import Texts
    >>> Texts(["anna"], [["First letter.", "Second letter."]]).names
    ['anna']
    """

    names: list[str]
    documents: list[list[str]]

    def __post_init__(self) -> None:
        if not self.names:
            raise DataError("there are no clients; give texts of at least one")
        for name, documents in zip(self.names, self.documents, strict=True):
            if not documents:
                raise DataError(f"client {name!r} has no text; leave it out or give it some")


def read_texts(source: Any, client: str | None = None, text: str | None = None) -> Texts:
    """Read texts from a folder, a table or a dict.

    Parameters
    ----------
    source
        A folder in which every subfolder is a client and every file in it a document (a file directly in the
        folder is a client too, its documents separated by blank lines); a table, every row a document; or a dict
        of a text or a list of texts by client.
    client
        Name of the client column of a table.
    text
        Name of the text column of a table.

    Returns
    -------
    Texts
        Documents by client.

    Raises
    ------
    DataError
        If a client has no text, or a file cannot be read.

    Examples
    --------
    >>> from coterie.data.texts import read_texts
    >>> texts = read_texts({"who": ["b", "a", "b"], "said": ["one", "two", "three"]}, client="who", text="said")
    >>> texts.names, texts.documents
    (['a', 'b'], [['two'], ['one', 'three']])
    """
    if isinstance(source, Texts):
        return source
    if isinstance(source, Mapping) and client is None and text is None:
        return _from_mapping(source)
    if isinstance(source, str | os.PathLike):
        path = existing(Path(source))
        if path.is_dir():
            if client is not None or text is not None:
                raise SettingError(f"{path} is a folder; client= and text= name columns of a table")
            return _from_folder(path)
        if not _is_table(path):
            raise DataError(
                f"{path} is one file; put the texts of each client into a file or folder of its own, and name "
                "the folder around them (or give a CSV or Parquet table)"
            )
    return _from_table(source, client, text)


def _from_mapping(source: Mapping[Any, Any]) -> Texts:
    names, documents = [], []
    for name, texts in source.items():
        given = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Sequence) else None
        if given is None or not all(isinstance(one, str) for one in given):
            raise DataError(f"client {name!r}: give a text or a list of texts, not {type(texts).__name__}")
        names.append(str(name))
        documents.append([one for one in given if one.strip()])
    return Texts(names, documents)


def _from_folder(folder: Path) -> Texts:
    names, documents = [], []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            files = [file for file in sorted(entry.rglob("*")) if file.is_file() and _visible(file, entry)]
            found = [_read(file, entry.name) for file in files]
            name = entry.name
        else:
            name = entry.name.split(".")[0]
            found = _BLANK.split(_read(entry, name).replace("\r\n", "\n"))
        found = [one for one in found if one.strip()]
        if not found:
            raise DataError(f"{entry}: client {name!r} has no text; remove it or give it some")
        if name in names:
            raise DataError(f"{entry}: there are two clients {name!r}; rename one")
        names.append(name)
        documents.append(found)
    if not names:
        raise DataError(f"{folder} is empty; put a folder or file of text into it for each client")
    return Texts(names, documents)


def _visible(file: Path, folder: Path) -> bool:
    return not any(part.startswith(".") for part in file.relative_to(folder).parts)


def _read(file: Path, client: str) -> str:
    if file.stat().st_size == 0:
        return ""
    try:
        return as_text(read_bytes(file), str(file))
    except DataError as problem:
        raise DataError(f"client {client!r}: {problem}") from None


def _is_table(path: Path) -> bool:
    stem = path.with_suffix("") if path.suffix in _PACKED else path
    return stem.suffix.lower() in _TABLES


def _from_table(source: Any, client: str | None, text: str | None) -> Texts:
    where = str(source) if isinstance(source, str | os.PathLike) else "the table"
    if client is None or text is None:
        raise SettingError(f"{where}: say which columns hold client and text: client=..., text=...")
    frame = tables.read(source)
    for name in (client, text):
        if name not in frame.columns:
            raise DataError(f"{where}: there is no column {name!r}.{nearest(name, frame.columns)}")
    by_client: dict[str, list[str]] = {}
    for row, (who, what) in enumerate(zip(frame[client].to_list(), frame[text].to_list(), strict=True)):
        if who is None:
            raise DataError(f"{where}: row {row + 1} has no client; drop the row or give it one")
        documents = by_client.setdefault(str(who), [])
        if what is not None and str(what).strip():
            documents.append(str(what))
    names = sorted(by_client)
    return Texts(names, [by_client[name] for name in names])

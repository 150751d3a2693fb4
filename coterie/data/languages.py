"""Texts of several languages from annotated corpora: Universal Dependencies and sentences of Wikipedia."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from coterie._core.errors import DataError, SettingError
from coterie.data.files import decode, members
from coterie.data.texts import Texts

LANGUAGES = ("ca", "es", "de", "nl")
BLOCK = 20  # sentences that follow each other and are taken as a document where the file marks none
_OPENING = re.compile(r"([(\[„«¿¡]) ")
_CLOSING = re.compile(r" ([.,;:!?)\]%»“”])")


def conllu_languages(
    path: str | Path,
    languages: Sequence[str] = LANGUAGES,
    sentences: int | None = None,
    within: str | None = None,
) -> Texts:
    """Read the texts of CoNLL-U files; every language is a client.

    Parameters
    ----------
    path
        A folder or tar archive of files whose names begin with the language, such as ca_ancora.conllu.
    languages
        Two-letter codes of the languages to read.
    sentences
        Make a document of this many sentences. By default documents are those the files mark (`# newdoc`, or the
        article in `sent_id`), else every twenty sentences.
    within
        Read only files in folders of this name.

    Returns
    -------
    Texts
        Documents by language.

    Raises
    ------
    DataError
        If a language has no file.
    """
    if sentences is not None and sentences < 1:
        raise SettingError(f"sentences={sentences}; give 1 or more, or None")
    documents: dict[str, list[str]] = {language: [] for language in languages}

    def wanted(name: PurePosixPath) -> bool:
        return name.suffix == ".conllu" and within in (None, name.parent.name)

    for name, raw in sorted(members(path, wanted)):
        language = name.name[:2]
        if language in documents:
            documents[language] += _documents(decode(raw, f"{path}: {name}"), sentences)
    for language, found in documents.items():
        if not found:
            raise DataError(
                f"{path} has no text of {language!r}; its files are named like {language}_x.conllu"
                + (f", in a folder {within!r}" if within else "")
            )
    return Texts(list(documents), list(documents.values()))


def _documents(text: str, block: int | None) -> Iterator[str]:
    """Yield the documents of a file, in blocks of `block` sentences if that is given."""
    current: str | None = None
    sentences: list[str] = []
    for mark, sentence in _sentences(text):
        if block is not None or mark is None:
            full = len(sentences) >= (block or BLOCK)
        else:
            full = mark != current
        if sentences and full:
            yield " ".join(sentences)
            sentences = []
        current = mark
        sentences.append(sentence)
    if sentences:
        yield " ".join(sentences)


def _sentences(text: str) -> Iterator[tuple[str | None, str]]:
    """Yield the document of every sentence, where it is marked, and its text."""
    document: str | None = None
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line]
        notes = dict(line[2:].split(" = ", 1) for line in lines if line.startswith("# ") and " = " in line)
        document = notes.get("newdoc id", document)
        article = notes.get("sent_id", "").partition(".p.")
        mark = document if document is not None else article[0] if article[1] else None
        words = [line.split("\t")[1] for line in lines if not line.startswith("#") and line.count("\t") >= 1]
        if "text" in notes:
            yield mark, notes["text"]
        elif words:
            yield mark, _joined(words)


def _joined(words: Sequence[str]) -> str:
    """Join words to running text, without the spaces before and after punctuation."""
    return _OPENING.sub(r"\1", _CLOSING.sub(r"\1", " ".join(words)))

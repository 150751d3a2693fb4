"""Text from strangers, made safe to print: one line, no control characters, a bounded length."""

from __future__ import annotations

import unicodedata

HIDDEN = (
    "Cc",
    "Cf",
    "Cs",
    "Co",
    "Cn",
    "Zl",
    "Zp",
)  # control, format, surrogate, private, unassigned, line ends
JOINERS = "\u200c\u200d"  # belong to words of some scripts


def is_plain(text: str, most: int = 200) -> bool:
    r"""Return True if a text has at most `most` characters, all of which can be seen.

    Examples
    --------
    >>> is_plain("Zürich (north)"), is_plain("a\x1b[2J"), is_plain("")
    (True, False, False)
    """
    return 0 < len(text) <= most and not any(map(_is_hidden, text))


def printable(value: object, most: int = 300) -> str:
    r"""Return a value as one line of at most `most` characters, with what cannot be seen written as an escape.

    Examples
    --------
    >>> printable("red\x1b[2J\nalert")
    'red\\x1b[2J\\nalert'
    """
    text = str(value)[: most + 1]
    shown = "".join(
        letter.encode("unicode_escape").decode() if _is_hidden(letter) else letter for letter in text
    )
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def visible(text: str) -> str:
    r"""Return a text of any length and of several lines, with what cannot be seen written as an escape.

    Examples
    --------
    >>> visible("a red\x1b[31m client\nand another")
    'a red\\x1b[31m client\nand another'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        letter.encode("unicode_escape").decode() if letter not in "\n\t" and _is_hidden(letter) else letter
        for letter in text
    )


def _is_hidden(letter: str) -> bool:
    return unicodedata.category(letter) in HIDDEN and letter not in JOINERS

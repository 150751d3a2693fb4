"""What is printed comes from anywhere: names in brackets are no markup, and escapes do not reach the terminal."""

from __future__ import annotations

import pytest
from rich.table import Table

from coterie.cli import console

ESCAPES = "\x1b\x07\x9b\u202e"
NAMES = ["[/x]", "[bold]b[/bold]", "\x1b[31mred\x07", "\u202eevil", "Zürich", "two\nlines"]


def test_names_are_shown_as_they_are_and_escapes_are_spelled_out(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(title="[/title]")
    table.add_column("[/column]")
    for name in NAMES:
        table.add_row(name)
    console.show(table, f"first line of {NAMES[2]}\nsecond line")
    console.notes([f"client {name!s}" for name in NAMES])
    console.error(NAMES[2])
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert not set(ESCAPES) & set(text)
        assert "\\x1b[31mred\\x07" in text
    assert "[/x]" in shown.out and "[bold]b[/bold]" in shown.out and "[/title]" in shown.out
    assert "Zürich" in shown.out and "lines" in shown.out
    assert "first line of \\x1b[31mred\\x07\nsecond line" in shown.out
    assert "Note: client [/x]\n" in shown.err

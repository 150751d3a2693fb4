"""The threat model names a test for every promise: each of them is there, and every line of the table has one."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGES = [TESTS.parent / "docs" / name for name in ("security.md", "privacy.md")]


def test_every_test_that_a_promise_rests_on_exists():
    source = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py"))
    defined = set(re.findall(r"(?:def|class) (\w+)", source))
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"`((?:test_|Test)\w+)`", text))
    files = {name.removeprefix("tests/") for name in re.findall(r"`((?:tests/)?[a-z0-9]+/\w+\.py)`", text)}
    assert len(named) > 60 and named <= defined, named - defined
    assert len(files) > 15 and all((TESTS / name).exists() for name in files), files


def test_every_line_of_the_table_of_attacks_names_a_test():
    lines = re.findall(r"^\| (\d+) \|(.*)\|$", PAGES[0].read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1))
    for number, line in lines:
        last = line.split("|")[-1]
        assert "`" in last or last.strip() == "the same", f"line {number}: {last}"

"""The demo shows both answers, and its generated table can be made again."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coterie.cli import demo
from coterie.data import bundled

if TYPE_CHECKING:
    from tests.conftest import Command

ROOT = Path(__file__).parent.parent


def test_the_clinics_are_what_the_script_generates() -> None:
    lines = runpy.run_path(str(ROOT / "docs" / "clinics.py"))["lines"]()
    assert bundled.path("clinics").read_text(encoding="utf-8").splitlines() == lines


@pytest.mark.slow
def test_the_demo_says_a_sentence_and_writes_a_report_for_each_table(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "ROUNDS", 2)
    monkeypatch.setattr(demo, "BUDGET", 1)
    shown = command("demo", "--out", tmp_path / "demo")
    assert shown.code == 0, shown.err
    assert shown.out.count("Validation rows prefer") == 2 and "generated data" in shown.out
    for example in demo.EXAMPLES:
        assert (tmp_path / "demo" / example.table / "report.html").exists()
    assert command("demo", "--out", tmp_path / "demo").code == 2


@pytest.mark.slow
def test_the_readme_shows_what_the_demo_prints(command: Command, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = command("demo", "--out", tmp_path / "demo").out
    for line in shown.splitlines():
        cells = line.replace("│", " ").split()
        if line.startswith("│"):
            assert " ".join(cells) in " ".join(readme.split())
    for words in (
        "the log-loss falls by 0.124",
        "39 are better off",
        "Validation rows prefer training alone",
    ):
        assert words in " ".join(shown.split()) and words in " ".join(readme.split())

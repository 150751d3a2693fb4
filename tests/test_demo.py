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
    command: Command, tmp_path: Path
) -> None:
    shown = command("demo", "--out", tmp_path / "demo", "--rounds", 2, "--budget", 1)
    assert shown.code == 0, shown.err
    said = [shown.out.index(words) for words in ("Validation rows prefer", "Rows held out in turn prefer")]
    assert said == sorted(said) and "generated data" in shown.out
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
        "the log-loss falls by 0.127",
        "38 are better off",
        "Rows held out in turn prefer auto. No difference between auto and training alone is certain",
    ):
        assert words in " ".join(shown.split()) and words in " ".join(readme.split())


@pytest.mark.slow
def test_a_table_that_fails_in_the_second_process_ends_the_demo(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is shown, and its exit code is that of the command."""
    monkeypatch.setattr(demo, "_show", lambda *_: None)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    shown = command("demo", "--out", tmp_path / "demo", "--rounds", 0)
    assert shown.code == 2 and "rounds" in shown.err and not (tmp_path / "demo").exists()


def test_one_processor_shows_both_tables_in_one_process(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(demo, "_show", lambda example, *_: seen.append(example.table))
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert command("demo", "--out", tmp_path / "demo").code == 0
    assert seen == [example.table for example in demo.EXAMPLES]

"""A few hundred random tables and all commands; `make fuzz` takes ten thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.commands import Fuzzer


@pytest.fixture
def fuzzer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fuzzer:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("coterie.cli.training.report_beside", lambda *_: None)
    (tmp_path / "fuzz").mkdir()
    return Fuzzer(tmp_path / "fuzz")


@pytest.mark.filterwarnings("ignore")
def test_no_table_ends_in_a_traceback(fuzzer: Fuzzer) -> None:
    for number in range(60):
        fuzzer.try_table(number)
    assert not fuzzer.found.faults, fuzzer.found.text()
    assert fuzzer.found.counts["data describe", 0] > 20 and fuzzer.found.counts["predict", 2] > 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_nor_do_more_tables_and_real_processes(fuzzer: Fuzzer) -> None:
    for number in range(60, 300):
        fuzzer.try_table(number)
    fuzzer.try_table(3, processes=True)
    assert not fuzzer.found.faults, fuzzer.found.text()

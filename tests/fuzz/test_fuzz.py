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
    for number in range(15):
        fuzzer.try_table(number)
    assert not fuzzer.found.faults, fuzzer.found.text()
    assert fuzzer.found.counts["data describe", 0] > 5 and fuzzer.found.counts["predict", 2]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(15, 300, 57))
@pytest.mark.filterwarnings("ignore")
def test_nor_do_more_tables(fuzzer: Fuzzer, first: int) -> None:
    for number in range(first, first + 57):
        fuzzer.try_table(number)
    assert not fuzzer.found.faults, fuzzer.found.text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_nor_do_real_processes(fuzzer: Fuzzer) -> None:
    fuzzer.try_table(3, processes=True)
    assert not fuzzer.found.faults, fuzzer.found.text()

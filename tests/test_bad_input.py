"""Bad input: exit code 2, a message that says what, where and what to do, and nothing half-written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Command, WriteTable

COLUMNS = ("--client", "site", "--target", "y")
QUICK = ("--rounds", "5")
Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def table(here: Path, write_table: WriteTable) -> Path:
    return write_table(here / "good.csv", "binary")


@pytest.fixture
def refused(command: Command, here: Path) -> Refused:
    """Give a command that must be refused and leave everything as it was; returns the message."""

    def check(*arguments: object, says: tuple[str, ...]) -> str:
        before = snapshot(here)
        outcome = command(*arguments)
        assert outcome.code == 2, outcome
        assert outcome.out == ""
        assert "Traceback" not in outcome.err
        for words in says:
            assert words in outcome.err.replace("\n", " "), (words, outcome.err)
        assert snapshot(here) == before
        return outcome.err

    return check


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every path under a folder, with the contents of files."""
    found: dict[str, bytes | None] = {}
    for parent, folders, files in os.walk(folder):
        found |= {os.path.join(parent, name): None for name in folders}
        found |= {os.path.join(parent, name): Path(parent, name).read_bytes() for name in files}
    return found


def ways(table: object, *more: object) -> Iterator[tuple[object, ...]]:
    """Every command that reads a table for training."""
    yield "compare", table, *COLUMNS, *QUICK, "--out", "out", "--json", "out.json", *more
    yield "fit", table, *COLUMNS, *QUICK, "--out", "out", "--json", "out.json", *more
    yield "data", "describe", table, *COLUMNS, "--json", "out.json", *more


def lines(table: Path, change: Callable[[int, list[str]], list[str]]) -> Path:
    """A copy of a table with its cells changed, row by row."""
    rows = [line.split(",") for line in table.read_text().splitlines()]
    text = "\n".join(",".join(change(k, row) if k else row) for k, row in enumerate(rows)) + "\n"
    path = table.with_name("bad.csv")
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ("bad.csv", "empty")),
        (b"site,age,y\n", ("bad.csv", "header but no row", "one line per row")),
        (b"site,age,y\nnorth,1,yes\nsouth,2,n\xff\n", ("bad.csv", "UTF-8", "line 3")),
    ],
    ids=["empty file", "header only", "not UTF-8"],
)
def test_text_that_is_no_table(here: Path, refused: Refused, content: bytes, says: tuple[str, ...]) -> None:
    (here / "bad.csv").write_bytes(content)
    for way in ways("bad.csv"):
        refused(*way, says=says)


def test_truncated_parquet(here: Path, refused: Refused, write_table: WriteTable) -> None:
    path = write_table(here / "bad.parquet", "binary")
    path.write_bytes(path.read_bytes()[:-100])
    for way in ways(path):
        refused(*way, says=("bad.parquet", "truncated", "write it again"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda k, row: [*row[:-1], "yes"], ("bad.csv", "'y'", "one value", "another target")),
        (lambda k, row: [row[0], *[""] * 4, row[5]], ("bad.csv", "'age' has no values", "Add columns")),
        (
            lambda k, row: [*row[:4], "inf" if k == 7 else row[4], row[5]],
            ("bad.csv", "'score'", "line 8", "client 'east'", "infinite", "Correct it"),
        ),
        (lambda k, row: [*row[:5], "" if k == 3 else row[5]], ("bad.csv", "'y'", "line 4", "missing")),
        (lambda k, row: ["" if k == 3 else row[0], *row[1:]], ("bad.csv", "'site'", "line 4", "missing")),
    ],
    ids=["one target value", "all missing", "infinite", "missing target", "missing client"],
)
def test_columns_that_cannot_be_used(
    refused: Refused, table: Path, change: Callable[[int, list[str]], list[str]], says: tuple[str, ...]
) -> None:
    for way in ways(lines(table, change)):
        refused(*way, says=says)


def test_ten_thousand_categories(here: Path, refused: Refused) -> None:
    rows = "".join(f"{'north' if k % 2 else 'south'},name-{k},{k % 3 == 0}\n" for k in range(10_000))
    (here / "bad.csv").write_text("site,nickname,y\n" + rows)
    for way in ways("bad.csv"):
        refused(*way, says=("bad.csv", "'nickname'", "different value", "--keep COLUMN"))


@pytest.mark.parametrize("option", ["--client", "--target", "--cluster", "--drop"])
def test_no_such_column(refused: Refused, table: Path, option: str) -> None:
    for way in ways(table, option, "colours"):
        refused(*way, says=("good.csv", "'colours'", "Did you mean 'colour'?"))


def test_client_in_two_clusters(refused: Refused, table: Path) -> None:
    bad = lines(table, lambda k, row: [row[0], "wet" if k == 3 else row[1], *row[2:]])
    for way in ways(bad, "--cluster", "region"):
        refused(*way, says=("bad.csv", "'east'", "'region'", "2 clusters"))


def test_no_such_file(refused: Refused, table: Path) -> None:
    for way in ways("god.csv"):
        refused(*way, says=("god.csv", "no such file", "Did you mean 'good.csv'?"))
    for way in ways("heart_diseas"):
        refused(*way, says=("heart_diseas", "Did you mean 'heart_disease'?"))


def test_a_client_with_one_row_is_reported_and_the_run_goes_on(
    here: Path, command: Command, table: Path
) -> None:
    lonely = here / "lonely.csv"
    lonely.write_text(table.read_text() + "hermitage,cold,60.0,red,0.1,yes\n")
    few = ("--seeds", 1, "--budget", 1)
    for arguments in (
        ("compare", lonely, *COLUMNS, *QUICK, *few),
        ("fit", lonely, *COLUMNS, *QUICK, "--out", "run", "--json", "run.json"),
        ("data", "describe", lonely, *COLUMNS),
    ):
        outcome = command(*arguments)
        assert outcome.code == 0, outcome
        assert "one row only: 'hermitage'" in outcome.err
    summary = json.loads((here / "run.json").read_text())
    assert summary["clients"]["hermitage"] is None
    others = [value for name, value in summary["clients"].items() if name != "hermitage"]
    assert summary["mean"] == pytest.approx(sum(others) / 4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--algorithm", "dito"), ("'dito'", "Did you mean 'ditto'?")),
        (("--set", "lamb=1"), ("ditto", "'lamb'", "Did you mean 'lam'?")),
        (("--set", "lr=-1"), ("ditto", "lr = -1", "above 0")),
        (("--set", "lr=nan"), ("ditto", "lr = nan", "above 0")),
        (("--set", "participation=2"), ("ditto", "participation", "at most 1")),
        (("--set", "lr=fast"), ("ditto", "lr = 'fast'", "not a number")),
        (("--set", "steps=2.5"), ("ditto", "steps", "whole number")),
        (("--set", "lr"), ("--set 'lr'", "name=value")),
        (("--set", "lr=1", "--set", "lr=2"), ("lr", "set it once")),
        (("--rounds", "-3"), ("--rounds", "1")),
        (("--rounds", "many"), ("--rounds",)),
        (("--dropout", "1.5"), ("dropout is 1.5", "below 1")),
        (("--select", "worst"), ("'worst'", "'last' or 'best'")),
        (("--task", "regresion"), ("'regresion'", "Did you mean 'regression'?")),
        (("--algorithm", "oracle"), ("clusters", "--cluster COLUMN")),
        (("--colour", "red"), ("--colour",)),
        (("--split", "0.6,0.2"), ("three numbers", "0.6, 0.2")),
        (("--split", "0.5,0.3,0.2,0.1"), ("three numbers",)),
        (("--split", "0.6,0.6,0.2"), ("add up to 1.4",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) and value[0].startswith("--") else "",
)
def test_settings_of_fit(
    refused: Refused, table: Path, options: tuple[str, ...], says: tuple[str, ...]
) -> None:
    refused("fit", table, *COLUMNS, "--out", "out", "--json", "out.json", *options, says=says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--algorithms", "ditto,cobbo"), ("'cobbo'",)),
        (("--algorithms", "oracle"), ("clusters", "--cluster COLUMN")),
        (("--rounds", "-1"), ("--rounds", "1")),
        (("--seeds", "0"), ("--seeds", "1")),
        (("--budget", "0"), ("--budget", "1")),
        (("--folds", "9999"), ("folds = 9999", "the largest client has")),
        (("--split", "1,0,0"), ("needs validation rows", "--split")),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_settings_of_compare(
    refused: Refused, table: Path, options: tuple[str, ...], says: tuple[str, ...]
) -> None:
    refused("compare", table, *COLUMNS, "--out", "out", "--json", "out.json", *options, says=says)


def test_unknown_algorithm_page(refused: Refused) -> None:
    refused("algorithms", "dito", "--json", "out.json", says=("'dito'", "Did you mean 'ditto'?"))


@pytest.mark.parametrize("name", ["compare", "fit"])
def test_out_that_exists(here: Path, refused: Refused, table: Path, name: str) -> None:
    (here / "taken").mkdir()
    (here / "taken" / "diary.txt").write_text("dear diary")
    says = ("taken", "exists already", "another folder")
    refused(name, table, *COLUMNS, "--out", "taken", "--json", "out.json", says=says)
    refused(name, table, *COLUMNS, "--out", "good.csv", says=("good.csv", "exists already"))


@pytest.mark.parametrize("name", ["compare", "fit"])
def test_out_that_cannot_be_made(refused: Refused, table: Path, name: str) -> None:
    refused(
        name, table, *COLUMNS, "--out", "good.csv/run", says=("good.csv", "not a folder", "another place")
    )


@pytest.mark.skipif(
    getattr(os, "geteuid", int)() == 0, reason="root may write everywhere, and so does Windows"
)
@pytest.mark.parametrize("name", ["compare", "fit"])
def test_out_in_a_folder_without_permission(here: Path, refused: Refused, table: Path, name: str) -> None:
    (here / "locked").mkdir(mode=0o555)
    refused(name, table, *COLUMNS, "--out", "locked/run", says=("locked", "may not be written"))


def test_json_that_cannot_be_written(here: Path, refused: Refused, table: Path) -> None:
    (here / "folder").mkdir()
    for place, words in (("good.csv/x.json", "not a folder"), ("folder", "is a folder")):
        for way in ways(table, "--json", place):
            refused(*way, says=(words,))
        refused("algorithms", "--json", place, says=(words,))


class TestRunFolders:
    @pytest.fixture
    def run(self, here: Path, command: Command, table: Path) -> Path:
        """A run with a checkpoint."""
        every = ("--checkpoint-every", 2)
        assert command("fit", table, *COLUMNS, *QUICK, *every, "--out", "run").code == 0
        return here / "run"

    @pytest.fixture
    def unfinished(self, run: Path) -> Path:
        """The same as it would be if it had been killed after the checkpoint."""
        for path in ("models/models.safetensors", "models/model.json", "metrics.parquet", "result.json"):
            (run / path).unlink()
        return run

    def test_unfinished_run_can_be_resumed(self, command: Command, unfinished: Path) -> None:
        (unfinished / "checkpoint" / "round-000000003.safetensors.tmp").write_bytes(b"half a chec")
        assert command("resume", "run").code == 0
        assert not list(unfinished.rglob("*.tmp"))
        assert (unfinished / "result.json").exists()

    def test_flipped_byte_in_the_checkpoint(self, refused: Refused, unfinished: Path) -> None:
        (checkpoint,) = unfinished.glob("checkpoint/*.safetensors")
        content = bytearray(checkpoint.read_bytes())
        content[-5] ^= 1
        checkpoint.write_bytes(content)
        says = (checkpoint.name, "damaged", "Restore it from a copy")
        refused("resume", "run", "--json", "out.json", says=says)

    def test_cut_config(self, refused: Refused, unfinished: Path) -> None:
        config = unfinished / "config.toml"
        config.write_text(config.read_text().partition("[plan]")[0])
        refused("resume", "run", says=("config.toml", "damaged", "manifest.json", "train again"))
        (unfinished / "manifest.json").unlink()
        refused("resume", "run", says=("config.toml", "[plan]", "damaged"))

    def test_resume_of_no_run(self, here: Path, refused: Refused, table: Path) -> None:
        refused("resume", "nowhere", says=("nowhere", "does not exist", "coterie fit"))
        (here / "empty").mkdir()
        refused("resume", "empty", says=("empty", "not a run folder", "coterie fit"))

    def test_resume_of_a_comparison(self, command: Command, refused: Refused, table: Path) -> None:
        few = ("--seeds", 1, "--budget", 1, "--rounds", 1)
        assert command("compare", table, *COLUMNS, *few, "--out", "all").code == 0
        refused("resume", "all", says=("all", "comparison", "all/ditto"))
        refused("predict", "all", table, says=("all", "comparison", "all/ditto"))

    def test_resume_after_the_table_is_gone(self, refused: Refused, unfinished: Path, table: Path) -> None:
        table.unlink()
        refused("resume", "run", says=("good.csv", "no such file"))

    def test_fit_into_a_run_offers_to_resume_it(self, refused: Refused, run: Path, table: Path) -> None:
        refused("fit", table, *COLUMNS, "--out", "run", says=("run exists already", "coterie resume run"))

    def test_predict_on_an_unfinished_run(self, refused: Refused, unfinished: Path, table: Path) -> None:
        says = ("run", "no finished models", "coterie resume run")
        refused("predict", "run", table, "--out", "p.csv", "--json", "p.json", says=says)

    def test_predict_with_missing_columns(self, here: Path, refused: Refused, run: Path, table: Path) -> None:
        for column, says in (("score", ("new.csv", "'score'")), ("site", ("new.csv", "client", "'site'"))):
            (here / "new.csv").write_text(table.read_text().replace(column, "renamed", 1))
            refused("predict", "run", "new.csv", "--out", "p.csv", "--json", "p.json", says=says)

    def test_predict_with_a_word_among_numbers(
        self, here: Path, refused: Refused, run: Path, table: Path
    ) -> None:
        bad = lines(table, lambda k, row: [*row[:4], "much" if k == 7 else row[4], row[5]])
        refused("predict", "run", bad, "--out", "p.csv", says=("bad.csv", "'score'", "line 8", "'much'"))

    def test_predict_over_its_own_table(self, refused: Refused, run: Path, table: Path) -> None:
        refused("predict", "run", table, "--out", table, says=("good.csv", "the table itself"))

    def test_predict_into_an_unknown_kind_of_file(self, refused: Refused, run: Path, table: Path) -> None:
        refused("predict", "run", table, "--out", "p.xlsx", says=("p.xlsx", ".csv or .parquet"))

    def test_predict_with_damaged_models(self, refused: Refused, run: Path, table: Path) -> None:
        models = run / "models" / "models.safetensors"
        models.write_bytes(models.read_bytes()[:-8])
        refused("predict", "run", table, "--out", "p.csv", says=("models.safetensors", "damaged"))

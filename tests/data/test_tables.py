"""Checking tables: what is said about columns and clients, and every way to be refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from coterie._core.errors import DataError, SettingError
from coterie.data import column_types as columns
from coterie.data import tables
from coterie.data.describe import describe
from coterie.data.table_spec import TableSpec

SHARED = Path(__file__).parents[3] / "shared" / "data"


def said_by(action: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        action(*arguments, **settings)
    return str(caught.value)


def table(**changes: Any) -> pl.DataFrame:
    """Twelve sound rows of two clients, with some columns replaced (None removes one)."""
    sound = {
        "client": ["a", "b"] * 6,
        "ward": ["north", "south"] * 6,
        "x": [0.5 * row for row in range(12)],
        "word": ["red", "green", "blue"] * 4,
        "y": [0.1 * row for row in range(12)],
    }
    return tables.read({name: values for name, values in (sound | changes).items() if values is not None})


def test_sound_table() -> None:
    spec = tables.check(table(), "client", "y", cluster="ward")
    assert spec == TableSpec("client", "y", "ward", "regression", (), ("x",), ("word",))
    assert spec.warnings == []
    assert tables.check(table(), "client", "y", drop=["ward", "word"]).categories == ()


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({}, {"client": "clint"}, ["no client column 'clint'", "Did you mean 'client'?"]),
        ({}, {"target": "Q"}, ["no target column 'Q'", "Known: client, ward"]),
        ({}, {"drop": ["wrd"]}, ["no dropped column 'wrd'"]),
        ({}, {"cluster": "client"}, ["'client' was given two roles"]),
        ({}, {"drop": ["y"]}, ["'y' was given two roles"]),
        (
            {"client": [None, "a"] * 6},
            {},
            ["client column 'client' has 6 missing", "row 1", "remove these rows"],
        ),
        ({"y": [1.0] * 10 + [None, math.nan]}, {}, ["target column 'y' has 2 missing", "row 11"]),
        (
            {"ward": ["n"] * 11 + ["?"]},
            {"cluster": "ward"},
            ["cluster column 'ward' has 1 missing", "row 12"],
        ),
        ({"y": [3] * 12}, {}, ["'y' has one value only ('3')", "another target"]),
        (
            {"x": [0.0] * 9 + [math.inf] * 3},
            {},
            ["column 'x', row 10 (client 'b')", "inf is infinite", "Correct"],
        ),
        ({"y": [0.1, -math.inf] * 6}, {}, ["column 'y', row 2 (client 'b')", "infinite"]),
        (
            {"x": [None] * 12, "word": ["?"] * 12},
            {"drop": ["ward"]},
            ["no feature column is left", "'x' has no values; 'word' has no values"],
        ),
        ({"x": [[1]] * 12, "word": None}, {"drop": ["ward"]}, ["'x' holds lists", "--keep COLUMN"]),
        (
            {"ward": ["n", "s", "s", "s"] * 3},
            {"cluster": "ward"},
            ["client 'a' is in 2 clusters", "'n', 's'", "'ward'"],
        ),
        ({"x": None, "word": None}, {"drop": ["ward"]}, ["no feature column is left"]),
        (
            {"x": [1] * 12, "word": None},
            {"drop": ["ward"]},
            ["no feature column is left", "'x' has one value only"],
        ),
        ({"y": ["p", "q", "1"] * 4}, {"task": "regression"}, ["column 'y', row 1", "'p' is not a number"]),
        ({"y": ["p", "q", "r"] * 4}, {"task": "binary"}, ["'y' has 3 classes", "multiclass"]),
    ],
)
def test_bad_table(changes: dict[str, Any], settings: dict[str, Any], said: list[str]) -> None:
    message = said_by(tables.check, table(**changes), **{"client": "client", "target": "y"} | settings)
    for words in ["the table: ", *said]:
        assert words in message


def test_identifier_and_too_many_classes() -> None:
    many = {
        "client": ["a", "b"] * 600,
        "id": [f"p{row}" for row in range(1200)],
        "y": [0.5 * row for row in range(1200)],
    }
    frame = tables.read(many)
    message = said_by(tables.check, frame, "client", "y")
    assert "no feature column is left ('id' has a different value in almost every row)" in message
    assert tables.check(frame, "client", "y", keep=["id"]).categories == ("id",)
    message = said_by(tables.check, frame, "client", "y", drop=["id"], task="classification")
    assert "'y' has 1200 different values" in message and "--task regression" in message
    assert "'id' has 1200" in said_by(tables.check, frame, "client", "id", drop=["y"])


def test_unknown_task() -> None:
    with pytest.raises(SettingError, match=r"'clasification'.*'classification'"):
        tables.check(table(), "client", "y", task="clasification")


def test_lines_of_the_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b'client,x,y\n"a\nb",1,2\n\nc,inf,3\nc,2,4\n')
    message = said_by(tables.check, tables.read(path), "client", "y", source=str(path))
    assert f"{path}: column 'x', line 5 (client 'c')" in message
    message = said_by(tables.check, tables.read(path).tail(2), "client", "y", source=str(path))
    assert "row 1 (client 'c')" in message


@pytest.mark.parametrize(
    ("values", "task", "found", "classes"),
    [
        (["b", "a", "c"] * 4, None, "multiclass", ("a", "b", "c")),
        ([True, False] * 6, None, "binary", ("false", "true")),
        ([0.0, 1.0] * 6, None, "binary", ("0", "1")),
        ([0.5, 1.5] * 6, None, "binary", ("0.5", "1.5")),
        ([10, 9, 1] * 4, None, "multiclass", ("1", "9", "10")),
        (["10", "9", "1"] * 4, None, "multiclass", ("1", "9", "10")),
        (["01", "02", "10"] * 4, None, "multiclass", ("01", "02", "10")),
        ([0.5, 1.0, 2.0] * 4, None, "regression", ()),
        ([0.5, 1.0, 2.0] * 4, "classification", "multiclass", ("0.5", "1", "2")),
        ([10, 9, 1] * 4, "regression", "regression", ()),
        ([True, False] * 6, "regression", "regression", ()),
    ],
)
def test_task(values: list[Any], task: str | None, found: str, classes: tuple[str, ...]) -> None:
    spec = tables.check(table(y=values), "client", "y", task=task)
    assert (spec.task, spec.classes) == (found, classes)


def test_many_whole_numbers_are_regression() -> None:
    rows = {"client": ["a"] * 42, "x": [0.5 * row for row in range(42)]}
    assert tables.check(tables.read(rows | {"y": list(range(21)) * 2}), "client", "y").task == "regression"
    assert (
        tables.check(tables.read(rows | {"y": list(range(20)) * 2 + [0, 1]}), "client", "y").task
        == "multiclass"
    )


def test_kinds_of_columns() -> None:
    frame = table(
        flag=["true", "false"] * 6,
        day=["2024-01-01", "2024-01-03"] * 6,
        moment=["2024-01-01 06:00", "2024-01-01 12:00"] * 6,
        code=["007", "012"] * 6,
    ).with_columns(factor=pl.Series(["1", "2"] * 6, dtype=pl.Categorical))
    spec = tables.check(frame, "client", "y")
    assert spec.numeric == ("x", "flag", "day", "moment", "code")
    assert spec.categories == ("ward", "word", "factor")
    assert columns.numbers(frame, "flag").to_list()[:2] == [1.0, 0.0]
    assert columns.numbers(frame, "day").to_list()[:2] == [19723.0, 19725.0]
    assert columns.numbers(frame, "moment").to_list()[:2] == [19723.25, 19723.5]
    assert columns.numbers(frame, "code").to_list()[:2] == [7.0, 12.0]


def test_warnings() -> None:
    frame = table(
        client=["one", "few", "few", *["same"] * 9],
        x=[None, *[1.0] * 11],
        still=[2] * 12,
        y=["p", "p", "q", *["q"] * 9],
    )
    spec = tables.check(frame, "client", "y")
    assert spec.numeric == ("x",)
    assert spec.warnings == [
        "Left out as constant: 'still'.",
        "1 client(s) with one row only: 'one'.",
        "1 client(s) with fewer than 5 rows: 'few'.",
        "1 client(s) with a single class in the target: 'same'.",
    ]


def test_clients_that_differ_in_case_alone_are_named() -> None:
    frame = table(client=["North", "north", "South"] * 4, x=list(range(12)), y=["p", "q"] * 6)
    said = "Clients that differ in upper and lower case alone count as different: 'North', 'north'."
    assert said in tables.check(frame, "client", "y").warnings


def test_warnings_stay_short() -> None:
    rows = {
        "client": [f"c{row:02}" for row in range(30)],
        "number": list(range(30)),
        "x": [0.25, 1.5, 2.5] * 10,
        "y": [0.5, 1.5, 3.0] * 9 + [7.0, 3.5, 1.0],
    }
    spec = tables.check(tables.read(rows), "client", "y")
    assert spec.warnings == [
        "Left out as codes of the client: 'number'. Use one all the same: --keep COLUMN",
        "30 client(s) with one row only: 'c00', 'c01', 'c02', 'c03', 'c04' and 25 more.",
    ]


def test_clients_are_sorted_and_rows_keep_their_order() -> None:
    frame = pl.DataFrame({"client": [10.0, 9.0, 10.0, 2.5], "row": [0, 1, 2, 3]})
    frame, found, sizes = tables.by_client(frame, "client")
    assert found == ["2.5", "9", "10"] and sizes == [1, 1, 2]
    assert frame["row"].to_list() == [3, 1, 0, 2]


def test_describe_classes_and_numbers() -> None:
    frame = table(client=["b"] * 8 + ["a"] * 4, x=[None, 1.0, 2.0] * 4, y=["p"] * 6 + ["q"] * 6)
    found = describe(frame, tables.check(frame, "client", "y", drop=["ward"]))
    assert (found["rows"], found["clients"], found["task"]) == (12, 2, "binary")
    assert found["client_sizes"] == {"min": 4, "q1": 5, "median": 6, "q3": 7, "max": 8}
    assert found["per_client"] == [
        {"client": "a", "rows": 4, "class_shares": {"p": 0.0, "q": 1.0}, "missing_share": 1 / 8},
        {"client": "b", "rows": 8, "class_shares": {"p": 0.75, "q": 0.25}, "missing_share": 3 / 16},
    ]
    number, word = found["columns"]
    assert (number["kind"], number["mean"], number["sd"]) == ("numeric", 1.5, 0.5)
    assert number["missing_percent"] == pytest.approx(100 / 3)
    assert (word["kind"], word["missing_percent"], word["mean"]) == ("category", 0.0, None)
    assert word["levels"] == ["blue", "green", "red"]


def test_describe_regression() -> None:
    frame = table()
    found = describe(frame, tables.check(frame, "client", "y"))
    assert [client["target_mean"] for client in found["per_client"]] == pytest.approx([0.5, 0.6])


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data folder is not beside the repository")
@pytest.mark.parametrize(
    ("name", "client", "target", "cluster", "drop", "task", "clients"),
    [
        ("hierarchical/InstEval.csv", "d", "y", "dept", ["rownames"], "multiclass", 1128),
        ("hierarchical/MathAchieve.csv", "School", "MathAch", None, ["rownames"], "regression", 160),
        ("hierarchical/MathAchSchool.csv", "School", "MEANSES", "Sector", ["rownames"], "regression", 160),
        ("hierarchical/Exam.csv", "school", "normexam", "schgend", ["rownames", "student"], "regression", 65),
        ("hierarchical/star.csv", "sch", "math", "schtype", ["rownames", "id", "tch"], "regression", 80),
        ("donations/pva97nk.csv", "DemCluster", "TARGET_B", None, ["ID", "TARGET_D"], "binary", 54),
    ],
)
def test_real_tables(
    name: str, client: str, target: str, cluster: str | None, drop: list[str], task: str, clients: int
) -> None:
    frame = tables.read(SHARED / name)
    frame = frame.filter(frame[target].is_not_null())
    spec = tables.check(frame, client, target, cluster, drop, source=str(SHARED / name))
    found = describe(frame, spec)
    assert (spec.task, found["clients"]) == (task, clients)

"""Reading and checking: what comes in, what is said about it, and every way to be refused."""

from __future__ import annotations

import bz2
import gzip
import lzma
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data import column_types as columns
from coterie.data import delimited, tables
from coterie.errors import DataError, SettingError

SHARED = Path(__file__).parents[3] / "shared" / "data"
PLAIN = b"client,x,word,y\na,1,red,0.5\nb,2,blue,1.5\n"
ROWS = {"client": ["a", "b"], "x": [1, 2], "word": ["red", "blue"], "y": [0.5, 1.5]}


def zstandard(data: bytes) -> bytes:
    """A zstandard frame that holds up to 255 bytes unpacked."""
    block = (1 | len(data) << 3).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd\x20" + bytes([len(data)]) + block + data


def saved(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def said_by(action: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        action(*arguments, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("t.csv", bytes),
        ("t.CSV", bytes),
        ("t.csv.gz", gzip.compress),
        ("t.csv.bz2", bz2.compress),
        ("t.csv.xz", lzma.compress),
        ("t.csv.zst", zstandard),
        ("t.tsv", lambda data: data.replace(b",", b"\t")),
        ("t.txt", lambda data: data.replace(b",", b";")),
        ("t.2026.csv", lambda data: data.replace(b",", b"|")),
        ("dos.csv", lambda data: data.replace(b"\n", b"\r\n")),
        ("mac.csv", lambda data: data.replace(b"\n", b"\r")),
        ("mark.csv", lambda data: b"\xef\xbb\xbf" + data),
        ("spaces.csv", lambda data: data.replace(b",", b" , ")),
        ("blank.csv", lambda data: b"\n" + data.replace(b"\nb", b"\n\n  \nb") + b"\n\n"),
        ("unended.csv", lambda data: data.rstrip()),
        ("quoted.csv", lambda data: data.replace(b"red", b'"red"').replace(b"blue", b' "blue"')),
    ],
)
def test_kinds_of_text(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    assert tables.read(saved(tmp_path, name, pack(PLAIN))).to_dict(as_series=False) == ROWS


def test_parquet_frame_lazy_frame_and_dict(tmp_path: Path) -> None:
    frame = pl.DataFrame(ROWS)
    frame.write_parquet(tmp_path / "t.parquet")
    for given_table in (tmp_path / "t.parquet", str(tmp_path / "t.parquet"), frame, frame.lazy(), ROWS):
        assert tables.read(given_table).equals(frame)


def test_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    assert tables.read(pandas.DataFrame(ROWS)).to_dict(as_series=False) == ROWS
    gaps = pandas.DataFrame({"word": ["a", None, "b"], "x": [1.0, None, 2.0]})
    assert tables.read(gaps).to_dict(as_series=False) == {"word": ["a", None, "b"], "x": [1.0, None, 2.0]}


def test_missing_words_become_null_everywhere() -> None:
    words = ["", "NA", "N/A", "NaN", "nan", "null", "None", "?", "  ? "]
    table = tables.read({"word": [*words, "here"], "number": [*words, "1"], "float": [math.nan] * 9 + [2.0]})
    assert table.null_count().row(0) == (9, 9, 9)
    assert table["number"].dtype == pl.Int64


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (["1", "-2", "+3"], pl.Int64),
        (["1", "2.5", "1e3"], pl.Float64),
        (["True", "false", "TRUE"], pl.Boolean),
        (["2024-02-29", "1969-07-20"], pl.Date),
        (["2024-02-29 12:30", "1969-07-20T20:17:40.5Z"], pl.Datetime),
        (["2023-02-29", "2024-01-01"], pl.String),
        (["007", "12"], pl.String),
        (["12345678901234567890", "1"], pl.String),
        (["1", "2", "three"], pl.String),
    ],
)
def test_types_that_all_values_agree_on(values: list[str], dtype: pl.DataType) -> None:
    assert tables.read({" v ": values})["v"].dtype == dtype


def test_types_come_from_all_rows(tmp_path: Path) -> None:
    path = saved(tmp_path, "late.csv", b"client,x\n" + b"a,1\n" * 3000 + b"a,2.5\n" + b"a,seven\n")
    assert tables.read(path)["x"].dtype == pl.String
    path = saved(tmp_path, "late.csv", b"client,x\n" + b"a,1\n" * 3000 + b"a,2.5\n")
    assert tables.read(path)["x"].dtype == pl.Float64


def test_semicolons_come_with_decimal_commas(tmp_path: Path) -> None:
    table = tables.read(saved(tmp_path, "t.csv", b"client;x;word\na;1,5;p,q\nb;-2;r\n"))
    assert table.to_dict(as_series=False) == {"client": ["a", "b"], "x": [1.5, -2.0], "word": ["p,q", "r"]}


def test_stray_quotes_and_nameless_columns(tmp_path: Path) -> None:
    table = tables.read(saved(tmp_path, "t.csv", b'"",size\n1,5" pipe\n2,"6"" pipe"\n'))
    assert table.to_dict(as_series=False) == {"column_1": [1, 2], "size": ['5" pipe', '6" pipe']}


text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
names = st.lists(text.filter(str.strip), min_size=3, max_size=3, unique_by=str.strip)
cells = st.tuples(
    st.none() | st.integers(-(2**62), 2**62),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
    st.none() | text | st.sampled_from(['"', 'a "b", c', "x\ny", "\r\n,", " ; ", "NA", "ü", "'"]),
)


@settings(max_examples=150, deadline=None)
@given(names, st.lists(cells, min_size=1, max_size=12))
def test_any_frame_survives_writing_and_reading(
    some_names: list[str], rows: list[tuple[int | None, float | None, str | None]]
) -> None:
    schema = dict(zip(some_names, (pl.Int64, pl.Float64, pl.String), strict=True))
    frame = pl.DataFrame([*rows, (1, 0.5, "word")], schema=schema, orient="row")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "t.csv"
        frame.write_csv(path)
        read = tables.read(path)
        patch.setattr(delimited, "_regular", lambda *_: False)
        read_by_hand = tables.read(path)
    words = frame.to_series(2).str.strip_chars().to_list()
    expected = [frame.to_series(0).to_list(), frame.to_series(1).to_list()]
    expected.append([None if word in columns.MISSING else word for word in words])
    assert read.columns == [name.strip() for name in some_names]
    assert [column.to_list() for column in read.get_columns()] == expected
    assert read_by_hand.equals(read)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("empty.csv", b"", ["is empty", "column names"]),
        ("empty.csv.zst", zstandard(b""), ["is empty"]),
        ("blank.csv", b" \n\n", ["is empty"]),
        ("head.csv", b"client,x\n", ["header but no row"]),
        ("twice.csv", b"client,x, x ,y\n1,2,3,4\n", ["2 columns are called 'x'", "columns 2, 3", "Rename"]),
        ("short.csv", b"client,x\na,1\n\nb\n", ["line 4 has 1 values", "names 2 columns", "quotes around"]),
        ("long.csv", b'client,x\n"a\nb",1\nb,2,3\n', ["line 4 has 3 values", "names 2 columns"]),
        ("open.csv", b'client,x\na,1\nb,"2\nc,3\n', ["line 3", "Close the quotes"]),
        (
            "latin.csv",
            b"client,x\na,1\nb,caf\xe9\n",
            ["offset 18 (line 3)", "latin-1", "iconv -f latin1", "latin.csv"],
        ),
        (
            "latin.csv.gz",
            gzip.compress(b"a\xe9,b\n"),
            ["offset 1 (line 1)", "unpack it, then iconv", "utf8-latin.csv"],
        ),
        (
            "latin.csv.zst",
            zstandard(b"client,x\na,1\nb,caf\xe9\n"),
            ["offset 18 (line 3)", "iconv -f latin1"],
        ),
        ("wide.csv", "client,x\na,1\n".encode("utf-16"), ["UTF-16", "iconv -f utf-16"]),
        ("wide.csv", "client,x\na,1\n".encode("utf-16le"), ["line 1", "NUL", "iconv -f utf-16le"]),
        ("cut.csv.gz", gzip.compress(PLAIN)[:-12], ["cannot be unpacked", "truncated", "download it again"]),
        ("not.csv.gz", PLAIN, ["cannot be unpacked", "not a .gz file"]),
        ("cut.csv.bz2", bz2.compress(PLAIN)[:-12], ["cannot be unpacked", "truncated"]),
        ("cut.csv.xz", lzma.compress(PLAIN)[:-12], ["cannot be unpacked", "truncated"]),
        ("cut.csv.zst", zstandard(PLAIN)[:-12], ["cannot be unpacked", "truncated"]),
        ("cut.parquet", b"PAR1" + bytes(50), ["cannot be read as Parquet", "truncated", "write it again"]),
        ("table.xlsx", b"PK", ["unknown kind of file '.xlsx'", ".csv", ".parquet", ".gz"]),
        ("table", b"a,b\n", ["unknown kind of file"]),
    ],
)
def test_bad_file(tmp_path: Path, name: str, data: bytes, said: list[str]) -> None:
    path = saved(tmp_path, name, data)
    message = said_by(tables.read, path)
    for words in [str(path), *said]:
        assert words in message


def test_truncated_parquet(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pl.DataFrame(ROWS).write_parquet(path)
    path.write_bytes(path.read_bytes()[:-40])
    assert "truncated" in said_by(tables.read, path)


def test_absent_file_and_folder(tmp_path: Path) -> None:
    saved(tmp_path, "patients.csv", PLAIN)
    message = said_by(tables.read, tmp_path / "patient.csv")
    assert "patient.csv: no such file" in message and "'patients.csv'" in message
    assert "no such file" in said_by(tables.read, tmp_path / "nowhere" / "t.csv")
    assert "is a folder" in said_by(tables.read, tmp_path)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"a": [1, 2], "b": [1]}, "equal length"),
        ({"a": [1, "x"]}, "one type"),
        (pl.DataFrame({"a": []}), "no rows"),
        (pl.DataFrame({"a": [1], " a": [2]}), "two columns have one name"),
        (3, "Expected a path"),
    ],
)
def test_bad_table_in_memory(table: Any, said: str) -> None:
    assert said in said_by(tables.read, table)


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
    assert spec == tables.TableSpec("client", "y", "ward", "regression", (), ("x",), ("word",))
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
        ({"x": [None] * 12}, {}, ["column 'x' has no values at all", "--drop x"]),
        ({"x": ["?"] * 12}, {}, ["column 'x' has no values at all", "--drop x"]),
        ({"x": [[1]] * 12}, {}, ["column 'x' holds List", "--drop x"]),
        (
            {"ward": ["n", "s", "s", "s"] * 3},
            {"cluster": "ward"},
            ["client 'a' is in 2 clusters", "'n', 's'", "'ward'"],
        ),
        ({"x": None, "word": None}, {"drop": ["ward"]}, ["no feature column is left"]),
        (
            {"x": [1] * 12, "word": None},
            {"drop": ["ward"]},
            ["no feature column is left", "'x' never change"],
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
    assert "'id' holds 1200 different texts" in message and "identifier" in message and "--drop id" in message
    message = said_by(tables.check, frame, "client", "y", drop=["id"], task="classification")
    assert "'y' has 1200 different values" in message and "--task regression" in message
    assert "'id' has 1200" in said_by(tables.check, frame, "client", "id", drop=["y"])


def test_unknown_task() -> None:
    with pytest.raises(SettingError, match=r"'clasification'.*'classification'"):
        tables.check(table(), "client", "y", task="clasification")


def test_lines_of_the_file_are_named(tmp_path: Path) -> None:
    path = saved(tmp_path, "t.csv", b'client,x,y\n"a\nb",1,2\n\nc,inf,3\nc,2,4\n')
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
        "Column 'still' is constant and is kept out of the features.",
        "1 client(s) with one row only: 'one'.",
        "1 client(s) with fewer than 5 rows: 'few'.",
        "1 client(s) with a single class in the target: 'same'.",
    ]


def test_warnings_stay_short_and_identifiers_are_suspected() -> None:
    rows = {
        "client": [f"c{row:02}" for row in range(30)],
        "number": list(range(30)),
        "y": [0.5, 1.5, 3.0] * 10,
    }
    spec = tables.check(tables.read(rows), "client", "y")
    assert spec.warnings == [
        "Column 'number' has a different whole number in every row. "
        "If it is an identifier, leave it out: --drop number",
        "30 client(s) with one row only: 'c00', 'c01', 'c02', 'c03', 'c04' and 25 more.",
    ]


def test_clients_are_sorted_and_rows_keep_their_order() -> None:
    frame = pl.DataFrame({"client": [10.0, 9.0, 10.0, 2.5], "row": [0, 1, 2, 3]})
    frame, found, sizes = tables.by_client(frame, "client")
    assert found == ["2.5", "9", "10"] and sizes == [1, 1, 2]
    assert frame["row"].to_list() == [3, 1, 0, 2]


def test_describe_classes_and_numbers() -> None:
    frame = table(client=["b"] * 8 + ["a"] * 4, x=[None, 1.0, 2.0] * 4, y=["p"] * 6 + ["q"] * 6)
    found = tables.describe(frame, tables.check(frame, "client", "y", drop=["ward"]))
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
    found = tables.describe(frame, tables.check(frame, "client", "y"))
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
    found = tables.describe(frame, spec)
    assert (spec.task, found["clients"]) == (task, clients)

"""Reading tables: what comes in, and every way to be refused."""

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

from coterie._core.errors import DataError
from coterie.data import column_types as columns
from coterie.data import delimited, tables

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
    words = ["", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "?", "  ? ", "#N/A", "#DIV/0!"]
    table = tables.read({"word": [*words, "here"], "number": [*words, "1"], "float": [math.nan] * 13 + [2.0]})
    assert table.null_count().row(0) == (13, 13, 13)
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


@settings(max_examples=60)
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

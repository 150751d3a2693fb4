"""LIBSVM text, arrays and columns: what is written comes back, what is wrong is named."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie._core.errors import DataError, SettingError
from coterie.data.readers import arrays, columns, libsvm

LIBSVM = Path(__file__).resolve().parents[3] / "shared" / "data" / "libsvm"
real = pytest.mark.skipif(not LIBSVM.is_dir(), reason="the shared LIBSVM files are not here")

_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
_values = st.floats(allow_nan=False, allow_infinity=False).filter(lambda value: value != 0.0)


def _write(folder: Path, text: str, name: str = "rows") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


@settings(max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.integers(-3, 3), st.dictionaries(st.integers(0, 11), _values, max_size=6)),
        min_size=1,
        max_size=8,
    ),
    first=st.sampled_from([0, 1]),
    suffix=st.sampled_from(list(_COMPRESS)),
    ending=st.sampled_from(["\n", "\r\n", " # note\n", "\n\n"]),
)
def test_libsvm_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[int, dict[int, float]]],
    first: int,
    suffix: str,
    ending: str,
) -> None:
    rows = [*rows, (0, {0: 1.5})]  # so that a file counting from 0 shows it
    lines = [
        " ".join([str(label), *(f"{index + first}:{entries[index]!r}" for index in sorted(entries))])
        for label, entries in rows
    ]
    path = tmp_path_factory.mktemp("libsvm") / f"rows{suffix}"
    path.write_bytes(_COMPRESS[suffix]((ending.join(lines) + ending).encode()))
    expected = torch.zeros(len(rows), 12, dtype=torch.float64)
    for row, (_, entries) in enumerate(rows):
        for index, value in entries.items():
            expected[row, index] = value

    pool = libsvm(path, features=12)

    assert torch.equal(pool.x, expected)
    assert pool.class_names == [str(label) for label in sorted({label for label, _ in rows})]
    assert [pool.class_names[k] for k in pool.y.tolist()] == [str(label) for label, _ in rows]
    assert libsvm(path, features=12, labels="raw").y.tolist() == [float(label) for label, _ in rows]


def test_libsvm_labels_and_width(tmp_path: Path) -> None:
    path = _write(tmp_path, "+1 2:0.5\n-1 1:2 4:1\n+1\n")
    pool = libsvm(path, dtype=torch.float32)
    assert pool.y.tolist() == [1, 0, 1] and pool.y.dtype == torch.int64
    assert pool.x.dtype == torch.float32 and pool.x.tolist() == [[0, 0.5, 0, 0], [2, 0, 0, 1], [0, 0, 0, 0]]
    assert libsvm(path, features=6).x.shape == (3, 6)
    assert libsvm(_write(tmp_path, "1 1:1\n2 1:2\n", "two")).y.tolist() == [0, 1]
    regression = libsvm(_write(tmp_path, "0.25 1:1\n-3 1:2\n", "raw"), labels="raw")
    assert regression.y.tolist() == [0.25, -3.0] and regression.class_names is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n# nothing\n", "holds no rows"),
        ("1 1:1\n\n1 2:x\n", "line 3: expected index:value but found '2:x'"),
        ("1 1:1 7\n", "line 1: expected index:value but found '7'"),
        ("1 1:1\n1 +-2:1\n", "line 2: expected index:value"),
        ("1 1_0:1\n", "line 1: expected index:value"),
        ("1 ٣:1\n", "line 1: expected index:value"),
        ("1 qid:3 1:1\n", "line 1: expected index:value but found 'qid:3'"),
        ("1,2 1:1\n", "line 1: label '1,2'"),
        ("1 1:1\nnan 1:1\n", "line 2: the label is NaN"),
        ("1 1:1\n0.5 1:1\n", "line 2: label 0.5 .* labels='raw'"),
        ("1 1:1\n1 -1:1\n", "line 2: index -1 is out of range"),
        ("1 1:1\n1 4:1\n", "line 2: index 4 is out of range for features=3"),
        ("1 1:1 99999999999999999999999:1\n", "line 1: index 9+ is out of range"),
        ("1 1:1 1:2\n", "line 1: index 1 follows 1"),
        ("1 2:1 1:2\n", "line 1: index 1 follows 2"),
        ("1 1:1\n1 2:inf\n", "line 2: the value of index 2 is NaN or infinity"),
    ],
)
def test_libsvm_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(DataError, match=message) as caught:
        libsvm(path, features=3)
    assert str(path) in str(caught.value)


def test_libsvm_bad_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.*does not exist"):
        libsvm(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is a folder"):
        libsvm(tmp_path)
    with pytest.raises(DataError, match=r"rows\.gz is named \.gz but is no"):
        libsvm(_write(tmp_path, "1 1:1\n", "rows.gz"))
    with pytest.raises(DataError, match="holds no features"):
        libsvm(_write(tmp_path, "1\n0\n"))
    with pytest.raises(DataError, match="line 2: a dense table of 2 x 9000000000000 would not fit"):
        libsvm(_write(tmp_path, "1 1:1\n1 9000000000000:1\n"))
    (tmp_path / "latin").write_bytes(b"1 1:1\n1 2:1 # caf\xe9\n")
    with pytest.raises(DataError, match="line 2: byte 0xe9 is not UTF-8"):
        libsvm(tmp_path / "latin")
    with pytest.raises(SettingError, match="labels='both'"):
        libsvm(_write(tmp_path, "1 1:1\n"), labels="both")  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_broken_streams(tmp_path: Path, suffix: str) -> None:
    whole = _COMPRESS[suffix]("".join(f"1 1:{k}\n" for k in range(2000)).encode())
    for name, raw in (("short", whole[: len(whole) // 2]), ("torn", whole[:40] + b"\x55" * 40 + whole[80:])):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(raw)
        with pytest.raises(DataError, match=f"{name}.*truncated or corrupt.*fetch it again"):
            libsvm(path)


@real
@pytest.mark.parametrize(
    ("name", "shape", "classes", "counts"),
    [
        ("mushrooms", (8124, 112), ["1", "2"], [3916, 4208]),
        ("a6a", (11220, 122), ["-1", "1"], [8528, 2692]),
        pytest.param("w8a", (49749, 300), ["-1", "1"], [48270, 1479], marks=pytest.mark.slow),
        pytest.param("ijcnn1", (49990, 22), ["-1", "1"], [45137, 4853], marks=pytest.mark.slow),
    ],
)
def test_real_libsvm(name: str, shape: tuple[int, int], classes: list[str], counts: list[int]) -> None:
    pool = libsvm(LIBSVM / f"{name}.bz2")
    assert pool.x.shape == shape
    assert pool.class_names == classes
    assert pool.y.bincount().tolist() == counts


@real
def test_libsvm_agrees_with_sklearn() -> None:
    from sklearn.datasets import load_svmlight_file

    x, y = load_svmlight_file(str(LIBSVM / "a6a.bz2"), n_features=123)
    pool = libsvm(LIBSVM / "a6a.bz2", features=123)
    np.testing.assert_array_equal(pool.x.numpy(), x.toarray())
    np.testing.assert_array_equal(pool.y.numpy(), (y > 0).astype(int))


def test_arrays_group_rows_by_client() -> None:
    x = np.arange(10.0).reshape(5, 2)
    x.setflags(write=False)
    clients = arrays(x, [0, 1, 0, 1, 1], client=["b", "a", "b", "a", "c"], cluster=[7, 3, 7, 3, 7])
    assert clients.names == ["a", "b", "c"]
    assert [block[:, 0].tolist() for block in clients.xs] == [[2, 6], [0, 4], [8]]
    assert [block.tolist() for block in clients.ys] == [[1, 1], [0, 0], [1]]
    assert clients.clusters is not None and clients.clusters.tolist() == [0, 1, 1]
    assert clients.cluster_names == ["3", "7"]


def test_arrays_types() -> None:
    assert arrays(torch.ones(2, 1), ["no", "yes"], [1, 1]).ys[0].tolist() == [0, 1]
    assert arrays(np.ones((2, 1), np.float32), [True, False], [1.0, 2.0]).names == ["1", "2"]
    assert arrays([[1, 2], [3, 4]], [0.5, 1.5], torch.tensor([10, 2])).names == ["2", "10"]
    big_endian = arrays(np.ones((1, 1), ">f4"), np.ones(1, ">i2"), ["a"])
    assert big_endian.xs[0].dtype == torch.float32 and big_endian.ys[0].dtype == torch.int64


@pytest.mark.parametrize(
    ("x", "y", "client", "cluster", "message"),
    [
        ([[1.0], [2.0]], [1.0], ["a", "a"], None, "x has shape .2, 1. but y .1."),
        ([[1.0], [2.0]], [1, 2], ["a"], None, "client labels have shape .1."),
        ([[1.0], [2.0]], [1, 2], ["a", None], None, "row 1 has no client label"),
        ([[1.0], [2.0]], [1, 2], [1.0, float("nan")], None, "row 1 has no client label"),
        ([[1.0], [2.0]], [1, 2], ["", "a"], None, "row 0 has no client label"),
        ([[1.0], [2.0]], [1, 2], [[1], [1, 2]], None, "client labels are not one value per row"),
        ([[1.0], [2.0]], [1, 2], ["a", "a"], ["p", "q"], "client 'a' is in two clusters"),
        ([[1.0], [float("nan")]], [1, 2], ["a", "b"], None, "client 'b': inputs of row 0 hold NaN"),
        ([[1.0], [None]], [1, 2], ["a", "b"], None, "x: row 1 is missing"),
        ([["red"], ["blue"]], [1, 2], ["a", "b"], None, "x is not numeric"),
        ([[1.0], [2.0, 3.0]], [1, 2], ["a", "b"], None, "x: rows differ in shape"),
    ],
)
def test_arrays_say_what_is_wrong(
    x: object, y: object, client: object, cluster: object, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        arrays(x, y, client, cluster)


class _Dataset:
    """The two things of a Hugging Face data set that are used."""

    def __init__(self, data: dict[str, list[object]]) -> None:
        self.column_names = list(data)
        self._data = data

    def __getitem__(self, name: str) -> list[object]:
        return self._data[name]


@pytest.mark.parametrize("wrap", [dict, _Dataset])
def test_columns_by_name(wrap: Callable[[dict[str, list[object]]], object]) -> None:
    data = wrap(
        {
            "age": [3, 4, 5],
            "who": ["b", "a", "b"],
            "sick": [1, 0, 1],
            "bmi": [0.5, 1, 2],
            "town": ["x", "y", "x"],
        }
    )
    clients = columns(data, client="who", target="sick", cluster="town")
    assert clients.names == ["a", "b"] and clients.cluster_names == ["x", "y"]
    assert clients.xs[1].tolist() == [[3, 0.5], [5, 2]] and clients.xs[1].dtype == torch.float64
    assert clients.ys[1].tolist() == [1, 1]
    chosen = columns(data, client="who", target="sick", features=["bmi"])
    assert chosen.xs[0].tolist() == [[1.0]] and chosen.clusters is None


def test_columns_of_arrays() -> None:
    data = {
        "image": [np.full((2, 2), k, np.float32) for k in range(3)],
        "label": [0, 1, 2],
        "user": ["u", "v", "u"],
    }
    clients = columns(data, client="user", target="label")
    assert clients.xs[0].shape == (2, 2, 2) and clients.xs[0].dtype == torch.float32
    tokens = columns({"ids": [[1, 2], [3, 4]], "y": [0, 1], "user": [0, 0]}, client="user", target="y")
    assert tokens.xs[0].dtype == torch.int64


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, {"client": "whom"}, "no column 'whom'. Did you mean 'who'"),
        ({}, {"features": []}, "no feature columns"),
        ({"town": ["x", "y"]}, {}, "column 'town' is not numeric"),
        ({"bmi": [1.0, None]}, {}, "column 'bmi': row 1 is missing"),
        ({"bmi": [1.0]}, {}, "'age' and 'bmi' differ in length"),
        ({"sick": [1]}, {}, "column 'sick' has 1 rows"),
        ({"scan": [[1, 2], [3, 4]]}, {}, "column 'scan' holds arrays"),
    ],
)
def test_columns_say_what_is_wrong(
    changes: dict[str, object], arguments: dict[str, object], message: str
) -> None:
    data = {"age": [3, 4], "who": ["b", "a"], "sick": [1, 0]} | changes
    with pytest.raises(DataError, match=message):
        columns(data, **({"client": "who", "target": "sick"} | arguments))  # type: ignore[arg-type]


def test_columns_need_columns() -> None:
    with pytest.raises(DataError, match="no columns"):
        columns([1, 2], client="a", target="b")

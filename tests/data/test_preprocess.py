"""Encoding: fitted through sums, exact after JSON, and clear about tables that do not fit."""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie._core.errors import DataError
from coterie.data import bundled, tables
from coterie.data.preprocess import Moments, Preprocessor, Statistics, local_statistics
from coterie.data.table_spec import TableSpec


def fitted(frame: pl.DataFrame, **settings: Any) -> Preprocessor:
    spec = tables.check(frame, "client", "y", **settings)
    return Preprocessor.from_statistics(spec, local_statistics(frame, spec), fewest=(1, 1))


def small(**changes: Any) -> pl.DataFrame:
    rows = {
        "client": ["a", "a", "b", "b"],
        "x": [1.0, 3.0, None, 5.0],
        "word": ["red", None, "blue", "red"],
        "flag": [True, False, True, True],
        "y": [10.0, 20.0, 30.0, 60.0],
    }
    return tables.read(rows | changes)


def test_encoding_of_every_kind() -> None:
    frame = small()
    encoder = fitted(frame)
    assert encoder.feature_names == ["x", "x_missing", "flag", "word=blue", "word=red", "word_missing"]
    sd, flag_sd = math.sqrt(8 / 3), math.sqrt(3) / 4
    expected = [
        [-2 / sd, 0, 0.25 / flag_sd, 0, 1, 0],
        [0, 0, -0.75 / flag_sd, 0, 0, 1],
        [0, 1, 0.25 / flag_sd, 1, 0, 0],
        [2 / sd, 0, 0.25 / flag_sd, 0, 1, 0],
    ]
    features = encoder.encode(frame)
    assert features.dtype == torch.float64
    torch.testing.assert_close(features, torch.tensor(expected, dtype=torch.float64))
    assert [encoder.feature_of(name) for name in encoder.feature_names] == ["x", "x", "flag", *["word"] * 3]
    with pytest.raises(DataError, match=r"'word=rd'.*'word=red'"):
        encoder.feature_of("word=rd")


def test_targets_there_and_back() -> None:
    frame = small()
    encoder = fitted(frame)
    targets = encoder.encode_target(frame)
    assert targets.dtype == torch.float64
    assert abs(float(targets.mean())) < 1e-12 and float(targets.std(correction=0)) == pytest.approx(1)
    decoded = encoder.decode(targets)
    assert isinstance(decoded, torch.Tensor)
    assert encoder.target_scale == pytest.approx(np.std([10, 20, 30, 60]))
    torch.testing.assert_close(decoded, torch.tensor([10.0, 20, 30, 60], dtype=torch.float64))
    classes = fitted(small(y=["q", "p", "r", "p"]))
    numbers = classes.encode_target(small(y=["q", "p", "r", "p"]))
    assert numbers.dtype == torch.int64 and numbers.tolist() == [1, 0, 2, 0]
    assert classes.decode(numbers) == ["q", "p", "r", "p"] and classes.target_scale == 1.0


def test_new_rows_with_what_training_never_saw() -> None:
    encoder = fitted(small(x=[1.0, 2.0, 3.0, 4.0], word=["red", "blue", "red", "blue"]), drop=["flag"])
    assert encoder.feature_names == ["x", "word=blue", "word=red"]
    new = tables.read({"word": ["green", None, "red"], "x": [None, "2.5", "?"]})
    assert encoder.encode(new).tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1]]


def test_constant_and_absent_in_training_rows_are_left_out() -> None:
    table = small(x=[0.1, 0.1, 0.1, 9.0], late=[None, None, None, 1.0], word=["p", "p", "p", "q"])
    spec = tables.check(table, "client", "y")
    encoder = Preprocessor.from_statistics(spec, local_statistics(table.head(3), spec))
    assert encoder.feature_names == ["flag"]
    assert encoder.encode(table).shape == (4, 1)
    with pytest.raises(DataError, match="No feature column varies"):
        Preprocessor.from_statistics(spec, local_statistics(table.head(1), spec))


def test_constant_that_is_sometimes_missing_leaves_its_indicator() -> None:
    frame = small(x=[0.1, 0.1, None, 0.1])
    assert fitted(frame, drop=["word", "flag"]).feature_names == ["x_missing"]


def test_names_never_collide() -> None:
    encoder = fitted(small(x_missing=[1, 2, 3, 4]))
    assert encoder.feature_names[:4] == ["x", "x_missing_", "flag", "x_missing"]
    assert encoder.feature_of("x_missing") == "x_missing" and encoder.feature_of("x_missing_") == "x"


def merged(frame: pl.DataFrame, spec: TableSpec) -> Statistics:
    parts = frame.partition_by(spec.client)
    return functools.reduce(Statistics.merge, (local_statistics(part, spec) for part in parts))


def assert_same_fit(frame: pl.DataFrame, spec: TableSpec) -> None:
    """Clients that send sums get the preprocessor of the pooled rows."""
    pooled = Preprocessor.from_statistics(spec, local_statistics(frame, spec))
    federated = Preprocessor.from_statistics(spec, merged(frame, spec))
    assert federated.feature_names == pooled.feature_names
    torch.testing.assert_close(federated.encode(frame), pooled.encode(frame), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        federated.encode_target(frame), pooled.encode_target(frame), rtol=1e-9, atol=1e-9
    )


def test_federated_sums_fit_like_pooled_rows() -> None:
    draw = np.random.default_rng(0)
    rows = 400
    frame = pl.DataFrame(
        {
            "client": draw.integers(0, 30, rows),
            "x": draw.normal(1e6, 1.0, rows),
            "gaps": np.where(draw.random(rows) < 0.3, np.nan, draw.exponential(size=rows)),
            "same": np.full(rows, 0.1),
            "word": draw.choice(["p", "q", "rare"], rows, p=[0.6, 0.39, 0.01]),
            "y": draw.normal(-5.0, 3.0, rows),
        }
    )
    frame = tables.read(frame)
    assert_same_fit(frame, tables.check(frame, "client", "y"))


def test_federated_sums_on_the_bundled_hospitals() -> None:
    frame = tables.read(bundled.path("heart_disease"))
    spec = tables.check(frame, "hospital", "sick")
    assert_same_fit(frame, spec)
    encoder = Preprocessor.from_statistics(spec, merged(frame, spec))
    assert {"chol", "chol_missing", "cp=typical", "thal_missing"} <= set(encoder.feature_names)
    assert torch.isfinite(encoder.encode(frame)).all()


values = st.lists(st.none() | st.floats(-1e6, 1e6), max_size=8)


@settings(max_examples=100)
@given(st.tuples(values, values, values))
def test_moments_merge_in_any_order(lists: tuple[list[float | None], ...]) -> None:
    first, second, third = (Moments.of(pl.Series(some, dtype=pl.Float64)) for some in lists)
    together = Moments.of(pl.Series(list(itertools.chain(*lists)), dtype=pl.Float64))
    for found in (first.merge(second).merge(third), third.merge(first.merge(second))):
        assert (found.count, found.missing) == (together.count, together.missing)
        assert found.mean == pytest.approx(together.mean, rel=1e-9, abs=1e-6)
        assert found.squares == pytest.approx(together.squares, rel=1e-9, abs=1e-3)


def test_large_means_do_not_cancel() -> None:
    near = pl.Series([1e9 + value for value in (1.0, 2.0, 3.0)])
    assert Moments.of(near[:1]).merge(Moments.of(near[1:])).sd == pytest.approx(math.sqrt(2 / 3), rel=1e-9)


@settings(max_examples=60)
@given(
    st.lists(st.floats(-1e100, 1e100), min_size=2, max_size=6, unique=True), st.lists(st.text(), min_size=2)
)
def test_json_is_exact(numbers: list[float], words: list[str]) -> None:
    spec = TableSpec("client", "y", None, "regression", (), ("x",), ("word",), ["a warning"])
    statistics = local_statistics(
        pl.DataFrame(
            {
                "client": "a",
                "x": numbers,
                "y": numbers,
                "word": (words * len(numbers))[: len(numbers)],
            }
        ),
        spec,
    )
    if not statistics.numeric["x"].sd:
        return
    encoder = Preprocessor.from_statistics(spec, statistics)
    copy = Preprocessor.from_json(encoder.to_json())
    assert copy == encoder and copy.to_json() == encoder.to_json()
    assert "a warning" not in json.dumps(json.loads(encoder.to_json()))


def test_json_keeps_classes_and_features() -> None:
    encoder = fitted(small(y=["q", "p", "r", "p"]))
    copy = Preprocessor.from_json(encoder.to_json())
    assert copy.spec.classes == ("p", "q", "r") and copy.feature_names == encoder.feature_names
    assert torch.equal(copy.encode(small()), encoder.encode(small()))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (small().rename({"word": "wrod"}), ["column 'word' is missing", "Did you mean 'wrod'?"]),
        (small(x=[1.0, 2.0, math.inf, 3.0]), ["column 'x', row 3 (client 'b')", "infinite"]),
        (small(x=["1", "2", "3", "four"]), ["column 'x', row 4 (client 'b')", "'four' is not a number"]),
        (small(x=["1", "2", "3", "four"]).drop("client"), ["column 'x', row 4:", "'four' is not a number"]),
        (small(x=[[1]] * 4), ["column 'x' holds List"]),
        (small(word=[[1]] * 4), ["column 'word' holds List", "Write it as text or numbers"]),
    ],
)
def test_tables_that_do_not_fit(table: pl.DataFrame, said: list[str]) -> None:
    encoder = fitted(small())
    with pytest.raises(DataError) as caught:
        encoder.encode(table, source="new.csv")
    for words in ["new.csv: ", *said]:
        assert words in str(caught.value)


def test_targets_that_do_not_fit() -> None:
    with pytest.raises(
        DataError, match=r"new.csv: target column 'y', row 2 \(client 'a'\): the value is missing"
    ):
        fitted(small()).encode_target(small(y=[1.0, None, 2.0, 3.0]), source="new.csv")
    with pytest.raises(DataError, match=r"row 4 .*is not one of p, q"):
        fitted(small(y=["p", "q", "p", "q"])).encode_target(small(y=["p", "q", "p", "z"]))
    with pytest.raises(DataError, match="column 'y' is missing"):
        fitted(small()).encode_target(small().drop("y"))


def test_numbers_too_large_to_square() -> None:
    largest = sys.float_info.max
    with pytest.raises(DataError, match=r"'x' holds numbers too large.*--drop x"):
        fitted(small(x=[largest, -largest, 1.0, 2.0]))

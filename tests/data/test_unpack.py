"""Packed files that would fill the memory are refused before they do."""

from __future__ import annotations

import gzip
import lzma
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from coterie._core.errors import DataError
from coterie._core.panics import panics_as_errors
from coterie.data import tables, unpack

FRAME = b"\x28\xb5\x2f\xfd\x00\x58"


def bomb(pack: Callable[[bytes], bytes]) -> bytes:
    return pack(b"site,a,y\n" + b"0" * (3 << 26))


def zeros_as_zstandard(data: bytes) -> bytes:
    """A frame of blocks that each repeat one byte 128 KiB times."""
    block = (2 | (1 << 17) << 3).to_bytes(3, "little") + b"0"
    return FRAME + block * (len(data) >> 17) + (1).to_bytes(3, "little")


@pytest.mark.quick(".zst-zeros_as_zstandard", ".gz-compress")
@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        (".gz", gzip.compress),
        (".xz", lambda data: lzma.compress(data, preset=0)),
        (".zst", zeros_as_zstandard),
    ],
)
def test_what_unpacks_without_end_is_refused(
    suffix: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / f"bomb.csv{suffix}"
    path.write_bytes(bomb(pack))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"more than 200 times its size.*unpack it before"):
            tables.read(path)
        assert tracemalloc.get_traced_memory()[1] < 1.2e8
    finally:
        tracemalloc.stop()


def test_the_limit_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, frame = tmp_path / "t.csv", pl.DataFrame({"site": ["a"] * 10_000, "x": range(10_000)})
    frame.write_csv(text)
    frame.write_parquet(tmp_path / "t.parquet")
    assert tables.read(text).height == tables.read(tmp_path / "t.parquet").height == 10_000
    monkeypatch.setenv("COTERIE_MEMORY", "0.0001")
    for path in (text, tmp_path / "t.parquet"):
        with pytest.raises(DataError, match=rf"{path.name}.*GB of memory.*COTERIE_MEMORY"):
            tables.read(path)


def test_bound_of_zstandard_frames() -> None:
    data = b"abc" * 50
    stored = (1 | len(data) << 3).to_bytes(3, "little") + data
    repeated = (3 | 1000 << 3).to_bytes(3, "little") + b"x"
    skipped = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"note"
    assert unpack._most_unpacked(FRAME + stored) == 150
    assert unpack._most_unpacked(skipped + FRAME + stored + FRAME + repeated) == 1150
    assert unpack._most_unpacked(b"") == 0


def test_parquet_that_makes_polars_panic_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A copy that lost its middle: polars panics and writes pages of native traces to standard error."""
    path = tmp_path / "t.parquet"
    pl.DataFrame({"site": ["a", "b"] * 2000, "x": [0.37 * k for k in range(4000)]}).write_parquet(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + whole[-1500:])
    with pytest.raises(DataError, match=r"t\.parquet.*write it again"):
        tables.read(path)
    assert capfd.readouterr().err == ""


def test_what_others_write_meanwhile_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with panics_as_errors():
        os.write(2, b"a note\n")
    assert capfd.readouterr().err == "a note\n"

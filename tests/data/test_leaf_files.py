"""LEAF JSON: users are clients, parts are told by name, copies are not counted twice."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from coterie._core.errors import DataError, SettingError
from coterie.data.leaf_files import LETTERS, leaf

FEMNIST = Path(__file__).resolve().parents[3] / "shared" / "data" / "femnist"
real = pytest.mark.skipif(not FEMNIST.is_dir(), reason="the shared FEMNIST archives are not here")

Rows = dict[str, tuple[Sequence[object], Sequence[object]]]


def _write(path: Path, rows: Rows, **changes: object) -> Path:
    content = {
        "users": list(rows),
        "num_samples": [len(y) for _, y in rows.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in rows.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | changes))
    return path


def _data_set(folder: Path) -> Path:
    _write(folder / "train" / "a.json", {"u": ([[1.0, 2.0], [3.0, 4.0]], [0, 1]), "v": ([[5.0, 6.0]], [2])})
    _write(folder / "train" / "b.json", {"w": ([[7.0, 8.0]], [3])})
    _write(folder / "test" / "a.json", {"u": ([[9.0, 9.5]], [4]), "x": ([], [])})
    return folder


@pytest.mark.parametrize("form", ["folder", "archive", "parts", "files"])
def test_users_are_clients(tmp_path: Path, form: str) -> None:
    folder = _data_set(tmp_path / "set")
    paths: Path | list[Path] = folder
    if form == "archive":
        paths = tmp_path / "set.tar.xz"
        with tarfile.open(paths, "w:xz") as archive:
            archive.add(folder, "set")
    elif form == "parts":
        paths = [folder / "train", folder / "test"]
    elif form == "files":
        paths = sorted(folder.rglob("*.json"))
    for repeats in ("error", "first"):
        train = leaf(paths, split="train", repeats=repeats)
        assert train.names == ["u", "v", "w"]
        assert train.xs[0].tolist() == [[1, 2], [3, 4]] and train.ys[0].tolist() == [0, 1]
        everything = leaf(paths, repeats=repeats)
        rows = {name: sorted(y.tolist()) for name, y in zip(everything.names, everything.ys, strict=True)}
        assert rows == {"u": [0, 1, 4], "v": [2], "w": [3]}
        assert leaf(paths, split="test", repeats=repeats).names == ["u"]


def test_max_clients_stops_early(tmp_path: Path) -> None:
    folder = _data_set(tmp_path)
    (folder / "train" / "b.json").write_text("not read")
    assert leaf(folder, split="train", max_clients=2).names == ["u", "v"]
    with pytest.raises(DataError, match=r"b\.json, line 1, column 1: broken JSON"):
        leaf(folder, split="train")


def test_max_clients_keeps_both_parts(tmp_path: Path) -> None:
    clients = leaf(_data_set(tmp_path), max_clients=1)
    assert clients.names == ["u"] and sorted(clients.ys[0].tolist()) == [0, 1, 4]


def test_copies_of_a_user(tmp_path: Path) -> None:
    first = _data_set(tmp_path / "first")
    second = tmp_path / "second"
    _write(
        second / "train" / "a.json",
        {"x": ([[0.0, 0.0]], [7]), "u": ([[1.0, 2.0]], [8]), "z": ([[0.0, 0.0]], [9])},
    )
    with pytest.raises(DataError, match=r"user 'x' is in .*first.* and again in .*second.*repeats='first'"):
        leaf([first, second])
    clients = leaf([first, second], split="train", repeats="first")
    assert clients.names == ["u", "v", "w", "z"]
    assert clients.ys[0].tolist() == [0, 1]
    _write(first / "train" / "c.json", {"v": ([[0.0, 0.0]], [7])})
    with pytest.raises(DataError, match=r"user 'v' is in .*a\.json and again in .*c\.json"):
        leaf(first, repeats="first")


def test_parts_by_file_name(tmp_path: Path) -> None:
    _write(tmp_path / "all_data_0_train_9.json", {"u": ([[1.0]], [0])})
    _write(tmp_path / "all_data_0_test_9.json", {"u": ([[2.0]], [1])})
    assert leaf(tmp_path / "all_data_0_train_9.json").ys[0].tolist() == [0]
    assert leaf(tmp_path, split="test").ys[0].tolist() == [1]


def test_images(tmp_path: Path) -> None:
    row = [k / 784 for k in range(784)]
    clients = leaf(_write(tmp_path / "data.json", {"u": ([row, row], [5, 61])}))
    assert clients.xs[0].shape == (2, 1, 28, 28) and clients.xs[0].dtype == torch.float32
    assert float(clients.xs[0][1, 0, 1, 2]) == pytest.approx(30 / 784)
    assert clients.ys[0].tolist() == [5, 61] and clients.ys[0].dtype == torch.int64


def test_text_becomes_letters(tmp_path: Path) -> None:
    clients = leaf(_write(tmp_path / "data.json", {"HAMLET": (["To be, ", "o be, é"], ["o", "}"])}))
    assert len(LETTERS) == 80 == len(set(LETTERS))
    assert clients.xs[0].dtype == torch.int64 and clients.xs[0].shape == (2, 7)
    assert "".join(LETTERS[k] for k in clients.xs[0][0].tolist()) == "To be, "
    assert int(clients.xs[0][1, 6]) == 80
    assert clients.ys[0].tolist() == [LETTERS.index("o"), 79]


@pytest.mark.parametrize(
    ("users", "changes", "message"),
    [
        ({"u": ([[1.0]], [0])}, {"users": ["u", "v"]}, "is not LEAF JSON"),
        ({"u": ([[1.0]], [0])}, {"user_data": []}, "is not LEAF JSON"),
        ({"u": ([[1.0]], [0])}, {"num_samples": [1, 1]}, "'num_samples' does not match"),
        ({"u": ([[1.0]], [0])}, {"num_samples": [2]}, "user 'u': 1 inputs, 1 targets, num_samples 2"),
        ({"u": ([[1.0], [2.0]], [0])}, {}, "user 'u': 2 inputs, 1 targets"),
        ({"u": ([[1.0], [2.0, 3.0]], [0, 1])}, {}, "user 'u': the rows of x differ in length"),
        ({"u": ([[["a"]]], [0])}, {}, "user 'u': x is not numeric"),
        ({"u": (["ab", "abc"], ["a", "b"])}, {}, "user 'u': text rows must be equally long"),
        ({"u": (["ab"], ["ab"])}, {}, "user 'u': a text target must be one character"),
        ({"u": ([[1.0]], [0])}, {"user_data": {"u": [1]}}, "user 'u': 'x' and 'y' must be lists"),
        ({"u": ([[float("nan")]], [0])}, {}, "client 'u': inputs of row 0 hold NaN"),
        ({"u": ([[1.0]], [0]), "v": ([[1.0, 2.0]], [0])}, {}, "client 'v': inputs are"),
        ({}, {}, "no users with split='all'"),
    ],
)
def test_bad_documents_are_named(
    tmp_path: Path, users: Rows, changes: dict[str, object], message: str
) -> None:
    path = _write(tmp_path / "data.json", users, **changes)
    with pytest.raises(DataError, match=message) as caught:
        leaf(path)
    assert "client" in str(caught.value) or str(path) in str(caught.value)


def test_bad_requests(tmp_path: Path) -> None:
    path = _write(tmp_path / "data.json", {"u": ([[1.0]], [0])})
    with pytest.raises(DataError, match="no users with split='train'"):
        leaf(path, split="train")
    with pytest.raises(DataError, match="does not exist"):
        leaf(tmp_path / "nowhere.json")
    with pytest.raises(SettingError, match="split='dev'"):
        leaf(path, split="dev")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="repeats='last'"):
        leaf(path, repeats="last")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="max_clients=0"):
        leaf(path, max_clients=0)
    path.write_bytes(b'{"users":\n ["\xff"]}')
    with pytest.raises(DataError, match="line 2: byte 0xff is not UTF-8"):
        leaf(path)


@real
def test_real_femnist_starts() -> None:
    clients = leaf(FEMNIST / "arakotom_flic.tar.xz", split="test", max_clients=5)
    assert clients.names[:3] == ["f1695_12", "f1621_46", "f2073_06"]
    assert clients.sizes.tolist() == [17, 11, 18, 5, 18]
    assert clients.xs[0].shape == (17, 1, 28, 28)
    assert clients.ys[0][:5].tolist() == [56, 27, 0, 4, 1]


@real
@pytest.mark.slow
def test_real_femnist_union() -> None:
    archives = sorted(FEMNIST.glob("*.tar.xz"))
    train = leaf(archives, split="train", repeats="first")
    assert len(train) == 300
    assert max(int(y.max()) for y in train.ys) == 61
    with pytest.raises(DataError, match="repeats='first'"):
        leaf(archives, split="test")

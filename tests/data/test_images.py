"""idx files and CIFAR in its binary and picture forms."""

from __future__ import annotations

import gzip
import io
import struct
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie._core.errors import DataError, SettingError
from coterie._core.extras import MissingExtra
from coterie.data.images import cifar, idx

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
real = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not here")


def _idx_bytes(table: np.ndarray) -> bytes:
    return (
        struct.pack(f">I{table.ndim}I", 0x800 + table.ndim, *table.shape) + table.astype(np.uint8).tobytes()
    )


def _idx_files(folder: Path, images: bytes, labels: bytes) -> tuple[Path, Path]:
    (folder / "images").write_bytes(images)
    (folder / "labels").write_bytes(labels)
    return folder / "images", folder / "labels"


@settings(max_examples=30)
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5)),
    packed=st.booleans(),
    data=st.data(),
)
def test_idx_round_trip(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, int, int], packed: bool, data: st.DataObject
) -> None:
    pixels = np.frombuffer(
        data.draw(st.binary(min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))), np.uint8
    )
    pixels = pixels.reshape(shape)
    labels = np.arange(shape[0])[::-1]
    raw = [_idx_bytes(pixels), _idx_bytes(labels)]
    pool = idx(
        *_idx_files(tmp_path_factory.mktemp("idx"), *(gzip.compress(one) if packed else one for one in raw))
    )
    assert pool.x.shape == (shape[0], 1, *shape[1:]) and pool.x.dtype == torch.float32
    assert torch.equal((pool.x[:, 0] * 255).round().byte(), torch.from_numpy(pixels.copy()))
    assert pool.y.tolist() == labels.tolist()


def test_idx_says_what_is_wrong(tmp_path: Path) -> None:
    images, labels = _idx_bytes(np.zeros((3, 2, 2))), _idx_bytes(np.zeros(3))
    cases = [
        (labels, images, "images has magic number 2049.*swapped"),
        (b"\x00\x00\x0d\x03" + images[4:], labels, "images has magic number 3331, not the 2051"),
        (images[:-1], labels, r"images promises \[3, 2, 2\] bytes but holds 11"),
        (images + b"x", labels, "holds 13"),
        (images[:9], labels, "images promises"),
        (b"\x00\x00", labels, "images is truncated"),
        (b"", labels, "images is empty"),
        (images, _idx_bytes(np.zeros(4)), "holds 3 images but .*labels holds 4 labels"),
        (_idx_bytes(np.zeros((0, 2, 2))), labels, "holds no images"),
        (gzip.compress(images)[:-9], labels, "images is truncated or corrupt"),
    ]
    for one, other, message in cases:
        with pytest.raises(DataError, match=message):
            idx(*_idx_files(tmp_path, one, other))
    with pytest.raises(DataError, match="does not exist"):
        idx(tmp_path / "nowhere", tmp_path / "labels")


@real
def test_real_fashion_mnist() -> None:
    folder = SHARED / "fashion_mnist"
    pool = idx(folder / "t10k-images-idx3-ubyte.gz", folder / "t10k-labels-idx1-ubyte.gz")
    assert pool.x.shape == (10000, 1, 28, 28) and float(pool.x.max()) == 1.0
    assert pool.y.bincount().tolist() == [1000] * 10


def _records(labels: list[list[int]], seed: int = 0) -> bytes:
    pixels = (np.arange(3072) + seed) % 256
    return b"".join(bytes(label) + pixels.astype(np.uint8).tobytes() for label in labels)


def _cifar10(folder: Path) -> Path:
    folder.mkdir()
    for batch in range(1, 6):
        (folder / f"data_batch_{batch}.bin").write_bytes(_records([[batch], [9]], seed=batch))
    (folder / "test_batch.bin").write_bytes(_records([[3]]))
    (folder / "batches.meta.txt").write_text("\n".join("abcdefghij") + "\n\n")
    return folder


def _tar(path: Path, source: Path, mode: str) -> Path:
    with tarfile.open(path, mode, format=tarfile.USTAR_FORMAT) as archive:  # type: ignore[call-overload]
        archive.add(source, source.name)
    return path


@pytest.mark.parametrize("form", ["folder", "w:gz", "w:xz", "w"])
def test_cifar10_binary(tmp_path: Path, form: str) -> None:
    path = _cifar10(tmp_path / "cifar-10-batches-bin")
    if form != "folder":
        path = _tar(tmp_path / "cifar.tar", path, form)
    pool = cifar(path)
    assert pool.y.tolist() == [1, 9, 2, 9, 3, 9, 4, 9, 5, 9] and pool.class_names == list("abcdefghij")
    assert pool.x.shape == (10, 3, 32, 32)
    assert torch.equal((pool.x[4].flatten() * 255).round().long(), (torch.arange(3072) + 3) % 256)
    assert cifar(path, split="test").y.tolist() == [3]
    both = cifar(path, split="both")
    assert both.y.tolist() == [*pool.y.tolist(), 3] and torch.equal(both.x[:10], pool.x)


def test_cifar100_binary(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(_records([[19, 99], [4, 0]]))
    (tmp_path / "test.bin").write_bytes(_records([[1, 50]]))
    assert cifar(tmp_path).y.tolist() == [99, 0]
    assert cifar(tmp_path, labels="coarse").y.tolist() == [19, 4]
    assert cifar(tmp_path, split="test").y.tolist() == [50]


def test_cifar_says_what_is_wrong(tmp_path: Path) -> None:
    folder = _cifar10(tmp_path / "bin")
    with pytest.raises(SettingError, match="split='dev'"):
        cifar(folder, split="dev")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="no coarse labels"):
        cifar(folder, labels="coarse")
    (folder / "data_batch_2.bin").write_bytes(_records([[2]])[:-1])
    with pytest.raises(DataError, match=r"data_batch_2\.bin has 3072 bytes.*truncated"):
        cifar(folder)
    (folder / "data_batch_2.bin").write_bytes(_records([[10]]))
    with pytest.raises(DataError, match="label 10 of image 2"):
        cifar(folder)
    (folder / "data_batch_2.bin").unlink()
    with pytest.raises(DataError, match=r"lacks data_batch_2\.bin"):
        cifar(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no train images"):
        cifar(tmp_path / "empty")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(DataError, match="neither a folder nor a readable tar"):
        cifar(tmp_path / "text")


@pytest.mark.parametrize("name", ["cifar-10-batches-py/data_batch_1", "cifar-100-python/train"])
def test_pickled_cifar_is_refused_unread(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pickle", None)
    file = tmp_path / name
    file.parent.mkdir()
    file.write_bytes(b"\x80\x04N.")
    for path in (file, file.parent, _tar(tmp_path / "cifar.tar.gz", file.parent, "w:gz")):
        with pytest.raises(DataError, match="use the binary version"):
            cifar(path)


def test_damaged_archives(tmp_path: Path) -> None:
    path = _tar(tmp_path / "plain.tar", _cifar10(tmp_path / "bin"), "w")
    whole = path.read_bytes()
    second_header = whole.index(b"bin/data_batch_1.bin")
    for raw in (whole[:second_header], whole[: second_header + 2000], whole[:second_header] + b"?" * 512):
        path.write_bytes(raw)
        with pytest.raises(DataError, match=r"plain\.tar is truncated or corrupt"):
            cifar(path)
    packed = _tar(tmp_path / "packed.tar.xz", tmp_path / "bin", "w:xz")
    packed.write_bytes(packed.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"packed\.tar\.xz is"):
        cifar(packed)


def _picture(colour: tuple[int, int, int], size: tuple[int, int] = (4, 3)) -> bytes:
    image = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    image.new("RGB", size, colour).save(stream, "PNG")
    return stream.getvalue()


def _tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, raw in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(raw)
    return root


@pytest.mark.parametrize("packed", [False, True])
def test_picture_tree(tmp_path: Path, packed: bool) -> None:
    red, blue = _picture((255, 0, 0)), _picture((0, 0, 51))
    path = _tree(
        tmp_path / "tree",
        {"train/cat/1.png": red, "train/ant/2.png": blue, "train/ant/1.png": red, "test/bee/1.png": blue},
    )
    if packed:
        path = _tar(tmp_path / "tree.tar.xz", path, "w:xz")
    pool = cifar(path)
    assert pool.class_names == ["ant", "bee", "cat"] and pool.y.tolist() == [0, 0, 2]
    assert pool.x.shape == (3, 3, 3, 4)
    assert pool.x[:, :, 0, 0].tolist() == [[1, 0, 0], [0, 0, pytest.approx(0.2)], [1, 0, 0]]
    assert cifar(path, split="test").y.tolist() == [1]


def test_bad_pictures_are_named(tmp_path: Path) -> None:
    red = _picture((255, 0, 0))
    path = _tree(tmp_path, {"train/a/1.png": red, "train/a/2.png": _picture((0, 0, 0), (5, 3))})
    with pytest.raises(DataError, match=r"train/a/2\.png is 5x3, the first picture is 4x3"):
        cifar(path)
    _tree(path, {"train/a/2.png": red[:45]})
    with pytest.raises(DataError, match=r"train/a/2\.png is not a readable picture"):
        cifar(path)


def test_pictures_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r'pip install "coterie\[images\]"'):
        cifar(_tree(tmp_path, {"train/a/1.png": b""}))


@real
@pytest.mark.slow
def test_real_cifar10_pictures() -> None:
    pytest.importorskip("PIL")
    pool = cifar(SHARED / "cifar10" / "cifar10_jpeg.tar.xz", split="test")
    assert pool.x.shape == (10000, 3, 32, 32)
    assert pool.class_names is not None and pool.class_names[:2] == ["airplane", "automobile"]
    assert pool.y.bincount().tolist() == [1000] * 10
    assert pool.x.mean((0, 2, 3)).tolist() == pytest.approx([0.494, 0.485, 0.450], abs=0.002)

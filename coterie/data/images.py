"""Readers for images: idx files (MNIST and its relatives), and CIFAR as binary batches or as folders of pictures."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from coterie._core import extras
from coterie._core.errors import DataError, SettingError
from coterie.data.clients import Pool
from coterie.data.files import decode, existing, members, read_bytes

_IDX_IMAGES, _IDX_LABELS = 2051, 2049  # unsigned bytes in three axes and in one
_PIXELS = 3 * 32 * 32
_CIFAR10_TRAIN = [f"data_batch_{k}.bin" for k in range(1, 6)]
_BATCHES = {"train": ["train.bin", *_CIFAR10_TRAIN], "test": ["test.bin", "test_batch.bin"]}
_PICKLED = {*(f"data_batch_{k}" for k in range(1, 6)), "test_batch", "batches.meta"}
_PICKLE_MARK = b"\x80"
_Named = list[tuple[PurePosixPath, bytes]]


def idx(images: str | Path, labels: str | Path) -> Pool:
    """Read images and labels from a pair of idx files, such as those of MNIST.

    Parameters
    ----------
    images
        The file of images, plain or .gz.
    labels
        The file of labels, plain or .gz.

    Returns
    -------
    Pool
        Images [rows, 1, height, width] as float32 in 0..1, and labels as int64.

    Raises
    ------
    DataError
        If a file is damaged or swapped with the other, or their lengths differ.

    Examples
    --------
    >>> import pathlib, struct, tempfile
    >>> from coterie.data import idx
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     images, labels = pathlib.Path(folder, "images"), pathlib.Path(folder, "labels")
    ...     _ = images.write_bytes(struct.pack(">4I", 2051, 2, 28, 28) + bytes(2 * 28 * 28))
    ...     _ = labels.write_bytes(struct.pack(">2I", 2049, 2) + bytes([3, 7]))
    ...     pool = idx(images, labels)
    >>> list(pool.x.shape), pool.y.tolist()
    ([2, 1, 28, 28], [3, 7])
    """
    pixels = _idx_array(images, _IDX_IMAGES, "images")
    classes = _idx_array(labels, _IDX_LABELS, "labels")
    if len(pixels) != len(classes):
        raise DataError(
            f"{images} holds {len(pixels)} images but {labels} holds {len(classes)} labels; "
            "take both from the same part (train or test)"
        )
    return Pool(_unit(pixels).unsqueeze(1), classes.long())


def _idx_array(path: str | Path, magic: int, what: str) -> Tensor:
    raw = read_bytes(path)
    if len(raw) < 4:
        raise DataError(f"{path} is truncated: {len(raw)} bytes are no idx file; fetch it again")
    (found,) = struct.unpack_from(">I", raw)
    if found != magic:
        swapped = " (images and labels are swapped)" if found in (_IDX_IMAGES, _IDX_LABELS) else ""
        raise DataError(f"{path} has magic number {found}, not the {magic} of idx {what}{swapped}")
    axes = magic & 0xFF
    start = 4 + 4 * axes
    shape = struct.unpack_from(f">{axes}I", raw, 4) if len(raw) >= start else ()
    if not shape or len(raw) - start != math.prod(shape):
        raise DataError(
            f"{path} promises {list(shape)} bytes but holds {max(0, len(raw) - start)}; "
            "it is truncated or has something appended, fetch it again"
        )
    if math.prod(shape) == 0:
        raise DataError(f"{path} holds no {what}; fetch it again")
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy())


def cifar(
    path: str | Path,
    split: Literal["train", "test", "both"] = "train",
    labels: Literal["fine", "coarse"] = "fine",
) -> Pool:
    """Read CIFAR-10 or CIFAR-100 from a folder or tar archive.

    Either the binary version, or pictures under `split/class/` (which need Pillow). The Python version is refused:
    unpickling it could run code.

    Parameters
    ----------
    path
        The folder or archive.
    split
        "train", "test" or "both".
    labels
        "fine", or "coarse" for the 20 superclasses of CIFAR-100 (binary version only).

    Returns
    -------
    Pool
        Images [rows, 3, 32, 32] as float32 in 0..1, labels as int64, and class names where they are known.

    Raises
    ------
    DataError
        If files are missing, damaged or pickled.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from coterie.data import cifar
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     image = bytes([5]) + bytes(3 * 32 * 32)
    ...     _ = pathlib.Path(folder, "test_batch.bin").write_bytes(image + image)
    ...     pool = cifar(folder, split="test")
    >>> list(pool.x.shape), pool.y.tolist()
    ([2, 3, 32, 32], [5, 5])
    """
    if split == "both":
        train, test = cifar(path, "train", labels), cifar(path, "test", labels)
        return Pool(torch.cat([train.x, test.x]), torch.cat([train.y, test.y]), train.class_names)
    if split not in ("train", "test"):
        raise SettingError(f"split={split!r}; choose 'train', 'test' or 'both'")
    if labels not in ("fine", "coarse"):
        raise SettingError(f"labels={labels!r}; choose 'fine' or 'coarse'")
    path = existing(path)
    if path.is_file() and _first_byte(path) == _PICKLE_MARK:
        raise _pickled(path, path.name)
    classes: set[str] = set()
    found = sorted(members(path, lambda name: _wanted(path, name, split, classes)))
    binary = [(name, raw) for name, raw in found if not is_picture(name)]
    if any(name.suffix == ".bin" for name, _ in binary):
        return _binary(path, binary, split, labels)
    pictures = [(name, raw) for name, raw in found if is_picture(name)]
    if not pictures:
        raise DataError(
            f"{path} holds no {split} images; expected {split}/class/*.jpg or the binary version of CIFAR"
        )
    if labels == "coarse":
        raise _no_coarse(path)
    return _pictures(path, pictures, sorted(classes))


def _wanted(path: Path, name: PurePosixPath, split: str, classes: set[str]) -> bool:
    """Return True if a file is to be read; note the classes of both splits, so that their numbers agree."""
    if name.name in _PICKLED or (name.suffix == "" and name.parent.name == "cifar-100-python"):
        raise _pickled(path, name.as_posix())
    if is_picture(name):
        if len(name.parts) < 3 or name.parts[-3] not in ("train", "test"):
            return False
        classes.add(name.parts[-2])
        return name.parts[-3] == split
    if name.suffix == ".bin":
        return name.name in _BATCHES[split]
    return name.name in ("batches.meta.txt", "fine_label_names.txt", "coarse_label_names.txt")


def is_picture(name: PurePosixPath) -> bool:
    """Return True if a file is a JPEG or PNG picture by its name."""
    return name.suffix.lower() in (".jpg", ".jpeg", ".png")


def _first_byte(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(1)


def _pickled(path: Path, name: str) -> DataError:
    return DataError(
        f"{path}: {name} belongs to the Python version of CIFAR, which is pickled and could run code; "
        "use the binary version (cifar-10-binary.tar.gz, cifar-100-binary.tar.gz)"
    )


def _no_coarse(path: Path) -> SettingError:
    return SettingError(f"{path} has no coarse labels; only the binary version of CIFAR-100 has")


def _binary(path: Path, found: _Named, split: str, labels: str) -> Pool:
    batches = {name.name: (f"{path}: {name}", raw) for name, raw in found if name.suffix == ".bin"}
    texts = {name.name: decode(raw, f"{path}: {name}") for name, raw in found if name.suffix == ".txt"}
    hundred = f"{split}.bin" in batches
    if labels == "coarse" and not hundred:
        raise _no_coarse(path)
    expected = [f"{split}.bin"] if hundred else (_CIFAR10_TRAIN if split == "train" else ["test_batch.bin"])
    for name in expected:
        if name not in batches:
            raise DataError(f"{path} lacks {name}; fetch the archive again")
    label_bytes = 2 if hundred else 1
    records = np.concatenate([_records(*batches[name], label_bytes) for name in expected])
    column = 0 if labels == "coarse" or not hundred else 1
    count = (20 if labels == "coarse" else 100) if hundred else 10
    outside = np.flatnonzero(records[:, column] >= count)
    if len(outside):
        value = records[outside[0], column]
        raise DataError(
            f"{path}: label {value} of image {outside[0]} is outside 0..{count - 1}; fetch it again"
        )
    pixels = torch.from_numpy(records[:, label_bytes:].reshape(-1, 3, 32, 32))
    names = texts.get(f"{labels}_label_names.txt" if hundred else "batches.meta.txt", "").split()
    classes = torch.from_numpy(records[:, column].astype(np.int64))
    return Pool(_unit(pixels), classes, names if len(names) == count else None)


def _records(where: str, raw: bytes, label_bytes: int) -> np.ndarray:
    size = label_bytes + _PIXELS
    if not raw or len(raw) % size:
        raise DataError(
            f"{where} has {len(raw)} bytes, not a multiple of {size}; it is truncated, fetch it again"
        )
    return np.frombuffer(raw, np.uint8).reshape(-1, size)


def _pictures(path: Path, found: Iterable[tuple[PurePosixPath, bytes]], classes: list[str]) -> Pool:
    number = {name: k for k, name in enumerate(classes)}
    pixels = decoded(path, found, "RGB")
    y = torch.tensor([number[name.parts[-2]] for name, _ in found])
    return Pool(pixels, y, classes)


def decoded(path: Path, found: Iterable[tuple[PurePosixPath, bytes]], mode: str | None = None) -> Tensor:
    """Return pictures of one size as float32 in 0..1, [rows, channels, height, width].

    `mode` is "L" for grey or "RGB" for colours; None is grey if all pictures are.
    """
    extras.require("images", f"{path} holds pictures; reading them")
    from PIL import Image

    pictures: list[Image.Image] = []
    for name, raw in found:
        try:
            with Image.open(io.BytesIO(raw)) as image:
                if pictures and image.size != pictures[0].size:
                    raise DataError(
                        f"{path}: {name} is {image.size[0]}x{image.size[1]}, the first picture is "
                        f"{pictures[0].size[0]}x{pictures[0].size[1]}; all must have one size"
                    )
                grey = image.mode in ("1", "L")
                pictures.append(image.convert(mode or ("L" if grey else "RGB")))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{path}: {name} is not a readable picture ({error}); fetch it again") from None
    if any(picture.mode == "RGB" for picture in pictures):
        pictures = [picture.convert("RGB") for picture in pictures]
    pixels = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures]))
    return _unit(pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2))


def _unit(pixels: Tensor) -> Tensor:
    """Return bytes 0..255 as contiguous float32 in 0..1."""
    return pixels.float().div_(255.0).contiguous()

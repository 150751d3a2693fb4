"""Images by client: a folder for each client with a folder for each class, or LEAF files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import torch

from coterie._core.errors import DataError, nearest
from coterie.data.clients import Clients, by_label
from coterie.data.federated import in_order
from coterie.data.files import existing, members
from coterie.data.images import decoded, is_picture
from coterie.data.leaf_files import leaf


@dataclass(frozen=True)
class Images:
    """Images of clients, and the names of their classes in the order of the labels.

    Examples
    --------
    >>> import torch
    >>> rows = Clients([torch.zeros(2, 1, 8, 8)], [torch.tensor([0, 1])], ["anna"])
    >>> Images(rows, ["cat", "dog"]).relabelled(["cat", "cow", "dog"]).rows.ys[0].tolist()
    [0, 2]
    """

    rows: Clients
    classes: list[str]

    def relabelled(self, classes: list[str]) -> Images:
        """Return the images with labels by another list of classes, which has all of these."""
        missing = [name for name in self.classes if name not in classes]
        if missing:
            raise DataError(f"class {missing[0]!r} is not among {len(classes)} classes")
        number = torch.tensor([classes.index(name) for name in self.classes])
        rows = replace(self.rows, ys=[number[y] for y in self.rows.ys])
        return Images(rows, list(classes))


def read_images(path: str | Path, client: str | None = None, channels: int | None = None) -> Images:
    """Read images and their classes by client.

    Parameters
    ----------
    path
        A folder of pictures `client/class/file.png`, or `class/file.png` where `client` says whose they are; or LEAF
        JSON files, a folder or archive of them.
    client
        The one client to read.
    channels
        1 for grey and 3 for coloured pictures; None is grey if all pictures are.

    Returns
    -------
    Images
        Images [channels, height, width] as float32 in 0..1, and names of classes in the order of a table.

    Raises
    ------
    DataError
        There are no images, or they differ in size.
    """
    path = existing(path)
    if _is_leaf(path):
        return _from_leaf(path, client)
    found = sorted(members(path, is_picture))
    depth = 2 if client is None else 1
    inside = [(name, name.parts[1:] if path.is_dir() else name.parts) for name, _ in found]
    if found and client is not None and all(len(parts) == 3 for _, parts in inside):
        kept = [k for k, (_, parts) in enumerate(inside) if parts[0] == client]
        if not kept:
            known = sorted({parts[0] for _, parts in inside})
            raise DataError(f"{path}: no images of client {client!r}.{nearest(client, known)}")
        found, inside = [found[k] for k in kept], [inside[k] for k in kept]
        depth = 2
    if not found:
        raise DataError(f"{path} holds no .png or .jpg pictures and no LEAF .json files")
    wrong = [name for name, parts in inside if len(parts) != depth + 1]
    if wrong:
        remedy = (
            "put pictures into client/class/" if client is None else f"put those of {client!r} into class/"
        )
        raise DataError(f"{path}: {PurePosixPath(*wrong[0].parts[1:])}: {remedy}, and nothing deeper")
    x = decoded(path, found, {None: None, 1: "L", 3: "RGB"}[channels])
    classes = list(in_order({parts[-2] for _, parts in inside}))
    y = torch.tensor([classes.index(parts[-2]) for _, parts in inside])
    owner = [parts[0] if depth == 2 else client for _, parts in inside]
    return Images(by_label(x, y, owner), classes)


def image_shape(path: str | Path) -> tuple[int, ...]:
    """Return the shape [channels, height, width] of the first picture of a folder, or of LEAF images."""
    path = existing(path)
    if _is_leaf(path):
        return tuple(_from_leaf(path, None).rows.xs[0].shape[1:])
    for found in members(path, is_picture):
        return tuple(decoded(path, [found]).shape[1:])
    raise DataError(f"{path} holds no .png or .jpg pictures and no LEAF .json files")


def _is_leaf(path: Path) -> bool:
    if path.is_file():
        return ".json" in path.suffixes
    return any(path.rglob("*.json"))


def _from_leaf(path: Path, client: str | None) -> Images:
    """Return the users of LEAF files; classes are whole numbers, and a class that nobody has keeps its place."""
    rows = leaf(path)
    if rows.xs[0].dim() != 4 or rows.ys[0].is_floating_point() or rows.ys[0].dim() != 1:
        raise DataError(f"{path} holds no images with classes; LEAF images have 784 numbers each")
    if client is not None:
        if client not in rows.names:
            raise DataError(f"{path}: there is no user {client!r}.{nearest(client, rows.names)}")
        place = rows.names.index(client)
        rows = Clients([rows.xs[place]], [rows.ys[place]], [client])
    if min(int(y.min()) for y in rows.ys) < 0:
        raise DataError(f"{path}: labels are whole numbers from 0")
    return Images(rows, [str(k) for k in range(1 + max(int(y.max()) for y in rows.ys))])

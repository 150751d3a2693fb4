"""Reader for LEAF data (Caldas et al. 2018, https://leaf.cmu.edu): JSON files whose users are the clients."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coterie._core.errors import DataError, SettingError
from coterie.data.clients import Clients
from coterie.data.files import decode, existing, members, read_bytes

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's alphabet for Shakespeare: a character's index is its place here, len(LETTERS) = 80 is any other."""

_PARTS = ("train", "test")
_IMAGE = (1, 28, 28)


def leaf(
    paths: str | Path | Iterable[str | Path],
    split: Literal["all", "train", "test"] = "all",
    max_clients: int | None = None,
    repeats: Literal["error", "first"] = "error",
) -> Clients:
    """Read LEAF JSON; every user is a client.

    Parameters
    ----------
    paths
        A file, a folder, a tar archive, or several of them.
    split
        "train" or "test" takes the files whose folder or name says so; "all" takes both.
    max_clients
        Stop after this many users.
    repeats
        What to do with a user that occurs in two data sets: "error" raises one, "first" keeps the rows of the first
        data set that has the user, so that train and test rows never come from different copies.

    Returns
    -------
    Clients
        Rows of 784 numbers become images [1, 28, 28]; text becomes indices into `LETTERS`. Users without rows are left
        out.

    Raises
    ------
    DataError
        If a file is not LEAF JSON, a user occurs twice, or nothing is found.

    Examples
    --------
    >>> import json, pathlib, tempfile
    >>> from coterie.data import leaf
    >>> user = {"x": [[0.0, 1.0], [1.0, 0.0]], "y": [0, 1]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "all_data_train.json")
    ...     _ = path.write_text(json.dumps({"users": ["u1"], "num_samples": [2], "user_data": {"u1": user}}))
    ...     clients = leaf(path, split="train")
    >>> clients.names, clients.sizes.tolist()
    (['u1'], [2])
    """
    if split not in ("all", *_PARTS):
        raise SettingError(f"split={split!r}; choose 'all', 'train' or 'test'")
    if repeats not in ("error", "first"):
        raise SettingError(f"repeats={repeats!r}; choose 'error' or 'first'")
    if max_clients is not None and max_clients < 1:
        raise SettingError(f"max_clients={max_clients}; it must be at least 1")
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    gathered = _Gathered(split, max_clients, repeats)
    for document in (document for path in given for document in _documents(existing(path))):
        if gathered.needs(document):
            gathered.add(document)
        if gathered.complete:
            break
    if not gathered.xs:
        where = ", ".join(str(path) for path in given) or "an empty list"
        raise DataError(
            f"no users with split={split!r} in {where}; files are told apart by 'train' and 'test'"
        )
    return gathered.clients()


@dataclass(frozen=True)
class _Document:
    """One JSON file: the data set it belongs to, its part (None if its name does not say) and its bytes."""

    origin: Path
    part: str | None
    where: str
    raw: bytes


def _documents(path: Path) -> Iterator[_Document]:
    """Yield the JSON files of a path; `train` and `test` beside each other are parts of the data set above them."""
    own = path.absolute()
    lone = path.is_file() and ".json" in path.suffixes
    top = own.parent if lone else own
    stem = top.name.partition(".")[0]
    origin = top.parent if stem in _PARTS else top
    if lone:
        yield _Document(origin, _part(PurePosixPath(stem, path.name)), str(path), read_bytes(path))
        return
    for name, raw in members(path, lambda name: name.suffix == ".json"):
        yield _Document(origin, _part(stem / name), f"{path}: {name}", raw)


def _part(name: PurePosixPath) -> str | None:
    """Return "train" or "test", from the nearest folder of that name or a word of the file name, else None."""
    words = [*name.stem.replace("-", "_").split("_"), *name.parts[:-1]]
    return next((word for word in reversed(words) if word in _PARTS), None)


@dataclass
class _Gathered:
    """Rows per user while files are read, and the data set that each user belongs to."""

    split: str
    max_clients: int | None
    repeats: str
    xs: dict[str, list[Tensor]] = field(default_factory=dict)
    ys: dict[str, list[Tensor]] = field(default_factory=dict)
    seen: dict[str, dict[str | None, _Document]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether no unread file can matter: a user's rows of one part lie in one file."""
        return self.split != "all" and len(self.xs) == self.max_clients

    def needs(self, document: _Document) -> bool:
        """Return True if a file must be read; the other part matters only for users that an earlier data set has."""
        return self.split in ("all", document.part) or self.repeats == "first"

    def add(self, document: _Document) -> None:
        """Add the rows of every user of a file that is wanted."""
        for user, x, y in _users(document):
            if self._taken(user, document) or self.split not in ("all", document.part) or not y:
                continue
            if user not in self.xs and len(self.xs) == self.max_clients:
                continue
            inputs, targets = _rows(f"{document.where}, user {user!r}", x, y)
            self.xs.setdefault(user, []).append(inputs)
            self.ys.setdefault(user, []).append(targets)

    def _taken(self, user: str, document: _Document) -> bool:
        """Return True if an earlier data set owns the user; raise if the user is twice in one part of one data set."""
        earlier = self.seen.setdefault(user, {})
        for part, other in earlier.items():
            if other.origin != document.origin and self.repeats == "first":
                return True
            if other.origin != document.origin or part == document.part or None in (part, document.part):
                raise DataError(
                    f"user {user!r} is in {other.where} and again in {document.where}; "
                    "read the data sets one at a time, or pass repeats='first' for copies of the same data"
                )
        earlier[document.part] = _Document(document.origin, document.part, document.where, b"")
        return False

    def clients(self) -> Clients:
        """Return everything that was gathered."""
        names = list(self.xs)
        for name in names:
            _check_parts(name, self.xs[name])
            _check_parts(name, self.ys[name])
        return Clients(
            [torch.cat(self.xs[name]) for name in names], [torch.cat(self.ys[name]) for name in names], names
        )


def _check_parts(name: str, parts: list[Tensor]) -> None:
    if any(part.shape[1:] != parts[0].shape[1:] or part.dtype != parts[0].dtype for part in parts):
        raise DataError(
            f"user {name!r}: its train and test rows differ in shape or type; fetch the data again"
        )


def _users(document: _Document) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield name, x and y of every user of a file, after checking that it is what LEAF writes."""
    content = _parsed(document)
    users, data = content.get("users"), content.get("user_data")
    if not isinstance(users, list) or not isinstance(data, dict) or sorted(map(str, users)) != sorted(data):
        raise DataError(
            f"{document.where} is not LEAF JSON: it needs 'users' and 'user_data' for each of them"
        )
    counts = content.get("num_samples", [None] * len(users))
    if not isinstance(counts, list) or len(counts) != len(users):
        raise DataError(
            f"{document.where}: 'num_samples' does not match the {len(users)} users; fetch it again"
        )
    for user, count in zip(users, counts, strict=True):
        entry = data[user] if isinstance(data[user], dict) else {}
        x, y = entry.get("x"), entry.get("y")
        if not isinstance(x, list) or not isinstance(y, list):
            raise DataError(f"{document.where}, user {user!r}: 'x' and 'y' must be lists; fetch it again")
        if len(x) != len(y) or count not in (None, len(y)):
            raise DataError(
                f"{document.where}, user {user!r}: {len(x)} inputs, {len(y)} targets, num_samples {count}; "
                "they must agree"
            )
        yield user, x, y


def _parsed(document: _Document) -> dict[str, Any]:
    text = decode(document.raw, document.where)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{document.where}, line {error.lineno}, column {error.colno}: broken JSON ({error.msg}); "
            "fetch it again"
        ) from None
    except RecursionError:
        raise DataError(f"{document.where}: JSON nested too deeply to be LEAF data") from None
    return content if isinstance(content, dict) else {}


def _rows(where: str, x: list[Any], y: list[Any]) -> tuple[Tensor, Tensor]:
    inputs = _indices(where, x) if isinstance(x[0], str) else _numbers(where, "x", x).float()
    if inputs.shape[1:] == (784,) and inputs.is_floating_point():
        inputs = inputs.reshape(-1, *_IMAGE)
    if not isinstance(y[0], str):
        return inputs, _numbers(where, "y", y)
    targets = _indices(where, y)
    if targets.shape[1] != 1:
        raise DataError(f"{where}: a text target must be one character, the one that follows")
    return inputs, targets[:, 0]


def _numbers(where: str, what: str, values: list[Any]) -> Tensor:
    try:
        table = np.array(values)
    except ValueError:
        raise DataError(f"{where}: the rows of {what} differ in length") from None
    if table.dtype.kind not in "biuf":
        raise DataError(
            f"{where}: {what} is not numeric; only images, numbers and next-character text are read"
        )
    return torch.from_numpy(table.astype(np.float32 if table.dtype.kind == "f" else np.int64))


def _indices(where: str, lines: list[Any]) -> Tensor:
    """Return strings of equal length as indices into LETTERS, int64 [rows, length]."""
    if not all(isinstance(line, str) for line in lines) or len({len(line) for line in lines} | {0}) != 2:
        raise DataError(f"{where}: text rows must be equally long (80 characters in Shakespeare)")
    codes = np.frombuffer("".join(lines).encode("utf-32-le", "surrogatepass"), np.uint32)
    table = np.full(129, len(LETTERS))
    table[[ord(letter) for letter in LETTERS]] = np.arange(len(LETTERS))
    return torch.from_numpy(table[np.minimum(codes, 128)].reshape(len(lines), len(lines[0])))

"""Readers for LIBSVM text, for arrays with a client label per row, and for columns by name."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from coterie._core.errors import DataError, SettingError, nearest
from coterie.data.clients import Clients, Pool, by_label, distinct
from coterie.data.files import read_text

_LARGEST_TABLE = 1 << 34  # bytes; a dense table beyond this is a wrong index more often than a wish
_LONGEST_INDEX = 18  # digits; what is longer does not fit an int64
_WHOLE = re.compile("[+-]?[0-9]+")


def libsvm(
    path: str | Path,
    features: int | None = None,
    dtype: torch.dtype = torch.float64,
    labels: Literal["classes", "raw"] = "classes",
) -> Pool:
    r"""Read LIBSVM text (`label index:value ...`) into a dense pool.

    Parameters
    ----------
    path
        The file, plain or compressed (.bz2, .xz, .gz).
    features
        Number of columns; by default the largest index that occurs.
    dtype
        Type of the inputs, and of raw labels.
    labels
        "classes" numbers the labels 0..C-1 in sorted order; "raw" keeps them as numbers, for regression.

    Returns
    -------
    Pool
        Inputs [rows, features] and labels. Indices count from 1, or from 0 if a 0 occurs.

    Raises
    ------
    DataError
        If a line cannot be read; the message names the file and the line.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from coterie.data import libsvm
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "tiny.txt")
    ...     _ = path.write_text("+1 1:0.5 3:2\n-1 2:1\n")
    ...     pool = libsvm(path)
    >>> pool.x.tolist(), pool.y.tolist(), pool.class_names
    ([[0.5, 0.0, 2.0], [0.0, 1.0, 0.0]], [1, 0], ['-1', '1'])
    """
    if labels not in ("classes", "raw"):
        raise SettingError(f"labels={labels!r}; choose 'classes' or 'raw'")
    rows = _parse(read_text(path), path)
    x = _dense(rows, features, dtype)
    values = np.asarray(rows.labels) + 0.0  # -0 and 0 are one class
    if not np.isfinite(values).all():
        rows.fail(int(np.flatnonzero(~np.isfinite(values))[0]), "the label is NaN or infinity")
    if labels == "raw":
        return Pool(x, torch.from_numpy(values).to(dtype))
    fractional = np.flatnonzero(values != np.floor(values))
    if len(fractional):
        row = int(fractional[0])
        rows.fail(row, f"label {values[row]:g} is no class number; use labels='raw' for regression")
    classes, index = np.unique(values, return_inverse=True)
    return Pool(x, torch.from_numpy(index.astype(np.int64)), [f"{value:.0f}" for value in classes])


@dataclass
class _Sparse:
    """Parsed LIBSVM lines: the entries of row k begin at `start[k]`, and it was read from line `line[k]`."""

    path: str | Path
    labels: array[float] = field(default_factory=lambda: array("d"))
    line: array[int] = field(default_factory=lambda: array("q"))
    start: array[int] = field(default_factory=lambda: array("q"))
    index: array[int] = field(default_factory=lambda: array("q"))
    value: array[float] = field(default_factory=lambda: array("d"))

    def fail(self, row: int, problem: str) -> NoReturn:
        """Raise a DataError that names the file and the line of a row."""
        raise DataError(f"{self.path}, line {self.line[row]}: {problem}")


def _parse(text: str, path: str | Path) -> _Sparse:
    rows = _Sparse(path)
    for number, line in enumerate(text.split("\n"), 1):
        tokens = line.partition("#")[0].split()
        if not tokens:
            continue
        rows.line.append(number)
        rows.start.append(len(rows.index))
        try:
            rows.labels.append(float(tokens[0]))
            for token in tokens[1:]:
                index, _, value = token.partition(":")
                rows.index.append(int(index))
                rows.value.append(float(value))
        except (ValueError, OverflowError):
            _fail_at_bad_token(tokens, rows)
        if "_" in line or not line.isascii():
            _fail_at_bad_token(tokens, rows)
    if not rows.labels:
        raise DataError(f"{path} holds no rows; a line reads 'label index:value index:value ...'")
    return rows


def _fail_at_bad_token(tokens: list[str], rows: _Sparse) -> None:
    """Raise an error for the first token of the last line that is not written as LIBSVM writes it, if there is one."""
    row = len(rows.line) - 1
    if not _is_number(tokens[0]):
        rows.fail(
            row, f"label {tokens[0][:40]!r} is not a number (one label a line, several are not supported)"
        )
    for token in tokens[1:]:
        index, _, value = token.partition(":")
        if not (_WHOLE.fullmatch(index) and _is_number(value)):
            rows.fail(row, f"expected index:value but found {token[:40]!r}")
        if len(index) > _LONGEST_INDEX:
            rows.fail(row, f"index {index[:40]} is out of range")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and "_" not in text


def _dense(rows: _Sparse, features: int | None, dtype: torch.dtype) -> Tensor:
    count = len(rows.labels)
    index, value = np.asarray(rows.index), np.asarray(rows.value)
    bounds = np.append(np.asarray(rows.start), len(index))
    row = np.repeat(np.arange(count), np.diff(bounds))
    _check_entries(rows, row, index, value)
    first = 0 if len(index) and index.min() == 0 else 1
    width = int(index.max()) + 1 - first if len(index) else 0
    if features is None:
        features = width
    elif width > features:
        entry = int(np.flatnonzero(index - first >= features)[0])
        rows.fail(int(row[entry]), f"index {index[entry]} is out of range for features={features}")
    if features < 1:
        raise DataError(f"{rows.path} holds no features; a line reads 'label index:value index:value ...'")
    if count * features * dtype.itemsize > _LARGEST_TABLE:
        widest = int(row[index.argmax()]) if len(index) else 0
        rows.fail(widest, f"a dense table of {count} x {features} would not fit; is the largest index right?")
    x = torch.zeros(count, features, dtype=dtype)
    x[torch.from_numpy(row), torch.from_numpy(index - first)] = torch.from_numpy(value).to(dtype)
    return x


def _check_entries(rows: _Sparse, row: np.ndarray, index: np.ndarray, value: np.ndarray) -> None:
    negative = np.flatnonzero(index < 0)
    if len(negative):
        rows.fail(int(row[negative[0]]), f"index {index[negative[0]]} is out of range; indices start at 1")
    broken = np.flatnonzero(~np.isfinite(value))
    if len(broken):
        rows.fail(int(row[broken[0]]), f"the value of index {index[broken[0]]} is NaN or infinity")
    unsorted = np.flatnonzero((np.diff(index) <= 0) & (np.diff(row) == 0))
    if len(unsorted):
        pair = index[unsorted[0]], index[unsorted[0] + 1]
        rows.fail(
            int(row[unsorted[0]]), f"index {pair[1]} follows {pair[0]}; indices must increase along a line"
        )


def arrays(x: Any, y: Any, client: Any, cluster: Any = None) -> Clients:
    """Group arrays by a client label per row.

    Parameters
    ----------
    x
        Inputs, [rows, ...]: numpy, torch or nested lists of numbers.
    y
        Targets, [rows]; text becomes class numbers 0..C-1 in sorted order.
    client
        Client label of each row.
    cluster
        Cluster label of each row, if clusters are known.

    Returns
    -------
    Clients
        One block of rows per client, in sorted order of the labels.

    Raises
    ------
    DataError
        If lengths differ, a value is missing, or a client is in two clusters.

    Examples
    --------
    >>> from coterie.data import arrays
    >>> clients = arrays([[1.0], [2.0], [3.0]], ["yes", "no", "no"], client=["b", "a", "b"])
    >>> clients.names, [y.tolist() for y in clients.ys]
    (['a', 'b'], [[0], [1, 0]])
    """
    inputs, targets = _tensor(x, "x"), _targets(y, "y")
    if inputs.dim() == 0 or targets.shape[:1] != inputs.shape[:1]:
        raise DataError(
            f"x has shape {list(inputs.shape)} but y {list(targets.shape)}; they need one row per example"
        )
    return by_label(inputs, targets, client, cluster)


def columns(
    data: Any,
    client: str,
    target: str,
    features: Sequence[str] | None = None,
    cluster: str | None = None,
) -> Clients:
    """Group named columns by one of them, the client column.

    Parameters
    ----------
    data
        A dict of columns, a Hugging Face data set, or any object with `column_names` and `[name]`.
    client
        Name of the client column.
    target
        Name of the target column.
    features
        Names of the input columns; by default all others. Number columns are stacked as float64 [rows, features]; a
        single column of equally shaped arrays is taken as it is.
    cluster
        Name of the cluster column, if clusters are known.

    Returns
    -------
    Clients
        One block of rows per client, in sorted order of the labels.

    Raises
    ------
    DataError
        If a column is missing, not numeric or of another length.

    Examples
    --------
    >>> from coterie.data import columns
    >>> table = {"city": ["Ulm", "Bern", "Ulm"], "age": [30, 41, 52], "ill": [0, 1, 1]}
    >>> clients = columns(table, client="city", target="ill")
    >>> clients.names, [x.tolist() for x in clients.xs]
    (['Bern', 'Ulm'], [[[41.0]], [[30.0], [52.0]]])
    """
    known = list(data) if isinstance(data, Mapping) else list(getattr(data, "column_names", None) or [])
    if not known:
        raise DataError("no columns; give a dict of columns or an object with column_names")
    special = [client, target] + ([] if cluster is None else [cluster])
    chosen = [name for name in known if name not in special] if features is None else list(features)
    for name in special + chosen:
        if name not in known:
            raise DataError(f"there is no column {name!r}.{nearest(name, known)}")
    if not chosen:
        raise DataError(f"no feature columns are left beside {', '.join(special)}")
    x = _features({name: _tensor(_column(data, name), f"column {name!r}") for name in chosen})
    labels = _column(data, cluster) if cluster is not None else None
    y = _targets(_column(data, target), f"column {target!r}")
    if len(y) != len(x):
        raise DataError(f"column {target!r} has {len(y)} rows but column {chosen[0]!r} has {len(x)}")
    return by_label(x, y, _column(data, client), labels)


def _column(data: Any, name: str) -> Any:
    column = data[name]
    return column if isinstance(column, np.ndarray | Tensor) else list(column)


def _features(named: dict[str, Tensor]) -> Tensor:
    first = next(iter(named))
    for name, column in named.items():
        if column.dim() == 0 or column.shape[0] != named[first].shape[0]:
            raise DataError(f"columns {first!r} and {name!r} differ in length")
        if column.dim() > 1 and len(named) > 1:
            raise DataError(f"column {name!r} holds arrays; give it alone in features=, or leave it out")
    if named[first].dim() > 1:
        return named[first]
    return torch.stack([column.double() for column in named.values()], 1)


def _targets(values: Any, what: str) -> Tensor:
    """Return targets as a tensor; text becomes class numbers in sorted order, booleans 0 and 1."""
    if not isinstance(values, Tensor):
        values = _as_numpy(values, what)
        if values.dtype.kind in "US" and values.ndim == 1:
            return distinct(values, what, len(values))[1]
    return _tensor(values, what)


def _tensor(values: Any, what: str) -> Tensor:
    """Return numbers as a tensor; booleans and integers become int64, and a missing value is an error."""
    if isinstance(values, Tensor):
        given: Tensor = values.detach().cpu()
        return given if given.is_floating_point() else given.long()
    table = _as_numpy(values, what)
    if table.dtype == object:
        gaps = np.array([value is None for value in table.flat], dtype=bool).reshape(table.shape)
        if gaps.any():
            raise DataError(f"{what}: row {np.argwhere(gaps)[0][0]} is missing; fill it in or drop the row")
    if table.dtype.kind not in "biuf":
        raise DataError(
            f"{what} is not numeric ({table.dtype}); encode text as numbers, or read it as a table"
        )
    kept = table.dtype.newbyteorder("=") if table.dtype.kind == "f" else np.dtype(np.int64)
    return torch.from_numpy(np.array(table, dtype=np.float64 if kept.itemsize > 8 else kept))


def _as_numpy(values: Any, what: str) -> np.ndarray:
    try:
        return np.asarray(values)
    except (ValueError, TypeError) as error:
        raise DataError(f"{what}: rows differ in shape or cannot be read ({error})") from None

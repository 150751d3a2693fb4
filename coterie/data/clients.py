"""What readers, partitioners and generators hand on: pooled rows, or rows that belong to clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.errors import DataError


@dataclass(frozen=True)
class Pool:
    """Rows that belong to nobody yet: inputs `x` [rows, ...], targets `y` [rows, ...]."""

    x: Tensor
    y: Tensor
    class_names: list[str] | None = None

    def __post_init__(self) -> None:
        _check_rows("the pool", self.x, self.y)
        if self.class_names is not None:
            _check_range("the pool: label", self.y, len(self.class_names), "class names")

    def __len__(self) -> int:
        return self.x.shape[0]


@dataclass(frozen=True)
class Clients:
    """One block of rows per client; known clusters [n] and true parameters [n, d] where there are any."""

    xs: list[Tensor]
    ys: list[Tensor]
    names: list[str]
    clusters: Tensor | None = None
    cluster_names: list[str] | None = None
    truth: Tensor | None = None

    def __post_init__(self) -> None:
        _check_lists(self.xs, self.ys, self.names)
        for name, x, y in zip(self.names, self.xs, self.ys, strict=True):
            _check_rows(f"client {name!r}", x, y)
            _check_alike(f"client {name!r}", "inputs", x, self.names[0], self.xs[0])
            _check_alike(f"client {name!r}", "targets", y, self.names[0], self.ys[0])
        _check_clusters(self.clusters, self.cluster_names, self.names)
        _check_truth(self.truth, self.names)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def sizes(self) -> Tensor:
        """Number of rows of each client, int64 [n]."""
        return torch.tensor([x.shape[0] for x in self.xs])


def deal(x: Tensor, y: Tensor, owner: Tensor, n: int) -> tuple[list[Tensor], list[Tensor]]:
    """Give row k to client `owner[k]`; inside a client rows keep their order. The data are copied once."""
    order = torch.argsort(owner, stable=True)
    sizes = torch.bincount(owner, minlength=n).tolist()
    return list(x[order].split(sizes)), list(y[order].split(sizes))


def by_label(x: Tensor, y: Tensor, client: Any, cluster: Any = None) -> Clients:
    """Clients from one client label per row, in sorted order; all rows of a client are in one cluster."""
    names, owner = distinct(client, "client", x.shape[0])
    xs, ys = deal(x, y, owner, len(names))
    if cluster is None:
        return Clients(xs, ys, names)
    cluster_names, row_cluster = distinct(cluster, "cluster", x.shape[0])
    clusters = torch.empty(len(names), dtype=torch.int64)
    clusters[owner] = row_cluster
    torn = (clusters[owner] != row_cluster).nonzero()
    if len(torn):
        row = int(torn[0])
        pair = cluster_names[int(row_cluster[row])], cluster_names[int(clusters[owner[row]])]
        raise DataError(
            f"client {names[int(owner[row])]!r} is in two clusters, {pair[0]!r} (row {row}) and {pair[1]!r}; "
            "give all rows of a client the same cluster"
        )
    return Clients(xs, ys, names, clusters, cluster_names)


def distinct(labels: Any, what: str, rows: int) -> tuple[list[str], Tensor]:
    """Sorted distinct labels as text, and for each row the index of its own."""
    values = _as_array(labels, what)
    if values.shape != (rows,):
        raise DataError(
            f"{what} labels have shape {list(values.shape)}; there must be one for each of {rows} rows"
        )
    missing = _missing(values)
    if missing.any():
        raise DataError(f"row {int(missing.argmax())} has no {what} label; drop the row or give it one")
    if values.dtype == object:
        whole = all(isinstance(value, int) for value in values)
        values = values.astype(np.int64) if whole else np.array([str(value) for value in values])
    if values.dtype.kind == "f" and (values == np.floor(values)).all() and (abs(values) < 2**53).all():
        values = values.astype(np.int64)
    found, index = np.unique(values, return_inverse=True)
    return [str(value) for value in found.tolist()], torch.from_numpy(index.astype(np.int64))


def _as_array(labels: Any, what: str) -> np.ndarray:
    try:
        return labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    except ValueError as error:
        raise DataError(f"{what} labels are not one value per row ({error})") from None


def _missing(values: np.ndarray) -> np.ndarray:
    """Which labels are None, NaN, infinite or empty text."""
    if values.dtype.kind == "f":
        return ~np.isfinite(values)
    if values.dtype.kind in "US":
        return values == values.dtype.type()
    if values.dtype == object:
        return np.array([value is None or value != value or value == "" for value in values], dtype=bool)
    return np.zeros(len(values), dtype=bool)


def _check_lists(xs: Sequence[Tensor], ys: Sequence[Tensor], names: Sequence[str]) -> None:
    if not len(xs) == len(ys) == len(names):
        raise DataError(
            f"{len(xs)} inputs, {len(ys)} targets and {len(names)} names; there must be one per client"
        )
    if not names:
        raise DataError("there are no clients; give at least one")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(f"two clients are called {repeated[0]!r}; rename one or merge their rows")


def _check_rows(who: str, x: Tensor, y: Tensor) -> None:
    for what, rows in (("inputs", x), ("targets", y)):
        if not isinstance(rows, Tensor) or rows.dim() == 0:
            raise DataError(f"{who}: {what} must be a tensor with one row per example")
    if x.shape[0] != y.shape[0]:
        raise DataError(f"{who}: {x.shape[0]} rows of inputs but {y.shape[0]} targets; they must match")
    if x.shape[0] == 0:
        raise DataError(f"{who} has no rows; leave it out")
    for what, rows in (("inputs", x), ("targets", y)):
        if rows.is_floating_point() and not torch.isfinite(rows).all():
            row = int((~torch.isfinite(rows)).reshape(rows.shape[0], -1).any(1).nonzero()[0])
            raise DataError(f"{who}: {what} of row {row} hold NaN or infinity; fill in or drop the row")


def _check_alike(who: str, what: str, rows: Tensor, first_name: str, first: Tensor) -> None:
    if rows.shape[1:] != first.shape[1:] or rows.dtype != first.dtype:
        raise DataError(
            f"{who}: {what} are {_kind(rows)} a row but those of client {first_name!r} are {_kind(first)}; "
            "all clients need the same features and type"
        )


def _kind(rows: Tensor) -> str:
    return f"{list(rows.shape[1:])} {str(rows.dtype).removeprefix('torch.')}"


def _check_range(what: str, values: Tensor, count: int, of: str) -> None:
    outside = ((values < 0) | (values >= count)).nonzero()
    if len(outside):
        row = int(outside[0, 0])
        raise DataError(
            f"{what} {values[row].tolist()} of row {row} is outside 0..{count - 1} ({count} {of})"
        )


def _check_clusters(clusters: Tensor | None, cluster_names: list[str] | None, names: Sequence[str]) -> None:
    if clusters is None:
        if cluster_names is not None:
            raise DataError("cluster names without clusters; give the cluster of each client too")
        return
    if clusters.dtype != torch.int64 or clusters.shape != (len(names),):
        raise DataError(f"clusters must be int64 [{len(names)}], one per client; got {list(clusters.shape)}")
    count = int(clusters.max()) + 1 if cluster_names is None else len(cluster_names)
    outside = ((clusters < 0) | (clusters >= count)).nonzero()
    if len(outside):
        client = int(outside[0])
        raise DataError(
            f"client {names[client]!r}: cluster {int(clusters[client])} is outside 0..{count - 1}"
        )
    empty = (torch.bincount(clusters, minlength=count) == 0).nonzero()
    if len(empty):
        raise DataError(f"cluster {int(empty[0])} has no clients; number the clusters 0..K-1 without gaps")


def _check_truth(truth: Tensor | None, names: Sequence[str]) -> None:
    if truth is None:
        return
    if truth.dim() != 2 or truth.shape[0] != len(names):
        raise DataError(f"truth must be [{len(names)}, d], one row per client; got {list(truth.shape)}")
    broken = (~torch.isfinite(truth)).any(1).nonzero()
    if len(broken):
        raise DataError(f"client {names[int(broken[0])]!r}: its true parameters hold NaN or infinity")

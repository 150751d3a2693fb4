"""Containers that readers, partitioners and generators return: pooled rows, or rows that belong to clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie._core.errors import DataError


@dataclass(frozen=True)
class Pool:
    """Rows that no client owns yet; a partitioner of `coterie.data.partition` deals them out.

    Parameters
    ----------
    x
        Inputs, [rows, ...].
    y
        Targets, [rows, ...]; class numbers 0..C-1 if there are class names.
    class_names
        Name of each class, if the targets are classes with names.

    Raises
    ------
    DataError
        If `x` and `y` differ in length, are empty, or hold NaN or infinity, or a label has no class name.

    Examples
    --------
    >>> import torch
    >>> from coterie.data import Pool, partition
    >>> pool = Pool(torch.eye(4), torch.tensor([0, 1, 0, 1]), class_names=["cat", "dog"])
    >>> len(pool)
    4
    >>> partition.equal_shares(pool, 2).names
    ['client-0', 'client-1']
    """

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
    """Rows with an owner: one block of inputs and one of targets for each client.

    `coterie.Federation.from_clients` makes a federation of it.

    Parameters
    ----------
    xs
        Inputs of each client, [rows, ...]; all clients have the same features and dtype.
    ys
        Targets of each client, [rows, ...].
    names
        Names of the clients, all different.
    clusters
        Known cluster of each client, int64 [n] with values 0..K-1, or None.
    cluster_names
        Names of the K clusters, or None.
    truth
        True parameters of each client, [n, d], if the data were generated.
    missing
        Whether NaN among the inputs stands for a missing value, as trees take it.

    Raises
    ------
    DataError
        If the blocks do not fit together; the message names the client.

    Examples
    --------
    >>> import torch
    >>> from coterie.data import Clients
    >>> clients = Clients([torch.zeros(3, 2), torch.ones(5, 2)], [torch.zeros(3), torch.ones(5)], ["a", "b"])
    >>> len(clients), clients.sizes.tolist()
    (2, [3, 5])
    """

    xs: list[Tensor]
    ys: list[Tensor]
    names: list[str]
    clusters: Tensor | None = None
    cluster_names: list[str] | None = None
    truth: Tensor | None = None
    missing: bool = False

    def __post_init__(self) -> None:
        _check_lists(self.xs, self.ys, self.names)
        for name, x, y in zip(self.names, self.xs, self.ys, strict=True):
            _check_rows(f"client {name!r}", x.nan_to_num(0.0) if self.missing else x, y)
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
    """Group rows by owner; inside a client rows keep their order.

    Parameters
    ----------
    x
        Inputs of all rows, [rows, ...].
    y
        Targets of all rows, [rows, ...].
    owner
        Client of each row, int64 [rows].
    n
        Number of clients.

    Returns
    -------
    tuple of lists
        Inputs and targets of each client, copied once.
    """
    order = torch.argsort(owner, stable=True)
    sizes = torch.bincount(owner, minlength=n).tolist()
    return list(x[order].split(sizes)), list(y[order].split(sizes))


def by_label(x: Tensor, y: Tensor, client: Any, cluster: Any = None) -> Clients:
    """Group rows by client label; clients come in sorted order of their labels.

    Parameters
    ----------
    x
        Inputs of all rows, [rows, ...].
    y
        Targets of all rows, [rows, ...].
    client
        Client label of each row: numbers or text.
    cluster
        Cluster label of each row, the same for all rows of a client, or None.

    Returns
    -------
    Clients
        One block of rows per label.

    Raises
    ------
    DataError
        If a row has no label, or the rows of a client carry two cluster labels.
    """
    names, owner = distinct(client, "client", x.shape[0])
    xs, ys = deal(x, y, owner, len(names))
    if cluster is None:
        return Clients(xs, ys, names)
    cluster_names, row_cluster = distinct(cluster, "cluster", x.shape[0])
    clusters = torch.empty(len(names), dtype=torch.int64)
    clusters[owner] = row_cluster
    conflicts = (clusters[owner] != row_cluster).nonzero()
    if len(conflicts):
        row = int(conflicts[0])
        pair = cluster_names[int(row_cluster[row])], cluster_names[int(clusters[owner[row]])]
        raise DataError(
            f"client {names[int(owner[row])]!r} is in two clusters, {pair[0]!r} (row {row}) and {pair[1]!r}; "
            "give all rows of a client the same cluster"
        )
    return Clients(xs, ys, names, clusters, cluster_names)


def distinct(labels: Any, what: str, rows: int) -> tuple[list[str], Tensor]:
    """Return the distinct labels as sorted text, and the index of each row's label among them.

    Parameters
    ----------
    labels
        One label per row.
    what
        What the labels are of, for error messages.
    rows
        How many labels there must be.

    Returns
    -------
    tuple
        The distinct labels, and int64 [rows].
    """
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


def _as_array(labels: Any, what: str) -> npt.NDArray[Any]:
    try:
        return labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    except ValueError as error:
        raise DataError(f"{what} labels are not one value per row ({error})") from None


def _missing(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which labels are None, NaN, infinite or empty text."""
    missing: npt.NDArray[np.bool_]
    if values.dtype.kind == "f":
        missing = ~np.isfinite(values)
        return missing
    if values.dtype.kind in "US":
        missing = values == values.dtype.type()
        return missing
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

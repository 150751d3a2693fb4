"""Turn rows into the parts of a federation in this process: flat arrays, hashed splits, one local runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie._core.devices import find_device
from coterie._core.errors import DataError
from coterie.data.clients import Clients
from coterie.data.rows import Augment, Rows
from coterie.data.split import Split, split_rows
from coterie.data.table_source import TableSource
from coterie.engine.local_runtime import LocalRuntime
from coterie.models.base import Model
from coterie.models.table_models import as_model


@dataclass
class Parts:
    """The arguments of `Federation`."""

    runtime: LocalRuntime
    model: Model
    names: Sequence[str]
    rows: dict[str, Tensor]
    clusters: Tensor | None
    seed: int
    dtype: torch.dtype
    device: torch.device
    cluster_names: Sequence[str] | None = None
    truth: Tensor | None = None
    table: TableSource | None = None
    texts: dict[str, Any] | None = None


def from_arrays(
    xs: Sequence[Any],
    ys: Sequence[Any],
    model: Model,
    clusters: Sequence[Any] | Tensor | None = None,
    names: Sequence[str] | None = None,
    truth: Tensor | None = None,
    **options: Any,
) -> Parts:
    """Build from one array of inputs and one of targets per client.

    Parameters
    ----------
    xs
        Inputs of each client, [rows, ...].
    ys
        Targets of each client, [rows].
    model
        The model to train.
    clusters
        Known cluster of each client, labels of any kind.
    names
        Names of the clients, by default "0", "1", ...
    truth
        True parameters, [n, d], of generated data.
    **options
        Those of `from_rows`.

    Returns
    -------
    Parts
        Arguments of `Federation`.
    """
    codes, cluster_names = encode_clusters(clusters)
    model = as_model(model)
    clients = Clients(
        [torch.as_tensor(x) for x in xs],
        [torch.as_tensor(y) for y in ys],
        [str(k) for k in range(len(xs))] if names is None else [str(name) for name in names],
        codes,
        cluster_names,
        truth,
        missing=model.encoding == "raw",
    )
    return from_clients(clients, model, **options)


def from_clients(clients: Clients, model: Model, dtype: torch.dtype | None = None, **options: Any) -> Parts:
    """Build from blocks of rows per client.

    Parameters
    ----------
    clients
        What a reader, partitioner or generator of `coterie.data` returned.
    model
        The model to train.
    dtype
        Type of inputs and targets that are floats, by default the one they have.
    **options
        Those of `from_rows`.

    Returns
    -------
    Parts
        Arguments of `Federation`.
    """
    x, y = torch.cat(clients.xs), torch.cat(clients.ys)
    dtype = dtype or (x.dtype if x.is_floating_point() else torch.float32)
    return from_rows(
        x.to(dtype) if x.is_floating_point() else x,
        y.to(dtype) if y.is_floating_point() else y,
        clients.sizes,
        model=model,
        names=clients.names,
        clusters=clients.clusters,
        cluster_names=clients.cluster_names,
        truth=clients.truth,
        dtype=dtype,
        **options,
    )


def from_rows(
    x: Tensor,
    y: Tensor,
    sizes: Tensor,
    *,
    model: Model,
    names: Sequence[str],
    clusters: Tensor | None = None,
    split: tuple[float, float, float] = (1.0, 0.0, 0.0),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    loop: bool = False,
    augment: Augment | None = None,
    cluster_names: Sequence[str] | None = None,
    truth: Tensor | None = None,
    table: TableSource | None = None,
    parts: Split | None = None,
) -> Parts:
    """Build from the rows of all clients, one client after the other.

    Parameters
    ----------
    x
        Inputs of all rows, [rows, ...].
    y
        Targets of all rows, [rows].
    sizes
        Number of rows of each client, [n].
    model
        The model to train.
    names
        Names of the clients.
    clusters
        Known cluster of each client, int64 [n].
    split
        Shares of train, validation and test.
    seed
        Seed of every draw.
    dtype
        Type of the parameters.
    device
        Where to compute, by default the CPU.
    loop
        Compute clients one by one instead of stacked.
    augment
        A function of training minibatches, such as `CropFlip`.
    cluster_names
        Names of the clusters.
    truth
        True parameters, [n, d], of generated data.
    table
        Where the rows came from.
    parts
        The split itself, where it is not by the hash.

    Returns
    -------
    Parts
        Arguments of `Federation`.
    """
    device = find_device(device)
    model = as_model(model).fit_to(x, y)
    clusters = None if clusters is None else clusters.to(device)
    runtime = make_runtime(
        x, y, sizes, model, clusters, split, seed, dtype, device, loop, augment=augment, parts=parts
    )
    rows = {name: part.size for name, part in runtime.splits.items()}
    return Parts(
        runtime, model, names, rows, clusters, seed, dtype, device, cluster_names, truth=truth, table=table
    )


def make_runtime(
    x: Tensor,
    y: Tensor,
    sizes: Tensor,
    model: Model,
    clusters: Tensor | None,
    split: tuple[float, float, float],
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    loop: bool = False,
    ids: Tensor | None = None,
    augment: Augment | None = None,
    parts: Split | None = None,
) -> LocalRuntime:
    """Split the rows of clients by the hash and return the runtime that computes with them here.

    Parameters
    ----------
    x
        Inputs of all rows, [rows, ...].
    y
        Targets of all rows, [rows].
    sizes
        Number of rows of each client, [n].
    model
        The model, fitted to the shape of the rows.
    clusters
        Known cluster of each client, int64 [n].
    split
        Shares of train, validation and test.
    seed
        Seed of every draw.
    dtype
        Type of the parameters.
    device
        Where to compute.
    loop
        Compute clients one by one instead of stacked.
    ids
        Index of each client in the federation, if these are not all of its clients.
    augment
        A function of training minibatches.
    parts
        The split itself, where it is not by the hash.

    Returns
    -------
    LocalRuntime
        The runtime.
    """
    x = model.prepare(x)
    if model.task != "multiclass":
        y = y.to(dtype)
    parts = parts or split_rows(sizes, split, seed, ids)
    splits = {
        name: Rows(x[part.order], y[part.order], part.start, part.size).to(device)
        for name, part in (("train", parts.train), ("validation", parts.validation), ("test", parts.test))
    }
    splits["train"] = replace(splits["train"], augment=augment)
    return LocalRuntime(splits, model, seed, dtype, clusters, ids, loop)


def encode_clusters(labels: Sequence[Any] | Tensor | None) -> tuple[Tensor | None, list[str] | None]:
    """Return cluster labels of any kind as int64 0..K-1, and the names of the clusters in sorted order."""
    if labels is None:
        return None, None
    values = labels.tolist() if isinstance(labels, Tensor) or hasattr(labels, "tolist") else list(labels)
    if any(value is None for value in values):
        raise DataError(f"client {values.index(None)} has no cluster; give every client one")
    known = sorted(set(values))
    code = {value: k for k, value in enumerate(known)}
    return torch.tensor([code[value] for value in values]), [str(value) for value in known]

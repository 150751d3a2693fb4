"""From rows to a federation in this process: flat arrays, split by the hash, one shard with everybody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.data.clients import Clients
from coterie.data.rows import Augment, Rows
from coterie.data.split import split_rows
from coterie.errors import DataError
from coterie.federation.federation import Federation
from coterie.models.base import Model
from coterie.runtime.shard import Shard


def from_arrays(
    xs: Sequence[Any],
    ys: Sequence[Any],
    model: Model,
    clusters: Sequence[Any] | Tensor | None = None,
    names: Sequence[str] | None = None,
    truth: Tensor | None = None,
    **options: Any,
) -> Federation:
    """One array of inputs and one of targets per client."""
    codes, cluster_names = encode_clusters(clusters)
    clients = Clients(
        [torch.as_tensor(x) for x in xs],
        [torch.as_tensor(y) for y in ys],
        [str(k) for k in range(len(xs))] if names is None else [str(name) for name in names],
        codes,
        cluster_names,
        truth,
    )
    return from_clients(clients, model, **options)


def from_clients(
    clients: Clients, model: Model, dtype: torch.dtype | None = None, **options: Any
) -> Federation:
    """Blocks of rows per client. Numbers take `dtype`, by default the one they come in."""
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
    **more: Any,
) -> Federation:
    """Rows of all clients one after the other, `sizes` [n] of them each; `augment` changes minibatches."""
    device = torch.device("cpu" if device is None else device)
    model = model.fit_to(x, y)
    clusters = None if clusters is None else clusters.to(device)
    shard = make_shard(x, y, sizes, model, clusters, split, seed, dtype, device, loop, augment=augment)
    return Federation(
        shard,
        model=model,
        names=names,
        rows={name: part.size for name, part in shard.splits.items()},
        clusters=clusters,
        seed=seed,
        dtype=dtype,
        device=device,
        **more,
    )


def make_shard(
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
) -> Shard:
    """Clients in one place, their rows split by the hash; `ids` are their indices in the federation."""
    x = model.prepare(x)
    if model.task != "multiclass":
        y = y.to(dtype)
    parts = split_rows(sizes, split, seed, ids)
    splits = {
        name: Rows(x[part.order], y[part.order], part.start, part.size).to(device)
        for name, part in (("train", parts.train), ("validation", parts.validation), ("test", parts.test))
    }
    splits["train"] = replace(splits["train"], augment=augment)
    return Shard(splits, model, seed, dtype, clusters, ids, loop)


def encode_clusters(labels: Sequence[Any] | Tensor | None) -> tuple[Tensor | None, list[str] | None]:
    """Cluster labels of any kind as 0..K-1 and their names in sorted order."""
    if labels is None:
        return None, None
    values = labels.tolist() if isinstance(labels, Tensor) or hasattr(labels, "tolist") else list(labels)
    if any(value is None for value in values):
        raise DataError(f"client {values.index(None)} has no cluster; give every client one")
    known = sorted(set(values))
    code = {value: k for k, value in enumerate(known)}
    return torch.tensor([code[value] for value in values]), [str(value) for value in known]

"""Further splits of the rows that are not test rows: every training row is held out once, as in cross-validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from coterie.data.rows import Rows
from coterie.federation import randomness
from coterie.federation.federation import Federation
from coterie.runtime.shard import Shard


def can_fold(fed: Federation) -> bool:
    """Whether the rows are in this process; those of a real federation stay split as their clients did."""
    return isinstance(fed.runtime, Shard)


def folds(fed: Federation, count: int) -> Iterator[Federation]:
    """The federation `count` times, each time with another part of the training rows held out for validation.

    The validation rows of `fed` are trained on instead. There are no test rows, and every client keeps a row to
    train on. Features stay encoded as they are.
    """
    train, held = fed.runtime.splits["train"], fed.runtime.splits["validation"]
    part = _parts(train, held, fed.seed, count)
    for k in range(count):
        yield _with_rows(fed, *_exchanged(train, held, part == k))


def _parts(train: Rows, held: Rows, seed: int, count: int) -> Tensor:
    """The fold in which each training row is held out, by a hash; -1 for the only row of a client."""
    client = torch.repeat_interleave(train.size)
    position = torch.arange(len(client), device=client.device)
    keys = randomness.key(seed, "fold", client, position - train.start[client])
    by_key = torch.argsort(keys, stable=True)
    rank = torch.empty_like(position)
    rank[by_key[torch.argsort(client[by_key], stable=True)]] = position - train.start[client]
    part = rank * count // train.size.clamp_min(count)[client]
    return torch.where((train.size + held.size > 1)[client], part, -1)


def _exchanged(train: Rows, held: Rows, out: Tensor) -> tuple[Rows, Rows]:
    """Training rows that are `out` change places with the validation rows."""
    client = torch.cat([torch.repeat_interleave(train.size), torch.repeat_interleave(held.size)])
    by_client = torch.argsort(client, stable=True)
    x, y = torch.cat([train.x, held.x])[by_client], torch.cat([train.y, held.y])[by_client]
    out = torch.cat([out, torch.zeros(len(held.y), dtype=torch.bool, device=out.device)])[by_client]
    client = client[by_client]

    def rows(chosen: Tensor) -> Rows:
        size = torch.bincount(client[chosen], minlength=len(train)).to(train.size)
        return Rows(x[chosen], y[chosen], size.cumsum(0) - size, size)

    return replace(rows(~out), augment=train.augment), rows(out)


def _with_rows(fed: Federation, train: Rows, held: Rows) -> Federation:
    none = held.subset(torch.zeros(0, dtype=torch.long))
    nobody = replace(none, start=torch.zeros_like(held.start), size=torch.zeros_like(held.size))
    splits = {"train": train, "validation": held, "test": nobody}
    old = fed.runtime
    shard = Shard(splits, fed.model, fed.seed, fed.dtype, old.clusters, old.ids, old.loop)
    fresh = fed.fresh()
    return Federation(
        shard,
        model=fed.model,
        names=fed.names,
        rows={name: rows.size for name, rows in splits.items()},
        clusters=fed.clusters,
        cluster_names=fed.cluster_names,
        seed=fed.seed,
        dtype=fed.dtype,
        device=fed.device,
        dropout=fed.dropout,
        table=fed.table,
        truth=fed.truth,
        byzantine=fresh.byzantine,
    )

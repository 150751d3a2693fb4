"""Further splits of the rows that are not test rows: every training row is held out once, as in cross-validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from coterie._core import randomness
from coterie.data.rows import Rows
from coterie.engine.federation import Federation
from coterie.engine.resplit import with_rows

FOLDS = 3  # divisions beside the given one: training rows are about three times as many as validation rows
FEW_ROWS = 1000  # validation rows of all clients together, below which rows are held out in turn


def can_fold(fed: Federation) -> bool:
    """Return True if the rows are in this process and have no order in time; others stay split as they are."""
    ordered = fed.table is not None and fed.table.times is not None
    return fed.runtime.capabilities.rows_visible and not ordered


def in_turn(fed: Federation) -> list[Federation]:
    """Return the federation, and where its validation rows are few, those that hold out the other rows in turn.

    Choices among many settings on few rows are choices of luck: with all divisions together every row that is not a
    test row is held out once.
    """
    return [fed, *(folds(fed, FOLDS) if count_divisions(fed) > 1 else ())]


def count_divisions(fed: Federation) -> int:
    """Return the number of divisions of the rows that `in_turn` gives."""
    return 1 + FOLDS if few_rows(fed) and can_fold(fed) else 1


def few_rows(fed: Federation) -> bool:
    """Return True if the validation rows of all clients together are few for a choice among many settings."""
    return int(fed.rows["validation"].sum()) < FEW_ROWS


def folds(fed: Federation, count: int) -> Iterator[Federation]:
    """Yield the federation `count` times, each time with another part of the training rows held out for validation.

    The validation rows of `fed` are trained on instead. There are no test rows, and every client keeps a row to
    train on. Features stay encoded as they are.
    """
    train, held = fed.runtime.rows("train"), fed.runtime.rows("validation")
    part = _parts(train, held, fed.seed, count)
    for k in range(count):
        yield _with_rows(fed, *_exchanged(train, held, part == k))


def _parts(train: Rows, held: Rows, seed: int, count: int) -> Tensor:
    """Return the fold in which each training row is held out, by a hash; -1 for the only row of a client."""
    client = torch.repeat_interleave(train.size)
    position = torch.arange(len(client), device=client.device)
    keys = randomness.key(seed, "fold", client, position - train.start[client])
    by_key = torch.argsort(keys, stable=True)
    rank = torch.empty_like(position)
    rank[by_key[torch.argsort(client[by_key], stable=True)]] = position - train.start[client]
    part = rank * count // train.size.clamp_min(count)[client]
    return torch.where((train.size + held.size > 1)[client], part, -1)


def _exchanged(train: Rows, held: Rows, out: Tensor) -> tuple[Rows, Rows]:
    """Return the rows with training rows that are `out` and validation rows exchanged."""
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
    return with_rows(fed, {"train": train, "validation": held, "test": nobody})

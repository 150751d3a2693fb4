"""Each client's rows into train, validation and test, by a hash of the client's own coordinates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.errors import SettingError
from coterie.federation import randomness


@dataclass(frozen=True)
class Part:
    """Ragged rows: those of client i are `order[start[i] : start[i] + size[i]]`, in ascending order.

    `order` holds positions in the flat array of all rows, sorted by client.
    """

    order: Tensor
    start: Tensor
    size: Tensor

    def rows(self, client: int) -> Tensor:
        """Positions of one client's rows in the flat array."""
        first = int(self.start[client])
        return self.order[first : first + int(self.size[client])]


@dataclass(frozen=True)
class Split:
    """The three parts; together they hold every row once."""

    train: Part
    validation: Part
    test: Part


def split_rows(
    sizes: Tensor,
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2),
    seed: int = 0,
    ids: Tensor | None = None,
) -> Split:
    """Cut the rows of every client by the order of hash(seed, "split", client, row).

    `sizes` [n] counts the rows of each client, whose indices are 0, 1, ... unless `ids` [n] says otherwise. A
    client's cut depends on its index and size only, its test rows do not move when the validation fraction
    changes, and it always trains on a row or more.
    """
    _require_fractions(fractions)
    sizes = sizes.to(torch.int64)
    test, validation = _counts(sizes, fractions)
    client = torch.repeat_interleave(sizes)
    rank = _rank(client, sizes, seed, ids)
    in_test = rank < test[client]
    in_validation = ~in_test & (rank < (test + validation)[client])
    return Split(
        train=_part(~in_test & ~in_validation, sizes - test - validation),
        validation=_part(in_validation, validation),
        test=_part(in_test, test),
    )


def _require_fractions(fractions: tuple[float, float, float]) -> None:
    if len(fractions) != 3 or not all(0 <= fraction <= 1 for fraction in fractions):
        raise SettingError(
            f"split: expected three numbers from 0 to 1 (train, validation, test), got {fractions}."
        )
    if abs(sum(fractions) - 1) > 1e-6:
        raise SettingError(f"split: {fractions} add up to {sum(fractions):g}; make them add up to 1.")


def _counts(sizes: Tensor, fractions: tuple[float, float, float]) -> tuple[Tensor, Tensor]:
    """Rows for test and for validation, leaving one row or more to train on."""
    spare = (sizes - 1).clamp(min=0)
    test = torch.minimum((sizes.double() * fractions[2]).round().long(), spare)
    validation = torch.minimum((sizes.double() * fractions[1]).round().long(), spare - test)
    return test, validation


def _rank(client: Tensor, sizes: Tensor, seed: int, ids: Tensor | None) -> Tensor:
    """Place of each row among the rows of its client, ordered by hash."""
    position = torch.arange(len(client), device=sizes.device)
    first = (sizes.cumsum(0) - sizes)[client]
    index = client if ids is None else ids[client]
    keys = randomness.key(seed, "split", index, position - first)
    by_key = torch.argsort(keys, stable=True)
    by_client = by_key[torch.argsort(client[by_key], stable=True)]
    rank = torch.empty_like(position)
    rank[by_client] = position - first
    return rank


def _part(chosen: Tensor, size: Tensor) -> Part:
    return Part(order=chosen.nonzero().squeeze(1), start=size.cumsum(0) - size, size=size)

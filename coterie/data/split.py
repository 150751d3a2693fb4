"""Split each client's rows into train, validation and test, by a hash of the client's own coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie._core import randomness
from coterie._core.errors import SettingError


@dataclass(frozen=True)
class SplitPart:
    """Rows of one part: those of client i are `order[start[i] : start[i] + size[i]]`, ascending.

    Parameters
    ----------
    order
        Positions in the flat array of all rows, sorted by client, int64.
    start
        Where each client's rows begin in `order`, int64 [n].
    size
        How many rows each client has in this part, int64 [n].
    """

    order: Tensor
    start: Tensor
    size: Tensor

    def rows(self, client: int) -> Tensor:
        """Return the positions of one client's rows in the flat array.

        Parameters
        ----------
        client
            Index of the client.

        Returns
        -------
        Tensor
            int64 [rows].
        """
        first = int(self.start[client])
        return self.order[first : first + int(self.size[client])]


@dataclass(frozen=True)
class Split:
    """The three parts of all rows; together they hold every row once.

    Parameters
    ----------
    train
        Rows to train on.
    validation
        Rows to choose settings, rounds and methods by.
    test
        Rows to score the deployed models on, once.
    """

    train: SplitPart
    validation: SplitPart
    test: SplitPart


def split_rows(
    sizes: Tensor,
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2),
    seed: int = 0,
    ids: Tensor | None = None,
) -> Split:
    """Split the rows of every client in the order of hash(seed, "split", client, row).

    A client's split depends on its index and size only, its test rows stay the same when the validation fraction
    changes, and it always trains on at least one row.

    Parameters
    ----------
    sizes
        Number of rows of each client, [n].
    fractions
        Shares of train, validation and test, which add up to 1.
    seed
        Seed of the hash.
    ids
        Index of each client in the federation, [n]; by default 0, 1, ...

    Returns
    -------
    Split
        The three parts.

    Examples
    --------
    >>> import torch
    >>> from coterie.data.split import split_rows
    >>> parts = split_rows(torch.tensor([10, 5, 1]))
    >>> parts.train.size.tolist(), parts.validation.size.tolist(), parts.test.size.tolist()
    ([6, 3, 1], [2, 1, 0], [2, 1, 0])
    """
    as_fractions(fractions)
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


def split_sizes(sizes: Tensor, fractions: tuple[float, float, float] = (0.6, 0.2, 0.2)) -> dict[str, Tensor]:
    """Return how many rows of each client `split_rows` puts into each part.

    Parameters
    ----------
    sizes
        Number of rows of each client, [n].
    fractions
        Shares of train, validation and test.

    Returns
    -------
    dict of str to Tensor
        Numbers of rows [n] under "train", "validation" and "test".

    Examples
    --------
    >>> import torch
    >>> {name: size.tolist() for name, size in split_sizes(torch.tensor([10, 1])).items()}
    {'train': [6, 1], 'validation': [2, 0], 'test': [2, 0]}
    """
    test, validation = _counts(sizes.to(torch.int64), fractions)
    return {"train": sizes - test - validation, "validation": validation, "test": test}


def as_fractions(split: Sequence[float]) -> tuple[float, float, float]:
    """Return the shares of training, validation and test rows.

    Parameters
    ----------
    split
        Three numbers that add up to 1.

    Returns
    -------
    tuple of float
        The shares.

    Raises
    ------
    SettingError
        If these are no such shares.

    Examples
    --------
    >>> as_fractions([0.6, 0.2, 0.2])
    (0.6, 0.2, 0.2)
    """
    shares = tuple(float(share) for share in split)
    if len(shares) != 3 or not all(0 <= share <= 1 for share in shares):
        raise SettingError(
            f"split: expected three numbers from 0 to 1 (train, validation, test), got {shares}."
        )
    if abs(sum(shares) - 1) > 1e-6:
        raise SettingError(f"split: {shares} add up to {sum(shares):g}; make them add up to 1.")
    return shares[0], shares[1], shares[2]


def _counts(sizes: Tensor, fractions: tuple[float, float, float]) -> tuple[Tensor, Tensor]:
    """Return the numbers of test and validation rows, leaving at least one row to train on."""
    spare = (sizes - 1).clamp(min=0)
    test = torch.minimum((sizes.double() * fractions[2]).round().long(), spare)
    validation = torch.minimum((sizes.double() * fractions[1]).round().long(), spare - test)
    return test, validation


def _rank(client: Tensor, sizes: Tensor, seed: int, ids: Tensor | None) -> Tensor:
    """Return the rank of each row among the rows of its client, in the order of the hash."""
    position = torch.arange(len(client), device=sizes.device)
    first = (sizes.cumsum(0) - sizes)[client]
    index = client if ids is None else ids[client]
    keys = randomness.key(seed, "split", index, position - first)
    by_key = torch.argsort(keys, stable=True)
    by_client = by_key[torch.argsort(client[by_key], stable=True)]
    rank = torch.empty_like(position)
    rank[by_client] = position - first
    return rank


def split_parts(part: Tensor, sizes: Tensor) -> Split:
    """Return the parts of rows that say which they are in: 0, 1, 2 for train, validation and test, [rows]."""
    owner = torch.repeat_interleave(sizes)
    counts = [torch.bincount(owner[part == k], minlength=len(sizes)) for k in range(3)]
    return Split(*(_part(part == k, counts[k]) for k in range(3)))


def _part(chosen: Tensor, size: Tensor) -> SplitPart:
    return SplitPart(order=chosen.nonzero().squeeze(1), start=size.cumsum(0) - size, size=size)

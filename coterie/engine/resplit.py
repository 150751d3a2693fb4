"""The same rows divided in another way: merged splits, other splits, every row tested once, some clients only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie._core import randomness
from coterie._core.errors import SettingError
from coterie.data.rows import Rows
from coterie.data.split import split_rows
from coterie.data.time_order import windows
from coterie.engine.federation import Federation, Origin
from coterie.engine.local_runtime import LocalRuntime

SPLITS = ("train", "validation", "test")
TRAIN, VALIDATION, TEST = range(3)


@dataclass(frozen=True)
class AllRows:
    """All rows of a federation, client after client, and the split that each is in (0, 1, 2: train to test).

    Examples
    --------
    >>> from coterie.engine.federation import Federation
    >>> fed = Federation.from_table("heart_disease", client="hospital", target="sick")
    >>> rows = AllRows.of(fed)
    >>> len(rows.split), rows.divided(rows.split).has_rows("test")
    (920, True)
    """

    fed: Federation
    x: Tensor
    y: Tensor
    client: Tensor
    split: Tensor

    @classmethod
    def of(cls, fed: Federation) -> AllRows:
        """Collect the rows of a federation whose rows are in this process (`Capabilities.rows_visible`)."""
        parts = [fed.runtime.rows(name) for name in SPLITS]
        client = torch.cat([torch.repeat_interleave(part.size) for part in parts])
        order = torch.argsort(client, stable=True)
        split = torch.repeat_interleave(torch.tensor([len(part.y) for part in parts], device=client.device))
        x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
        return cls(fed, x[order], y[order], client[order], split[order])

    @property
    def times(self) -> Tensor | None:
        """Times of all rows, [rows], ascending inside a client; None if they have no order."""
        return None if self.fed.table is None else self.fed.table.times

    @property
    def sizes(self) -> Tensor:
        """Number of rows of each client, [n]."""
        return torch.bincount(self.client, minlength=self.fed.n)

    def places(self, split: Tensor, which: int) -> Tensor:
        """Return which rows a federation divided like this has in one split, in its own order."""
        return (split == which).nonzero().squeeze(1)

    def divided(self, split: Tensor) -> Federation:
        """Return the federation with its rows in these splits, [rows], and with nothing kept."""

        def rows(which: int) -> Rows:
            chosen = self.places(split, which)
            size = torch.bincount(self.client[chosen], minlength=self.fed.n)
            return Rows(self.x[chosen], self.y[chosen], size.cumsum(0) - size, size)

        found = {name: rows(k) for k, name in enumerate(SPLITS)}
        found["train"] = replace(found["train"], augment=self.fed.runtime.rows("train").augment)
        return with_rows(self.fed, found, lambda model: AllRows.of(self.fed.with_model(model)).divided(split))

    def again(self, fractions: Sequence[float], seed: int) -> Tensor:
        """Return another division of the rows into these shares, drawn by a seed."""
        if self.times is not None:
            raise SettingError(
                "rows in the order of time have one split; leave out --seeds, or test later rows in windows: --folds 5"
            )
        parts = split_rows(self.sizes, (fractions[0], fractions[1], fractions[2]), seed)
        split = torch.zeros_like(self.split)
        split[parts.validation.order], split[parts.test.order] = VALIDATION, TEST
        return split

    def folds(self, count: int, seed: int) -> Iterator[Tensor]:
        """Yield divisions in which every row is tested once, validates once and trains otherwise.

        A client always has a row to train on: where folds leave none, its validation rows train. The only row of a
        client is never tested. Rows in the order of time are divided by a rolling origin instead: see `windows`.
        """
        if self.times is not None:
            yield from (split.to(self.split.device) for split in windows(self.sizes.cpu(), self.times, count))
            return
        first = self.sizes.cumsum(0) - self.sizes
        position = torch.arange(len(self.client), device=self.client.device)
        keys = randomness.key(seed, "cross-fit", self.client, position - first[self.client])
        by_key = torch.argsort(keys, stable=True)
        rank = torch.empty_like(position)
        rank[by_key[torch.argsort(self.client[by_key], stable=True)]] = position - first[self.client]
        sizes = self.sizes[self.client]
        fold = torch.where(sizes > 1, rank * count // sizes.clamp_min(count), -1)
        for k in range(count):
            split = torch.where(fold == k, TEST, torch.where(fold == (k + 1) % count, VALIDATION, TRAIN))
            trains = torch.bincount(self.client, (split == TRAIN).double(), minlength=self.fed.n) > 0
            yield torch.where((split == VALIDATION) & ~trains[self.client], TRAIN, split)


def with_rows(fed: Federation, splits: dict[str, Rows], origin: Origin | None = None) -> Federation:
    """Return the same clients with other rows and nothing kept; `origin` builds them for another model."""
    return Federation(
        fed.runtime.with_rows(splits, fed.clusters),
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
        byzantine=fed.byzantine,
        texts=fed.texts,
        origin=None if fed.origin is None else origin,
    )


def joined(splits: Mapping[str, Rows], names: Sequence[str], least: int = 0) -> dict[str, Rows]:
    """Return splits in which the rows of some train together, client after client, and the others stay.

    Parameters
    ----------
    splits
        Rows by split.
    names
        Splits to train on, such as ('train', 'validation').
    least
        A client with fewer rows than this in a split does not train on them.

    Returns
    -------
    dict of str to Rows

    Examples
    --------
    >>> from coterie.engine.federation import Federation
    >>> fed = Federation.from_table("heart_disease", client="hospital", target="sick")
    >>> rows = {name: fed.runtime.rows(name) for name in SPLITS}
    >>> [int(part.size.sum()) for part in joined(rows, ("train", "validation")).values()]
    [735, 0, 185]
    """
    parts = [splits[name] for name in SPLITS]
    client = torch.cat([torch.repeat_interleave(part.size) for part in parts])
    split = torch.repeat_interleave(torch.tensor([len(part.y) for part in parts], device=client.device))
    for k, part in enumerate(parts):
        if SPLITS[k] in names:
            split[(split == k) & (part.size >= least)[client]] = TRAIN
    order = torch.argsort(client, stable=True)
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    found = {}
    for k, name in enumerate(SPLITS):
        chosen = order[split[order] == k]
        size = torch.bincount(client[chosen], minlength=len(parts[0].size))
        found[name] = Rows(x[chosen], y[chosen], size.cumsum(0) - size, size, splits[name].augment)
    return found


def merged(fed: Federation, names: Sequence[str]) -> Federation:
    """Return the federation that trains on the rows of these splits together and holds no others out.

    Parameters
    ----------
    fed
        The federation, whose rows are in this process.
    names
        Splits to train on, such as ('train', 'validation').

    Returns
    -------
    Federation
        The same clients, with nothing kept.

    Examples
    --------
    >>> from coterie.engine.federation import Federation
    >>> fed = Federation.from_table("heart_disease", client="hospital", target="sick")
    >>> int(merged(fed, ("train", "validation", "test")).rows["train"].sum())
    920
    """
    rows, wanted = AllRows.of(fed), torch.tensor([name in names for name in SPLITS], device=fed.device)
    kept = wanted[rows.split]
    part = AllRows(fed, rows.x[kept], rows.y[kept], rows.client[kept], rows.split[kept])
    found = part.divided(torch.zeros_like(part.split))
    found.origin = None if fed.origin is None else (lambda model: merged(fed.with_model(model), names))
    return found


def only(fed: Federation, clients: Tensor) -> Federation:
    """Return a federation of some of the clients, in the order given, with nothing kept.

    Parameters
    ----------
    fed
        The federation, whose rows are in this process.
    clients
        Indices of clients, [k].

    Returns
    -------
    Federation
        Clusters that keep a client keep their order and name.

    Examples
    --------
    >>> import torch
    >>> from coterie.engine.federation import Federation
    >>> fed = Federation.from_table("heart_disease", client="hospital", target="sick")
    >>> only(fed, torch.tensor([2, 0])).names
    ['switzerland', 'cleveland']
    """
    splits = {split: fed.runtime.rows(split).subset(clients) for split in fed.rows}
    table = fed.table
    if table is not None and table.times is not None:
        sizes = torch.stack([size.cpu() for size in fed.rows.values()]).sum(0)
        each = table.times.split(sizes.tolist())
        table = replace(table, times=torch.cat([each[k] for k in clients.tolist()]))
    clusters, names = None, None
    if fed.clusters is not None:
        left, clusters = torch.unique(fed.clusters[clients], return_inverse=True)
        names = None if fed.cluster_names is None else [fed.cluster_names[k] for k in left.tolist()]
    return Federation(
        LocalRuntime(splits, fed.model, fed.seed, fed.dtype, clusters),
        model=fed.model,
        names=[fed.names[k] for k in clients.tolist()],
        rows={split: part.size for split, part in splits.items()},
        clusters=clusters,
        cluster_names=names,
        seed=fed.seed,
        dtype=fed.dtype,
        device=fed.device,
        dropout=fed.dropout,
        table=table,
        truth=None if fed.truth is None else fed.truth[clients],
        origin=None if fed.origin is None else (lambda model: only(fed.with_model(model), clients)),
    )

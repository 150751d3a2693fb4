"""Partitioners: deal the rows of a pool out to clients.

Every row goes to exactly one client (`permuted_labels` with `whole` excepted), and the result depends on the pool, the
settings and the seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import DataError, SettingError
from coterie._core.randomness import key, permutation
from coterie.data.clients import Clients, Pool, by_label, deal
from coterie.data.row_shares import (
    apportion,
    assign_classes,
    different_permutations,
    fill_small_clients,
    level,
    log_gamma_draws,
    places,
    shares,
)


def by_column(pool: Pool, labels: Any) -> Clients:
    """Make one client of each distinct label.

    Parameters
    ----------
    pool
        The rows to deal out.
    labels
        Client label of each row: numbers or text.

    Returns
    -------
    Clients
        Clients in sorted order of their labels, which are their names.

    Examples
    --------
    >>> import torch
    >>> from coterie.data import Pool, partition
    >>> pool = Pool(torch.eye(3), torch.tensor([0, 1, 0]))
    >>> clients = partition.by_column(pool, ["Ulm", "Bern", "Ulm"])
    >>> clients.names, clients.sizes.tolist()
    (['Bern', 'Ulm'], [1, 2])
    """
    return by_label(pool.x, pool.y, labels)


def equal_shares(pool: Pool, n: int) -> Clients:
    """Give each client the same number of rows, in the order of the pool.

    Parameters
    ----------
    pool
        The rows to deal out.
    n
        Number of clients.

    Returns
    -------
    Clients
        Client i owns the rows from floor(i rows / n) up to floor((i + 1) rows / n).

    Examples
    --------
    >>> import torch
    >>> from coterie.data import Pool, partition
    >>> partition.equal_shares(Pool(torch.eye(7), torch.zeros(7)), 3).sizes.tolist()
    [2, 2, 3]
    """
    _check_count(n, len(pool))
    return _owned(pool, shares(len(pool), n), n)


def dirichlet(pool: Pool, n: int, alpha: float, min_rows: int = 1, seed: int = 0) -> Clients:
    """Skew labels: divide each class among the clients in proportions drawn from Dirichlet(alpha).

    Yurochkin et al. 2019, arXiv:1905.12022.

    Parameters
    ----------
    pool
        The rows to deal out; labels are whole numbers.
    n
        Number of clients.
    alpha
        Concentration: a small alpha gives each client few classes, a large one the mixture of the pool.
    min_rows
        Clients with fewer rows are filled up with random rows of the largest clients.
    seed
        Seed of the draws.

    Returns
    -------
    Clients
        n clients of different sizes and class mixtures.

    Examples
    --------
    >>> import torch
    >>> from coterie.data import Pool, partition
    >>> pool = Pool(torch.eye(100), torch.arange(100) % 4)
    >>> clients = partition.dirichlet(pool, 3, alpha=0.1, min_rows=5)
    >>> [torch.bincount(y, minlength=4).tolist() for y in clients.ys]
    [[0, 17, 0, 25], [25, 4, 22, 0], [0, 4, 3, 0]]
    """
    _check_count(n, len(pool), min_rows)
    if not 1e-9 <= alpha <= 1e9:
        raise SettingError(f"alpha={alpha}; it must be positive, in 1e-9..1e9")
    classes, row_class = _classes(pool)
    drawn = log_gamma_draws(key(seed, "dirichlet shares", torch.arange(len(classes))), n, alpha)
    place, counts = places(row_class, key(seed, "dirichlet rows"))
    # Class c occupies the stretch c..c+1 of one long line on which both edges and rows lie.
    edges = torch.softmax(drawn, 1).cumsum(1) + torch.arange(len(classes)).unsqueeze(1)
    spot = torch.searchsorted(edges.flatten(), row_class + (place + 0.5) / counts[row_class])
    owner = (spot - row_class * n).clamp_(0, n - 1)
    return _owned(pool, fill_small_clients(owner, n, min_rows, key(seed, "dirichlet fill")), n)


def classes_per_client(pool: Pool, n: int, k: int, seed: int = 0) -> Clients:
    """Give each client exactly k classes; the clients that hold a class share it equally.

    Classes have, as nearly as possible, equally many holders (McMahan et al. 2017, arXiv:1602.05629, with k = 2).

    Parameters
    ----------
    pool
        The rows to deal out; labels are whole numbers.
    n
        Number of clients.
    k
        Classes per client.
    seed
        Seed of the draws.

    Returns
    -------
    Clients
        n clients with k classes each.

    Raises
    ------
    SettingError
        If n clients of k classes cannot hold all classes.
    DataError
        If there are too few rows for every client to get k classes.

    Examples
    --------
    >>> import torch
    >>> from coterie.data import Pool, partition
    >>> pool = Pool(torch.eye(40), torch.arange(40) % 4)
    >>> clients = partition.classes_per_client(pool, 4, k=2)
    >>> [len(set(y.tolist())) for y in clients.ys]
    [2, 2, 2, 2]
    """
    _check_count(n, len(pool))
    classes, row_class = _classes(pool)
    if not 1 <= k <= len(classes):
        raise SettingError(f"k={k}; the pool has {len(classes)} classes, so k must be in 1..{len(classes)}")
    if n * k < len(classes):
        raise SettingError(f"{n} clients of {k} classes cannot hold all {len(classes)}; raise n or k")
    place, counts = places(row_class, key(seed, "classes rows"))
    holders = counts.clamp(max=n)
    if int(holders.sum()) < n * k:
        raise DataError(
            f"{n} clients cannot have {k} classes each: the classes have {counts.tolist()} rows; lower n or k"
        )
    holds = assign_classes(level(holders, n * k), n, k, key(seed, "classes hand out"))
    quota = holds.sum(0)
    turn = place * quota[row_class] // counts[row_class]
    first = quota.cumsum(0) - quota
    return _owned(pool, holds.T.nonzero()[:, 1][first[row_class] + turn], n)


def disjoint_classes(pool: Pool, cluster_sizes: Sequence[int], seed: int = 0) -> Clients:
    """Give each cluster classes of its own, equally many; the clients of a cluster share its rows equally.

    Parameters
    ----------
    pool
        The rows to deal out; labels are whole numbers.
    cluster_sizes
        Number of clients in each cluster.
    seed
        Seed of the draws.

    Returns
    -------
    Clients
        Clients with known clusters.

    Examples
    --------
    >>> import torch
    >>> from coterie.data import Pool, partition
    >>> pool = Pool(torch.eye(40), torch.arange(40) % 4)
    >>> clients = partition.disjoint_classes(pool, [1, 3])
    >>> clients.clusters.tolist(), [sorted(set(y.tolist())) for y in clients.ys]
    ([0, 1, 1, 1], [[1, 2], [0, 3], [0, 3], [0, 3]])
    """
    sizes = _check_clusters(cluster_sizes, len(pool))
    classes, row_class = _classes(pool)
    count = len(sizes)
    if count > len(classes):
        raise SettingError(f"{count} clusters cannot own disjoint classes: the pool has only {len(classes)}")
    class_cluster = torch.empty(len(classes), dtype=torch.int64)
    class_cluster[permutation(key(seed, "disjoint classes"), len(classes))] = shares(len(classes), count)
    row_cluster = class_cluster[row_class]
    place, rows = places(row_cluster, key(seed, "disjoint rows"))
    short = (rows < sizes).nonzero()
    if len(short):
        cluster = int(short[0])
        raise DataError(
            f"cluster {cluster} drew only {int(rows[cluster])} rows for its {int(sizes[cluster])} clients; "
            "use fewer clients, another seed or more rows"
        )
    owner = (sizes.cumsum(0) - sizes)[row_cluster] + place * sizes[row_cluster] // rows[row_cluster]
    return _owned(pool, owner, int(sizes.sum()), torch.repeat_interleave(torch.arange(count), sizes))


def permuted_labels(pool: Pool, cluster_sizes: Sequence[int], seed: int = 0, whole: bool = False) -> Clients:
    """Deal rows out equally at random; every cluster renames the classes by a permutation of its own.

    Parameters
    ----------
    pool
        The rows to deal out; labels are whole numbers.
    cluster_sizes
        Number of clients in each cluster.
    seed
        Seed of the draws.
    whole
        Give every cluster all rows, shared among its clients, instead of sharing the rows among all clients.

    Returns
    -------
    Clients
        Clients with known clusters.

    Examples
    --------
    >>> import torch
    >>> from coterie.data import Pool, partition
    >>> pool = Pool(torch.eye(40), torch.arange(40) % 4)
    >>> clients = partition.permuted_labels(pool, [2, 2])
    >>> clients.sizes.tolist(), clients.clusters.tolist()
    ([10, 10, 10, 10], [0, 0, 1, 1])
    """
    sizes = _check_clusters(cluster_sizes, len(pool))
    classes, row_class = _classes(pool)
    count, n = len(sizes), int(sizes.sum())
    renamed = classes[different_permutations(count, len(classes), seed)]
    clusters = torch.repeat_interleave(torch.arange(count), sizes)
    if not whole:
        owner = _dealt(len(pool), n, seed)
        return _owned(Pool(pool.x, renamed[clusters[owner], row_class]), owner, n, clusters)
    xs, ys = [], []
    for cluster, size in enumerate(sizes.tolist()):
        order = permutation(key(seed, "permuted rows", cluster), len(pool))
        for rows in order.tensor_split(size):
            xs.append(pool.x[rows])
            ys.append(renamed[cluster, row_class[rows]])
    return _named(xs, ys, clusters)


def equal_shares_at_random(pool: Pool, cluster_sizes: Sequence[int], seed: int = 0) -> Clients:
    """Deal rows out equally at random to clusters of clients that do not differ yet.

    Parameters
    ----------
    pool
        The rows to deal out.
    cluster_sizes
        Number of clients in each cluster.
    seed
        Seed of the draws.

    Returns
    -------
    Clients
        Clients with known clusters.

    Examples
    --------
    >>> import torch
    >>> from coterie.data import Pool, partition
    >>> clients = partition.equal_shares_at_random(Pool(torch.eye(7), torch.zeros(7)), [1, 2])
    >>> clients.sizes.tolist(), clients.clusters.tolist()
    ([2, 2, 3], [0, 1, 1])
    """
    sizes = _check_clusters(cluster_sizes, len(pool))
    clusters = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return _owned(pool, _dealt(len(pool), len(clusters), seed), len(clusters), clusters)


def power_law(pool: Pool, n: int, exponent: float, min_rows: int = 1, seed: int = 0) -> Clients:
    """Deal random rows out in sizes that follow a power law.

    Parameters
    ----------
    pool
        The rows to deal out.
    n
        Number of clients.
    exponent
        Beyond `min_rows`, client i = 1..n gets a number of rows in proportion to i^-exponent.
    min_rows
        Rows that every client gets.
    seed
        Seed of the draws.

    Returns
    -------
    Clients
        n clients, the largest first.

    Examples
    --------
    >>> import torch
    >>> from coterie.data import Pool, partition
    >>> partition.power_law(Pool(torch.eye(100), torch.zeros(100)), 4, exponent=1.0).sizes.tolist()
    [47, 24, 16, 13]
    """
    _check_count(n, len(pool), min_rows)
    if not 0 <= exponent < math.inf:
        raise SettingError(f"exponent={exponent}; it must be finite and not negative")
    weight = torch.arange(1, n + 1, dtype=torch.float64) ** -exponent
    sizes = min_rows + apportion(weight / weight.sum(), len(pool) - n * min_rows)
    owner = torch.empty(len(pool), dtype=torch.int64)
    owner[permutation(key(seed, "power law rows"), len(pool))] = torch.repeat_interleave(
        torch.arange(n), sizes
    )
    return _owned(pool, owner, n)


def _dealt(rows: int, n: int, seed: int) -> Tensor:
    """Return the owner of each row, equally many for each client, drawn at random."""
    owner = torch.empty(rows, dtype=torch.int64)
    owner[permutation(key(seed, "permuted rows"), rows)] = shares(rows, n)
    return owner


def _owned(pool: Pool, owner: Tensor, n: int, clusters: Tensor | None = None) -> Clients:
    return _named(*deal(pool.x, pool.y, owner, n), clusters)


def _named(xs: list[Tensor], ys: list[Tensor], clusters: Tensor | None) -> Clients:
    names = [f"client-{i}" for i in range(len(xs))]
    if clusters is None:
        return Clients(xs, ys, names)
    return Clients(xs, ys, names, clusters, [f"cluster-{k}" for k in range(int(clusters.max()) + 1)])


def _check_count(n: int, rows: int, min_rows: int = 1) -> None:
    if n < 1 or min_rows < 1:
        raise SettingError(f"n={n}, min_rows={min_rows}; both must be at least 1")
    if n * min_rows > rows:
        raise DataError(f"{n} clients need {n * min_rows} rows but the pool has {rows}; use fewer clients")


def _check_clusters(cluster_sizes: Sequence[int], rows: int) -> Tensor:
    sizes = torch.tensor(list(cluster_sizes), dtype=torch.int64)
    if len(sizes) == 0 or int(sizes.min()) < 1:
        raise SettingError(
            f"cluster_sizes={list(cluster_sizes)}; give at least one cluster, each with a client"
        )
    _check_count(int(sizes.sum()), rows)
    return sizes


def _classes(pool: Pool) -> tuple[Tensor, Tensor]:
    """Return the distinct labels, and the index of each row's label among them."""
    if pool.y.is_floating_point() or pool.y.dim() != 1:
        raise DataError("this partition goes by class, but the labels are not whole numbers, one per row")
    classes: tuple[Tensor, Tensor] = torch.unique(pool.y, return_inverse=True)
    return classes

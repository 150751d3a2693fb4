"""Ways to deal pooled rows out to clients. Every row goes to exactly one client, by the seed alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coterie.data.clients import Clients, Pool, by_label, deal
from coterie.errors import DataError, SettingError
from coterie.federation.randomness import key, normal, permutation, slots, uniform


def by_column(pool: Pool, labels: Any) -> Clients:
    """One client per distinct label, in sorted order; `labels` has one entry per row."""
    return by_label(pool.x, pool.y, labels)


def equal_shares(pool: Pool, n: int) -> Clients:
    """Rows in order: client i of n owns rows floor(i r / n) up to floor((i + 1) r / n)."""
    _check_count(n, len(pool))
    return _dealt(pool, _shares(len(pool), n), n)


def dirichlet(pool: Pool, n: int, alpha: float, min_rows: int = 1, seed: int = 0) -> Clients:
    """Label skew: each class is divided among the clients by proportions from Dirichlet(alpha).

    Yurochkin et al. 2019, arXiv:1905.12022; small alpha means few classes per client. Clients left with fewer
    than `min_rows` are filled up with random rows of the largest ones.
    """
    _check_count(n, len(pool), min_rows)
    if not 1e-9 <= alpha <= 1e9:
        raise SettingError(f"alpha={alpha}; it must be positive, in 1e-9..1e9")
    classes, row_class = _classes(pool)
    drawn = _log_gamma_draws(key(seed, "dirichlet shares", torch.arange(len(classes))), n, alpha)
    place, counts = _places(row_class, key(seed, "dirichlet rows"))
    # Class c occupies the stretch c..c+1 of one long line on which both edges and rows lie.
    edges = torch.softmax(drawn, 1).cumsum(1) + torch.arange(len(classes)).unsqueeze(1)
    spot = torch.searchsorted(edges.flatten(), row_class + (place + 0.5) / counts[row_class])
    owner = (spot - row_class * n).clamp_(0, n - 1)
    return _dealt(pool, _filled_up(owner, n, min_rows, key(seed, "dirichlet fill")), n)


def classes_per_client(pool: Pool, n: int, k: int, seed: int = 0) -> Clients:
    """Each client holds exactly k classes; a class is shared equally among the clients that hold it.

    Classes have as nearly as possible equally many holders (McMahan et al. 2017, arXiv:1602.05629: k = 2).
    """
    _check_count(n, len(pool))
    classes, row_class = _classes(pool)
    if not 1 <= k <= len(classes):
        raise SettingError(f"k={k}; the pool has {len(classes)} classes, so k must be in 1..{len(classes)}")
    if n * k < len(classes):
        raise SettingError(f"{n} clients of {k} classes cannot hold all {len(classes)}; raise n or k")
    place, counts = _places(row_class, key(seed, "classes rows"))
    holders = counts.clamp(max=n)
    if int(holders.sum()) < n * k:
        raise DataError(
            f"{n} clients cannot have {k} classes each: the classes have {counts.tolist()} rows; lower n or k"
        )
    holds = _hand_out(_level(holders, n * k), n, k, key(seed, "classes hand out"))
    quota = holds.sum(0)
    turn = place * quota[row_class] // counts[row_class]
    first = quota.cumsum(0) - quota
    return _dealt(pool, holds.T.nonzero()[:, 1][first[row_class] + turn], n)


def disjoint_classes(pool: Pool, cluster_sizes: Sequence[int], seed: int = 0) -> Clients:
    """Each cluster owns classes of its own, equally many; its rows are shared equally by its clients."""
    sizes = _check_clusters(cluster_sizes, len(pool))
    classes, row_class = _classes(pool)
    count = len(sizes)
    if count > len(classes):
        raise SettingError(f"{count} clusters cannot own disjoint classes: the pool has only {len(classes)}")
    class_cluster = torch.empty(len(classes), dtype=torch.int64)
    class_cluster[permutation(key(seed, "disjoint classes"), len(classes))] = _shares(len(classes), count)
    row_cluster = class_cluster[row_class]
    place, rows = _places(row_cluster, key(seed, "disjoint rows"))
    short = (rows < sizes).nonzero()
    if len(short):
        cluster = int(short[0])
        raise DataError(
            f"cluster {cluster} drew only {int(rows[cluster])} rows for its {int(sizes[cluster])} clients; "
            "use fewer clients, another seed or more rows"
        )
    owner = (sizes.cumsum(0) - sizes)[row_cluster] + place * sizes[row_cluster] // rows[row_cluster]
    return _dealt(pool, owner, int(sizes.sum()), torch.repeat_interleave(torch.arange(count), sizes))


def permuted_labels(pool: Pool, cluster_sizes: Sequence[int], seed: int = 0, whole: bool = False) -> Clients:
    """Rows shared equally at random; every cluster renames the classes by a permutation of its own.

    `whole` gives every cluster all rows, to be shared among its clients, instead of sharing them among all.
    """
    sizes = _check_clusters(cluster_sizes, len(pool))
    classes, row_class = _classes(pool)
    count, n = len(sizes), int(sizes.sum())
    renamed = classes[_different_permutations(count, len(classes), seed)]
    clusters = torch.repeat_interleave(torch.arange(count), sizes)
    if not whole:
        owner = torch.empty(len(pool), dtype=torch.int64)
        owner[permutation(key(seed, "permuted rows"), len(pool))] = _shares(len(pool), n)
        return _dealt(Pool(pool.x, renamed[clusters[owner], row_class]), owner, n, clusters)
    xs, ys = [], []
    for cluster, size in enumerate(sizes.tolist()):
        order = permutation(key(seed, "permuted rows", cluster), len(pool))
        for rows in order.tensor_split(size):
            xs.append(pool.x[rows])
            ys.append(renamed[cluster, row_class[rows]])
    return _named(xs, ys, clusters)


def power_law(pool: Pool, n: int, exponent: float, min_rows: int = 1, seed: int = 0) -> Clients:
    """Random rows: `min_rows` each, the rest in proportion to i^-exponent for client i = 1..n."""
    _check_count(n, len(pool), min_rows)
    if not 0 <= exponent < math.inf:
        raise SettingError(f"exponent={exponent}; it must be finite and not negative")
    weight = torch.arange(1, n + 1, dtype=torch.float64) ** -exponent
    sizes = min_rows + _apportion(weight / weight.sum(), len(pool) - n * min_rows)
    owner = torch.empty(len(pool), dtype=torch.int64)
    owner[permutation(key(seed, "power law rows"), len(pool))] = torch.repeat_interleave(
        torch.arange(n), sizes
    )
    return _dealt(pool, owner, n)


def _dealt(pool: Pool, owner: Tensor, n: int, clusters: Tensor | None = None) -> Clients:
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
    """Distinct labels, and for each row the index of its own."""
    if pool.y.is_floating_point() or pool.y.dim() != 1:
        raise DataError("this partition goes by class, but the labels are not whole numbers, one per row")
    return torch.unique(pool.y, return_inverse=True)


def _shares(rows: int, n: int) -> Tensor:
    """Owner of each row when n owners take equal shares in order."""
    edges = torch.arange(n + 1) * rows // n
    return torch.repeat_interleave(torch.arange(n), edges.diff())


def _places(group: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Random place of each row among the rows of its group, and the size of every group."""
    shuffled = permutation(keys, len(group))
    order = shuffled[torch.argsort(group[shuffled], stable=True)]
    counts = torch.bincount(group)
    first = counts.cumsum(0) - counts
    place = torch.empty_like(order)
    place[order] = torch.arange(len(group)) - first[group[order]]
    return place, counts


def _apportion(share: Tensor, total: int) -> Tensor:
    """Whole numbers that sum to total, by largest remainder."""
    exact = share * total
    whole = exact.floor().long()
    spare = total - int(whole.sum())
    whole[torch.argsort(exact - whole, descending=True, stable=True)[:spare]] += 1
    return whole


def _level(caps: Tensor, total: int) -> Tensor:
    """The most even whole numbers below their caps that sum to total."""
    order = torch.argsort(caps, stable=True)
    ascending = caps[order]
    remaining = total - (ascending.cumsum(0) - ascending)
    open_count = torch.arange(len(caps), 0, -1)
    capped = ascending * open_count <= remaining
    count = int(capped.long().cumprod(0).sum())
    levelled = ascending.clone()
    if count < len(caps):
        level, spare = divmod(int(remaining[count]), len(caps) - count)
        levelled[count:] = level
        levelled[len(caps) - spare :] += 1
    result = torch.empty_like(caps)
    result[order] = levelled
    return result


def _filled_up(owner: Tensor, n: int, min_rows: int, keys: Tensor) -> Tensor:
    """Move random rows from the largest clients to those with fewer than min_rows."""
    sizes = torch.bincount(owner, minlength=n)
    lacking = (min_rows - sizes).clamp(min=0)
    if not lacking.any():
        return owner
    target = sizes.clone()
    donors = sizes >= min_rows
    target[donors] = _level(sizes[donors], int((sizes * donors).sum() - lacking.sum()))
    target[~donors] = min_rows
    place, _ = _places(owner, keys)
    moved = place >= target[owner]
    result = owner.clone()
    result[moved] = torch.repeat_interleave(torch.arange(n), lacking)
    return result


def _hand_out(quota: Tensor, n: int, k: int, keys: Tensor) -> Tensor:
    """Which client holds which class, bool [n, classes]: k per client, quota[c] per class.

    Taking the classes with the largest quota left never gets stuck (Gale 1957, Ryser 1957); ties and the
    order of the clients are random.
    """
    left = quota.clone()
    order_key, tie_key = slots(keys, 2)
    ties = uniform(slots(slots(tie_key, n), len(quota)))
    holds = torch.zeros(n, len(quota), dtype=torch.bool)
    for client in permutation(order_key, n).tolist():
        chosen = torch.argsort(left + ties[client], descending=True)[:k]
        holds[client, chosen] = True
        left[chosen] -= 1
    return holds


def _different_permutations(count: int, classes: int, seed: int) -> Tensor:
    """`count` different orders of 0..classes-1, [count, classes]; a repeated draw is drawn again."""
    if classes < 13 and count > math.factorial(classes):
        raise SettingError(f"{classes} classes have fewer than {count} permutations; use fewer clusters")
    found: dict[tuple[int, ...], None] = {}
    attempt = 0
    while len(found) < count:
        found.setdefault(tuple(permutation(key(seed, "permuted labels", attempt), classes).tolist()))
        attempt += 1
    return torch.tensor(list(found))


def _log_gamma_draws(keys: Tensor, count: int, alpha: float) -> Tensor:
    """Logarithms of Gamma(alpha) draws, [len(keys), count], by Marsaglia and Tsang (2000).

    Gamma(a) is Gamma(a + 1) U^(1/a); in logarithms this does not underflow for tiny alpha.
    """
    d = alpha + 1.0 - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    boost, base = slots(slots(keys, count), 2).unbind(-1)
    result = torch.full(boost.shape, math.nan, dtype=torch.float64)
    attempt = 0
    while (open_draws := result.isnan()).any():
        first, second = slots(key(base[open_draws], attempt), 2).unbind(-1)
        z = normal(first)
        v = (1.0 + c * z) ** 3
        log_u = torch.log1p(-uniform(second))
        accepted = (v > 0) & (log_u < 0.5 * z * z + d - d * v + d * torch.log(v.clamp(min=1e-300)))
        result[open_draws] = torch.where(accepted, math.log(d) + torch.log(v.clamp(min=1e-300)), math.nan)
        attempt += 1
    return result + torch.log1p(-uniform(boost)) / alpha

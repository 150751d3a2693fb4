"""Partitions deal every row to exactly one client and do what their names say."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie._core.errors import CoterieError, DataError, SettingError
from coterie._core.randomness import key
from coterie.data import partition, row_shares
from coterie.data.clients import Clients, Pool

labels_of_rows = st.lists(st.integers(0, 6), min_size=1, max_size=60)
seeds = st.integers(0, 2**40)


@st.composite
def labels_for_clients(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Labels, a number of clients and a number of rows that each client can have at least."""
    n, min_rows = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    return draw(st.lists(st.integers(0, 6), min_size=n * min_rows, max_size=60)), n, min_rows


thorough = settings(max_examples=40)


def _pool(labels: list[int]) -> Pool:
    """Rows that carry their own number and label, so that any loss, copy or mix-up shows."""
    rows = torch.arange(len(labels))
    return Pool(torch.stack([rows, torch.tensor(labels)], 1).double(), torch.tensor(labels))


def _balanced(classes: int, each: int) -> Pool:
    return _pool([k for k in range(classes) for _ in range(each)])


def _assert_every_row_once(clients: Clients, pool: Pool, same_labels: bool = True) -> None:
    x = torch.cat(clients.xs)
    order = x[:, 0].argsort()
    assert torch.equal(x[order], pool.x)
    if same_labels:
        assert torch.equal(torch.cat(clients.ys)[order], pool.y)


def _same(one: Clients, other: Clients) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one.xs + one.ys, other.xs + other.ys, strict=True)
    )


@thorough
@given(enough=labels_for_clients())
def test_equal_shares(enough: tuple[list[int], int, int]) -> None:
    labels, n, _ = enough
    pool, rows = _pool(labels), len(labels)
    clients = partition.equal_shares(pool, n)
    _assert_every_row_once(clients, pool)
    for i, x in enumerate(clients.xs):
        assert x[:, 0].tolist() == list(range(i * rows // n, (i + 1) * rows // n))


@thorough
@given(labels=labels_of_rows, data=st.data())
def test_by_column(labels: list[int], data: st.DataObject) -> None:
    pool = _pool(labels)
    owners = data.draw(st.lists(st.sampled_from("abc"), min_size=len(labels), max_size=len(labels)))
    clients = partition.by_column(pool, owners)
    _assert_every_row_once(clients, pool)
    assert clients.names == sorted(set(owners))
    for name, x in zip(clients.names, clients.xs, strict=True):
        assert x[:, 0].tolist() == [row for row, owner in enumerate(owners) if owner == name]


@thorough
@given(enough=labels_for_clients(), alpha=st.sampled_from([1e-9, 0.01, 0.5, 1.0, 30.0, 1e9]), seed=seeds)
def test_dirichlet_keeps_rows(enough: tuple[list[int], int, int], alpha: float, seed: int) -> None:
    labels, n, min_rows = enough
    pool = _pool(labels)
    clients = partition.dirichlet(pool, n, alpha, min_rows, seed)
    _assert_every_row_once(clients, pool)
    assert int(clients.sizes.min()) >= min_rows
    assert _same(clients, partition.dirichlet(pool, n, alpha, min_rows, seed))


@thorough
@given(labels=labels_of_rows, n=st.integers(1, 30), k=st.integers(1, 7), seed=seeds)
def test_classes_per_client(labels: list[int], n: int, k: int, seed: int) -> None:
    pool = _pool(labels)
    counts = torch.tensor(labels).bincount()
    counts = counts[counts > 0]
    possible = (
        len(counts) <= n * k <= int(counts.clamp(max=n).sum()) and k <= len(counts) and n <= len(labels)
    )
    if not possible:
        with pytest.raises(CoterieError):
            partition.classes_per_client(pool, n, k, seed)
        return
    clients = partition.classes_per_client(pool, n, k, seed)
    _assert_every_row_once(clients, pool)
    assert all(len(y.unique()) == k for y in clients.ys)
    for label in set(labels):
        held = [int((y == label).sum()) for y in clients.ys]
        assert max(held) - min(rows for rows in held if rows) <= 1
    assert _same(clients, partition.classes_per_client(pool, n, k, seed))


@thorough
@given(labels=labels_of_rows, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), seed=seeds)
def test_disjoint_classes(labels: list[int], sizes: list[int], seed: int) -> None:
    pool = _pool(labels)
    try:
        clients = partition.disjoint_classes(pool, sizes, seed)
    except CoterieError:
        assert len(sizes) > len(set(labels)) or min(map(labels.count, set(labels))) < max(sizes)
        return
    _assert_every_row_once(clients, pool)
    assert clients.clusters is not None and clients.clusters.bincount().tolist() == sizes
    owned = [set(torch.cat(_of_cluster(clients, k)).tolist()) for k in range(len(sizes))]
    assert sum(map(len, owned)) == len(set.union(*owned)) == len(set(labels))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1
    for k in range(len(sizes)):
        shares = [len(y) for y in _of_cluster(clients, k)]
        assert max(shares) - min(shares) <= 1


def _of_cluster(clients: Clients, k: int) -> list[torch.Tensor]:
    assert clients.clusters is not None
    return [y for y, cluster in zip(clients.ys, clients.clusters.tolist(), strict=True) if cluster == k]


@thorough
@given(
    labels=st.lists(st.integers(0, 6), min_size=25, max_size=60),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    seed=seeds,
)
def test_permuted_labels(labels: list[int], sizes: list[int], seed: int) -> None:
    pool = _pool(labels)
    if len(sizes) > math.factorial(len(set(labels))):
        with pytest.raises(SettingError, match="permutations"):
            partition.permuted_labels(pool, sizes, seed)
        return
    clients = partition.permuted_labels(pool, sizes, seed)
    _assert_every_row_once(clients, pool, same_labels=False)
    assert clients.clusters is not None and clients.clusters.bincount().tolist() == sizes
    assert int(clients.sizes.max() - clients.sizes.min()) <= 1
    for k in range(len(sizes)):
        members = (clients.clusters == k).nonzero().flatten().tolist()
        pairs = {
            (int(old), int(new))
            for i in members
            for old, new in zip(clients.xs[i][:, 1], clients.ys[i], strict=True)
        }
        assert len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs})
        assert {new for _, new in pairs} <= set(labels)


def test_permuted_labels_of_the_whole_pool_for_every_cluster() -> None:
    pool = _balanced(3, 7)
    clients = partition.permuted_labels(pool, [2, 3], seed=1, whole=True)
    assert clients.clusters is not None and clients.clusters.tolist() == [0, 0, 1, 1, 1]
    for members in ([0, 1], [2, 3, 4]):
        rows = torch.cat([clients.xs[i] for i in members])
        assert sorted(rows.tolist()) == sorted(pool.x.tolist())
        names = torch.cat([clients.ys[i] for i in members])
        pairs = set(zip(rows[:, 1].tolist(), names.tolist(), strict=True))
        assert len(pairs) == 3
    assert clients.sizes.tolist() == [11, 10, 7, 7, 7]


def test_permutations_differ_between_clusters() -> None:
    pool = _balanced(3, 40)
    clients = partition.permuted_labels(pool, [1] * 6, seed=3)
    maps = {
        tuple(int(y[x[:, 1] == old][0]) for old in range(3))
        for x, y in zip(clients.xs, clients.ys, strict=True)
    }
    assert len(maps) == 6
    with pytest.raises(SettingError, match="fewer than 7 permutations"):
        partition.permuted_labels(pool, [1] * 7)


@thorough
@given(enough=labels_for_clients(), exponent=st.sampled_from([0.0, 0.5, 1.0, 2.5, 400.0]), seed=seeds)
def test_power_law(enough: tuple[list[int], int, int], exponent: float, seed: int) -> None:
    labels, n, min_rows = enough
    pool = _pool(labels)
    clients = partition.power_law(pool, n, exponent, min_rows, seed)
    _assert_every_row_once(clients, pool)
    sizes = clients.sizes
    weight = torch.arange(1, n + 1, dtype=torch.float64) ** -exponent
    ideal = weight / weight.sum() * (len(labels) - n * min_rows)
    rounded_up = sizes - min_rows - ideal.floor()
    assert set(rounded_up.tolist()) <= {0.0, 1.0}
    remainders = (ideal - ideal.floor())[rounded_up.argsort(descending=True, stable=True)]
    raised = int(rounded_up.sum())
    assert raised == 0 or raised == n or remainders[:raised].min() >= remainders[raised:].max()
    assert _same(clients, partition.power_law(pool, n, exponent, min_rows, seed))


@pytest.mark.parametrize(
    "split",
    [
        lambda pool, seed: partition.dirichlet(pool, 5, 0.5, seed=seed),
        lambda pool, seed: partition.classes_per_client(pool, 5, 2, seed=seed),
        lambda pool, seed: partition.disjoint_classes(pool, [2, 3], seed=seed),
        lambda pool, seed: partition.permuted_labels(pool, [2, 3], seed=seed),
        lambda pool, seed: partition.power_law(pool, 5, 1.0, seed=seed),
    ],
)
def test_the_seed_matters(split: Callable[[Pool, int], Clients]) -> None:
    pool = _balanced(6, 20)
    assert _same(split(pool, 1), split(pool, 1))
    assert not _same(split(pool, 1), split(pool, 2))


def test_dirichlet_favours_nobody() -> None:
    """Small classes are rounded to whole rows; over many of them every client gets as many."""
    pool, n = _balanced(20, 10), 5
    rows = [[len(y) for y in partition.dirichlet(pool, n, 1.0, seed=seed).ys] for seed in range(30)]
    assert torch.allclose(torch.tensor(rows).double().mean(0), torch.tensor(40.0).double(), atol=5)


def test_dirichlet_shares_have_the_right_spread() -> None:
    """A share has mean 1/n and variance (n - 1) / (n^2 (n alpha + 1))."""
    classes, each, n = 300, 100, 4
    for alpha in (0.1, 1.0, 10.0):
        clients = partition.dirichlet(_balanced(classes, each), n, alpha, seed=5)
        shares = torch.stack([y.bincount(minlength=classes) for y in clients.ys]).double() / each
        expected = (n - 1) / (n**2 * (n * alpha + 1))
        assert float(shares.mean()) == pytest.approx(1 / n)
        assert float(shares.var(unbiased=False)) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("alpha", [0.05, 0.7, 3.0, 100.0])
def test_gamma_draws(alpha: float) -> None:
    draws = row_shares.log_gamma_draws(key(9, "test", torch.arange(100)), 500, alpha)
    value, count = draws.exp(), draws.numel()
    assert float(value.mean()) == pytest.approx(alpha, abs=5 * (alpha / count) ** 0.5)
    assert float(value.var()) == pytest.approx(alpha, rel=5 * ((2 + 6 / alpha) / count) ** 0.5)
    assert float(draws.mean()) == pytest.approx(float(torch.digamma(torch.tensor(alpha).double())), rel=0.03)


@thorough
@given(caps=st.lists(st.integers(0, 12), min_size=1, max_size=9), data=st.data())
def test_level_is_the_most_even_filling(caps: list[int], data: st.DataObject) -> None:
    total = data.draw(st.integers(0, sum(caps)))
    level = row_shares.level(torch.tensor(caps), total).tolist()
    assert sum(level) == total and all(0 <= one <= cap for one, cap in zip(level, caps, strict=True))
    below_cap = [one for one, cap in zip(level, caps, strict=True) if one < cap]
    assert not below_cap or max(level) - min(below_cap) <= 1


@pytest.mark.parametrize(
    ("split", "error", "message"),
    [
        (
            lambda pool: partition.equal_shares(pool, 13),
            DataError,
            "13 clients need 13 rows but the pool has 12",
        ),
        (lambda pool: partition.equal_shares(pool, 0), SettingError, "n=0"),
        (lambda pool: partition.by_column(pool, ["a"]), DataError, "client labels have shape"),
        (lambda pool: partition.dirichlet(pool, 4, 1.0, min_rows=4), DataError, "4 clients need 16 rows"),
        (lambda pool: partition.dirichlet(pool, 4, 0.0), SettingError, "alpha=0.0"),
        (lambda pool: partition.dirichlet(pool, 4, float("nan")), SettingError, "alpha=nan"),
        (lambda pool: partition.classes_per_client(pool, 4, 4), SettingError, "k=4; the pool has 3 classes"),
        (lambda pool: partition.classes_per_client(pool, 2, 1), SettingError, "cannot hold all 3"),
        (
            lambda pool: partition.classes_per_client(pool, 12, 3),
            DataError,
            "12 clients cannot have 3 classes each",
        ),
        (
            lambda pool: partition.disjoint_classes(pool, [1] * 4),
            SettingError,
            "4 clusters cannot own disjoint",
        ),
        (
            lambda pool: partition.disjoint_classes(pool, [5, 1, 1]),
            DataError,
            "cluster 0 drew only 4 rows for its 5",
        ),
        (lambda pool: partition.disjoint_classes(pool, []), SettingError, "cluster_sizes="),
        (lambda pool: partition.permuted_labels(pool, [3, 0]), SettingError, "cluster_sizes="),
        (lambda pool: partition.permuted_labels(pool, [9, 9]), DataError, "18 clients need 18 rows"),
        (lambda pool: partition.power_law(pool, 3, -1.0), SettingError, "exponent=-1.0"),
        (lambda pool: partition.dirichlet(Pool(pool.x, pool.x[:, 0]), 2, 1.0), DataError, "goes by class"),
    ],
)
def test_impossible_requests(
    split: Callable[[Pool], Clients], error: type[CoterieError], message: str
) -> None:
    with pytest.raises(error, match=message):
        split(_balanced(3, 4))

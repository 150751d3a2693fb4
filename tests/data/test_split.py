"""The split is a partition, a function of a client's own coordinates, and always leaves a row to train on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.data.split import Split, split_rows

Fractions = tuple[float, float, float]
sizes_of_clients = st.lists(st.integers(1, 40), min_size=1, max_size=12)
seeds = st.integers(0, 2**31)


@st.composite
def fractions(draw: st.DrawFn) -> Fractions:
    shares = draw(st.tuples(*[st.integers(0, 10)] * 3).filter(lambda numbers: sum(numbers) > 0))
    train, validation = shares[0] / sum(shares), shares[1] / sum(shares)
    return train, validation, max(0.0, 1 - train - validation)


def parts(split: Split, client: int) -> list[Tensor]:
    return [part.rows(client) for part in (split.train, split.validation, split.test)]


@settings(max_examples=100)
@given(sizes_of_clients, fractions(), seeds)
def test_partition_and_train_never_empty(sizes: list[int], shares: Fractions, seed: int) -> None:
    split = split_rows(torch.tensor(sizes), shares, seed)
    together = torch.cat([split.train.order, split.validation.order, split.test.order])
    assert sorted(together.tolist()) == list(range(sum(sizes)))
    first = 0
    for client, size in enumerate(sizes):
        mine = torch.cat(parts(split, client)).tolist()
        assert sorted(mine) == list(range(first, first + size))
        assert len(split.train.rows(client)) >= 1
        first += size


@settings(max_examples=100)
@given(sizes_of_clients, fractions(), seeds)
def test_counts(sizes: list[int], shares: Fractions, seed: int) -> None:
    split = split_rows(torch.tensor(sizes), shares, seed)
    for client, size in enumerate(sizes):
        test = min(round(shares[2] * size), size - 1)
        validation = min(round(shares[1] * size), size - 1 - test)
        assert [len(rows) for rows in parts(split, client)] == [size - test - validation, validation, test]


@settings(max_examples=100)
@given(sizes_of_clients, sizes_of_clients, fractions(), seeds)
def test_deterministic_and_independent_of_other_clients(
    sizes: list[int], others: list[int], shares: Fractions, seed: int
) -> None:
    """The last client of `sizes` is cut alike whoever comes before and after, given its index."""
    client = len(sizes) - 1
    changed = [*(size + 1 for size in sizes[:-1]), sizes[-1], *others]
    one = split_rows(torch.tensor(sizes), shares, seed)
    two = split_rows(torch.tensor(changed), shares, seed)
    for mine, same in zip(parts(one, client), parts(two, client), strict=True):
        assert torch.equal(mine - sum(sizes[:-1]), same - sum(changed[:client]))


def test_test_rows_do_not_depend_on_the_validation_fraction() -> None:
    sizes = torch.tensor([10, 25])
    few, many = split_rows(sizes, (0.7, 0.1, 0.2), 3), split_rows(sizes, (0.4, 0.4, 0.2), 3)
    assert torch.equal(few.test.order, many.test.order)


def test_everything_to_train_keeps_the_order_of_rows() -> None:
    split = split_rows(torch.tensor([3, 4]), (1.0, 0.0, 0.0), 0)
    assert split.train.order.tolist() == list(range(7))
    assert split.test.size.tolist() == split.validation.size.tolist() == [0, 0]


def test_seed_matters_and_one_row_trains() -> None:
    sizes = torch.tensor([50, 1])
    one, two = split_rows(sizes, (0.5, 0.2, 0.3), 1), split_rows(sizes, (0.5, 0.2, 0.3), 2)
    assert not torch.equal(one.test.order, two.test.order)
    assert [len(rows) for rows in parts(one, 1)] == [1, 0, 0]
    assert [len(rows) for rows in parts(split_rows(sizes, (0.0, 0.0, 1.0), 1), 1)] == [1, 0, 0]


def test_rows_are_drawn_evenly() -> None:
    split = split_rows(torch.full((20_000,), 10), (0.6, 0.2, 0.2), 7)
    share = torch.bincount(split.test.order % 10, minlength=10) / 20_000
    assert torch.allclose(share, torch.tensor(0.2), atol=0.02)


def test_a_large_federation_is_split_exactly() -> None:
    split = split_rows(torch.full((100_000,), 20), (0.6, 0.2, 0.2), 0)
    assert split.train.size.sum() == 1_200_000


@pytest.mark.parametrize(
    ("wrong", "said"),
    [((0.5, 0.2, 0.2), "add up to 0.9"), ((1.2, -0.1, -0.1), "from 0 to 1"), ((0.5, 0.5), "three numbers")],
)
def test_wrong_fractions(wrong: Fractions, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        split_rows(torch.tensor([5]), wrong, 0)

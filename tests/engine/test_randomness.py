import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie._core import randomness


def test_key_is_the_published_splitmix64_sequence():
    """Folding 0, 1, ... into 0 walks SplitMix64 with seed 0, whose first outputs are known."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    slots = [int(value) % 2**64 for value in randomness.slots(torch.tensor(0), 3)]
    assert slots == expected


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=5), st.text(max_size=5))
def test_numbers_and_tensors_give_the_same_key(coordinates, purpose):
    plain = randomness.key(purpose, *coordinates)
    assert int(randomness.key(purpose, *[torch.tensor(value) for value in coordinates])) == int(plain)
    mixed = randomness.key(purpose, *coordinates[:-1], torch.tensor([coordinates[-1], 5]))
    assert int(mixed[0]) == int(plain)


def test_every_coordinate_matters():
    keys = {int(randomness.key(*c)) for c in [(0, 1), (1, 0), (0, 1, 0), (0,), ("a", 1), ("b", 1)]}
    assert len(keys) == 6


def test_draws_do_not_depend_on_who_else_is_there():
    all_keys = randomness.key(3, "batch", torch.arange(100))
    some = torch.tensor([7, 50])
    assert torch.equal(
        randomness.slots(all_keys, 4)[some], randomness.slots(randomness.key(3, "batch", some), 4)
    )


def test_uniform_and_normal_have_their_moments():
    keys = randomness.slots(randomness.key(1, "moments"), 400_000)
    u, z = randomness.uniform(keys), randomness.normal(keys)
    assert abs(float(u.mean()) - 0.5) < 2e-3 and abs(float(u.var()) - 1 / 12) < 1e-3
    assert 0 <= float(u.min()) and float(u.max()) < 1
    assert (
        abs(float(z.mean())) < 6e-3
        and abs(float(z.var()) - 1) < 1e-2
        and abs(float((z**4).mean()) - 3) < 0.06
    )
    assert abs(float((u[1:] * u[:-1]).mean()) - 0.25) < 2e-3


def test_integers_are_uniform():
    counts = torch.bincount(randomness.integers(randomness.slots(randomness.key(2, "int"), 70_000), 7))
    assert len(counts) == 7 and float((counts - 10_000).abs().max()) < 500


@given(st.integers(1, 3000), st.floats(0, 1), st.integers(0, 10))
def test_choose_gives_different_sorted_numbers_in_range(n, share, seed):
    count = max(1, int(share * n))
    chosen = randomness.choose(randomness.key(seed, "choose"), n, count)
    assert len(chosen) == count == len(chosen.unique())
    assert int(chosen.min()) >= 0 and int(chosen.max()) < n and torch.equal(chosen, chosen.sort().values)


def test_choose_is_fair_to_numbers_and_to_pairs():
    n, count, trials = 11, 3, 3000
    hits, pairs = torch.zeros(n), torch.zeros(n, n)
    for t in range(trials):
        chosen = randomness.choose(randomness.key(0, "fair", t), n, count)
        hits[chosen] += 1
        pairs[chosen.unsqueeze(1), chosen] += 1
    assert float((hits / trials - count / n).abs().max()) < 0.03
    off = pairs[~torch.eye(n, dtype=torch.bool)] / trials
    assert float((off - count * (count - 1) / (n * (n - 1))).abs().max()) < 0.02


def test_permutation_holds_every_number_once():
    order = randomness.permutation(randomness.key(4, "order"), 50)
    assert torch.equal(order.sort().values, torch.arange(50)) and not torch.equal(order, torch.arange(50))


@pytest.mark.parametrize("value", [-1, 2**62, 2**63 - 1])
def test_large_and_negative_coordinates_wrap(value):
    assert int(randomness.key(value)) == int(randomness.key(torch.tensor(value)))


def test_a_number_is_the_uniform_draw_of_its_key():
    for t in (0, 1, 7, 50_000):
        drawn = randomness.number(3, "coin", t, 2)
        assert drawn == float(randomness.uniform(randomness.key(3, "coin", t, 2)))
        assert 0.0 <= drawn < 1.0

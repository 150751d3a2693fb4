import pytest
import torch

from coterie._core import randomness
from coterie.conformance import federation
from coterie.engine import server_draws
from coterie.engine.server_draws import ServerDraws


@pytest.mark.parametrize(("n", "count"), [(1000, 20), (11, 3), (5, 5), (9000, 3000)])
def test_cohorts_of_many_rounds_are_those_of_each(n, count):
    drawn = ServerDraws(3)
    for t in (0, 1, 2, 101, 102, 103, 5000):
        alone = randomness.choose(randomness.key(3, "sample", t), n, count)
        assert torch.equal(drawn.cohort(t, n, count), alone)
    changed = drawn.cohort(1, n, count)
    changed += 1
    assert torch.equal(drawn.cohort(1, n, count), changed - 1), "what is kept is not given away"


def test_draws_of_coming_rounds_are_those_of_each_round(monkeypatch):
    monkeypatch.setattr(server_draws, "NUMBERS", 40)

    def alone(purpose, t, count):
        return randomness.uniform(randomness.slots(randomness.key(7, purpose, t), count))

    ahead = ServerDraws(7)
    for t in [1, 2, 3, 4, 5, 6, 7, 3, 4, 9, 10, 11]:
        for purpose, count in [("pairs", 10), ("pairs", 12), ("coins", 10), ("many", 30), ("none", 0)]:
            drawn = ahead.uniform(purpose, t, count)
            assert torch.equal(drawn, alone(purpose, t, count))
            drawn.zero_()  # what a caller does with its draws is its own affair


@pytest.mark.parametrize(("share", "count"), [(0.01, 1), (0.3, 2), (0.34, 2), (0.9, 5)])
def test_a_cohort_is_the_nearest_whole_number_of_clients(share, count):
    fed = federation((4,) * 6)
    drawn = fed.sample(1, share)
    assert len(drawn) == len(set(drawn.tolist())) == count and fed.sample(1, 1.0) is None

"""CoBo with clients that join and leave."""

import dataclasses

import pytest
import torch

from coterie.algorithms.cobo import PRINTED, CoBo
from coterie.experiments.cobo_quadratic import block_weights, bowls, centres, curvatures, trajectory


def error(fed, models):
    return float((models - centres(fed)).square().sum(-1).mean())


def scheduled(here, **settings):
    @dataclasses.dataclass(frozen=True)
    class Scheduled(CoBo):
        def present(self, fed, t):
            return torch.tensor(here(t))

    return Scheduled(lr=0.05, rho=0.5, gamma=0.05, **{**PRINTED, "sampling": "all"}, batch=0, **settings)


@pytest.mark.slow
def test_a_newcomer_starts_from_its_collaborators_weighted():
    fed = bowls((4, 4))
    early = [0, 1, 2, 4, 5, 6]
    method = scheduled(lambda t: early if t <= 300 else list(range(8)))
    states = list(trajectory(fed, method, 900))
    waiting = states[300]
    known = waiting.weights[3] * torch.tensor([k in early for k in range(8)])
    torch.testing.assert_close(waiting.models[3], known @ waiting.models / known.sum())
    assert states[300].joined == 6 and states[301].joined == 8
    assert error(fed, states[-1].models) < 1e-8
    assert torch.equal(states[-1].weights, block_weights(fed))


@pytest.mark.slow
def test_who_leaves_finds_its_row_and_model_again():
    fed = bowls((4, 4))
    method = scheduled(lambda t: list(range(8)) if not 100 < t <= 400 else list(range(7)))
    states = list(trajectory(fed, method, 600))
    assert torch.equal(states[400].weights[7], states[100].weights[7])
    assert torch.equal(states[400].models[7], states[100].models[7])
    assert not torch.equal(states[401].models[7], states[400].models[7])
    assert error(fed, states[600].models) < 1e-8


def test_the_model_of_an_absent_client_pulls_for_as_long_as_patience_says():
    fed = bowls((2,))
    a = curvatures(fed)[0]
    for patience, pulled in ((0, 0), (3, 3)):
        method = scheduled(lambda t: [0, 1] if t <= 2 else [0], patience=patience)
        states = list(trajectory(fed, method, 8))
        count = 0
        for t in range(3, 9):
            alone = states[t - 1].models[0] - 0.05 * a * (states[t - 1].models[0] - centres(fed)[0])
            count += not torch.allclose(states[t].models[0], alone, rtol=0, atol=1e-12)
        assert count == pulled


@pytest.mark.slow
def test_a_third_of_the_clients_a_round_still_finds_the_clusters():
    fed = bowls((5, 5), seed=4)
    *_, last = trajectory(
        fed,
        CoBo(lr=0.05, rho=0.5, gamma=0.05, **{**PRINTED, "sampling": "all"}, participation=0.3, batch=0),
        1800,
    )
    assert torch.equal(last.weights, block_weights(fed)) and error(fed, last.models) < 1e-12

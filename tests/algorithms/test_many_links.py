"""CoBo among more than 300 clients: who is linked, how strongly, and that nobody is worse off than alone."""

from __future__ import annotations

import pytest
import torch

from coterie import Federation, fit, models
from coterie.algorithms import make
from coterie.models.metrics import find
from coterie.theory.sparse_links import best_pulls

ROWS, D, NOISE = 20, 6, 0.5


def network_errors(members: int, gap: float, rows: int) -> tuple[float, float]:
    """Return the errors on fresh rows of CoBo and of training alone, 320 clients with small networks."""
    draw = torch.Generator().manual_seed(5)
    n, d = 320, 4
    centres = gap * NOISE * (d / rows) ** 0.5 * torch.randn(n // members, d, generator=draw) / (2 * d) ** 0.5
    truth = (centres + torch.randn(d, generator=draw))[torch.arange(n) // members].unsqueeze(-1)

    def part(count: int, noise: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        x = torch.randn(n, count, d, generator=draw)
        score = (x @ truth).squeeze(-1)
        return list(x), list(torch.tanh(score) + 0.5 * score + noise * torch.randn(n, count, generator=draw))

    fed = Federation.from_arrays(*part(rows, NOISE), models.mlp(hidden=(8,)))
    fresh = Federation.from_arrays(*part(60, 0.0), fed.model)
    runs = [fit(fed, name, rounds=30, evaluate_every=0) for name in ("cobo", "local")]
    mine, own = (float(fresh.score(run.personal, "train", [find("rmse")])["rmse"].mean()) for run in runs)
    return mine, own


def errors(
    members: int, gap: float, inside: float = 0.0, n: int = 600, rows: int = ROWS, **options: float
) -> tuple[float, float]:
    """Return the mean errors of CoBo and of least squares on a client's own rows; gaps are in spreads of fits."""
    draw = torch.Generator().manual_seed(7)
    spread = NOISE * (D / max(1, rows - D - 1)) ** 0.5
    centres = torch.randn(n // members, D, generator=draw) * gap * spread / (2 * D) ** 0.5
    truth = centres[torch.arange(n) // members]
    truth = truth + inside * spread / D**0.5 * torch.randn(n, D, generator=draw)
    x = torch.randn(n * rows, D, generator=draw)
    y = (x.view(n, rows, D) @ truth.unsqueeze(-1)).flatten() + NOISE * torch.randn(n * rows, generator=draw)
    names = [str(k) for k in range(n)]
    fed = Federation.from_rows(x, y, torch.full((n,), rows), model=models.linear(), names=names)
    run = fit(fed, make("cobo", **options), rounds=25, evaluate_every=0)
    alone = torch.linalg.lstsq(x.view(n, rows, D), y.view(n, rows, 1)).solution.squeeze(-1)
    mine, own = ((found.float() - truth).norm(dim=1).mean() for found in (run.personal, alone))
    return float(mine), float(own)


@pytest.mark.parametrize(
    ("members", "gap", "inside", "most"),
    [
        (1, 5.0, 0.0, 1.02),
        (4, 6.0, 0.0, 0.95),
        (20, 4.0, 0.0, 0.8),
        (600, 0.0, 0.0, 0.15),
        (600, 0.0, 1.0, 0.8),
    ],
)
def test_nobody_is_worse_off_than_alone(members: int, gap: float, inside: float, most: float) -> None:
    """Clients that are all different have neighbours too; the pull towards them is weak."""
    mine, own = errors(members, gap, inside)
    assert mine < most * own


@pytest.mark.parametrize(("members", "most"), [(1, 1.02), (10, 1.02), (600, 0.1)])
def test_few_rows_harm_nobody(members: int, most: float) -> None:
    """Five rows for six parameters: nobody's fit says much, and strangers' gradients at one point look alike."""
    mine, own = errors(members, 12.0, rows=5)
    assert mine < most * own


def test_clients_that_come_later_are_held_to_their_own_fits_too() -> None:
    mine, _ = errors(1, 12.0, rows=5, participation=0.5)
    unlinked, _ = errors(1, 12.0, rows=5, participation=0.5, rho=1e-9)
    assert mine < 1.02 * unlinked


@pytest.mark.parametrize(
    ("members", "gap", "most"),
    [(1, 20.0, 1.02), pytest.param(10, 20.0, 1.02, marks=pytest.mark.slow), (320, 0.0, 0.8)],
)
def test_networks_of_many_strangers_are_left_alone(members: int, gap: float, most: float) -> None:
    mine, own = network_errors(members, gap, rows=40)
    assert mine < most * own


def test_links_of_several_searches_pull_no_more_than_those_of_one() -> None:
    """Half of the clients are called in a round, so that links are found in several searches; their pulls add up."""
    mine, _ = errors(4, 6.0, participation=0.5)
    unlinked, _ = errors(4, 6.0, participation=0.5, rho=1e-9)
    assert mine < 1.02 * unlinked


def test_pulls_of_pairs_count_the_noise_that_is_left() -> None:
    """Two points of one distribution are as far from their mean as half of their noise explains."""
    draw = torch.Generator().manual_seed(1)
    pairs, d = 400, 8
    links = torch.arange(2 * pairs).view(pairs, 2).T
    for wide, expected in ((1.0, torch.inf), (9.0, 1 / (9 - 1 - 2 * (2 / d) ** 0.5))):
        points = wide**0.5 * torch.randn(2 * pairs, d, generator=draw)
        found = best_pulls(points, torch.full((2 * pairs,), float(d)), links, prox=1e3, dimensions=d)
        assert float(found.median()) == pytest.approx(expected, rel=0.2)


def test_pulls_are_those_of_a_normal_hierarchy_where_members_differ() -> None:
    """All are linked: what moves a point is its distance from the mean, R times what its noise explains."""
    draw = torch.Generator().manual_seed(0)
    n, d = 60, 8
    links = torch.triu_indices(n, n, 1)
    noise = torch.full((n,), float(d))
    for wide, expected in ((1.0, torch.inf), (9.0, 1 / 8)):
        points = wide**0.5 * torch.randn(n, d, generator=draw)
        found = best_pulls(points, noise, links, prox=10.0, dimensions=d)
        assert found.isinf().all() if wide == 1 else torch.allclose(found, torch.tensor(expected), rtol=0.15)

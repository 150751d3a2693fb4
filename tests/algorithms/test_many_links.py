"""CoBo among more than 300 clients: who is linked, how strongly, and that nobody is worse off than alone."""

from __future__ import annotations

import pytest
import torch

from coterie import Federation, fit, models
from coterie.algorithms import make
from coterie.theory.sparse_links import best_pulls

ROWS, D, NOISE = 20, 6, 0.5


def errors(
    members: int, gap: float, inside: float = 0.0, n: int = 600, **options: float
) -> tuple[float, float]:
    """Return the mean errors of CoBo and of least squares on a client's own rows; gaps are in spreads of fits."""
    draw = torch.Generator().manual_seed(7)
    spread = NOISE * (D / (ROWS - D - 1)) ** 0.5
    centres = torch.randn(n // members, D, generator=draw) * gap * spread / (2 * D) ** 0.5
    truth = centres[torch.arange(n) // members]
    truth = truth + inside * spread / D**0.5 * torch.randn(n, D, generator=draw)
    x = torch.randn(n * ROWS, D, generator=draw)
    y = (x.view(n, ROWS, D) @ truth.unsqueeze(-1)).flatten() + NOISE * torch.randn(n * ROWS, generator=draw)
    names = [str(k) for k in range(n)]
    fed = Federation.from_rows(x, y, torch.full((n,), ROWS), model=models.linear(), names=names)
    run = fit(fed, make("cobo", **options), rounds=25, evaluate_every=0)
    alone = torch.linalg.lstsq(x.view(n, ROWS, D), y.view(n, ROWS, 1)).solution.squeeze(-1)
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


def test_links_of_several_searches_pull_no_more_than_those_of_one() -> None:
    """Half of the clients are called in a round, so that links are found in several searches; their pulls add up."""
    mine, _ = errors(4, 6.0, participation=0.5)
    unlinked, _ = errors(4, 6.0, participation=0.5, rho=1e-9)
    assert mine < 1.02 * unlinked


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

"""Tests of pairs and groups of gradients: sizes by simulation, units, and clients that claim to know nothing."""

import pytest
import torch

from coterie.models.blocks import mean_and_noise
from coterie.theory.pair_tests import bar, closeness, evidence, halves, shared_noise, spread


def least_squares(w, x, y, weight):
    residual = (x @ w.unsqueeze(-1)).squeeze(-1) - y
    return ((weight * residual).unsqueeze(-2) @ x).squeeze(-2)


def clients(count, rows, d, seed, centres=None, noise=0.5):
    draw = torch.Generator().manual_seed(seed)
    theta = torch.zeros(count, d, dtype=torch.float64) if centres is None else centres
    x = torch.randn(count, rows, d, generator=draw, dtype=torch.float64)
    y = (x @ theta.unsqueeze(-1)).squeeze(-1) + noise * torch.randn(
        count, rows, generator=draw, dtype=torch.float64
    )
    weight = torch.full((count, rows), 1 / rows, dtype=torch.float64)
    return x, y, weight


def test_noise_is_the_variance_of_the_gradient():
    """Over many draws of the rows: E |g - E g|^2 and (tr C)^2 / tr C^2 of its covariance C."""
    x, y, weight = clients(4000, 24, 3, seed=0)
    w = torch.full((4000, 3), 0.2, dtype=torch.float64)
    grad, noise, dimensions = mean_and_noise(least_squares, w, x, y, weight)
    torch.testing.assert_close(grad, least_squares(w, x, y, weight))
    covariance = torch.cov(grad.T)
    assert float(noise.mean()) == pytest.approx(float(covariance.trace()), rel=0.05)
    filled = float(covariance.trace() ** 2 / (covariance @ covariance).trace())
    assert float(dimensions.median()) == pytest.approx(filled, rel=0.35)


def test_noise_with_padding_few_rows_and_one_row():
    x, y, _ = clients(3, 9, 2, seed=1)
    rows = torch.tensor([9, 3, 1])
    weight = (torch.arange(9) < rows.unsqueeze(1)).double() / rows.unsqueeze(1)
    w = torch.ones(3, 2, dtype=torch.float64)
    grad, noise, _ = mean_and_noise(least_squares, w, x, y, weight)
    torch.testing.assert_close(grad, least_squares(w, x, y, weight))
    each = torch.stack(
        [least_squares(w[1], x[1, k : k + 1], y[1, k : k + 1], torch.ones(1)) for k in range(3)]
    )
    expected = (each - each.mean(0)).square().sum() / 6
    torch.testing.assert_close(noise[1, 0], expected.double())
    torch.testing.assert_close(noise[2, 0], grad[2].square().sum())


@pytest.mark.parametrize(("count", "rows", "d"), [(12, 10, 4), (6, 30, 5), (12, 40, 50)])
def test_clients_of_one_distribution_are_rarely_cut(count, rows, d):
    cut = 0
    for seed in range(40):
        x, y, weight = clients(count, rows, d, seed)
        g, v, q = mean_and_noise(least_squares, torch.zeros(count, d, dtype=torch.float64), x, y, weight)
        cut += int(halves(g, v, torch.full((count, 1), float(rows)), q)[0].max())
    assert cut <= 2


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_two_clusters_four_spreads_apart_are_cut_in_any_unit(unit):
    right = 0
    for seed in range(20):
        centres = torch.zeros(18, 5, dtype=torch.float64)
        centres[12:, 0] = 4 * 0.5 * (5 / 15) ** 0.5
        x, y, weight = clients(18, 15, 5, seed, centres)
        g, v, q = mean_and_noise(least_squares, centres[0].repeat(18, 1), x, unit * y, weight)
        found, _ = halves(g, v, torch.full((18, 1), 15.0), q)
        right += bool((found == (torch.arange(18) >= 12)).all())
    assert right >= 16


def test_who_claims_endless_noise_agrees_with_nobody():
    rows = torch.tensor(10.0)
    honest, liar = torch.tensor(1.0), torch.tensor(1e30)
    assert float(shared_noise(honest, rows, liar, rows)) == 2.0
    assert float(evidence(torch.tensor(100.0), shared_noise(honest, rows, liar, rows))) < 0
    assert float(shared_noise(honest, rows, torch.tensor(-5.0), rows)) == 0.0
    few, many = torch.tensor(10.0), torch.tensor(40.0)  # one variance of a row, 8 or 20, behind both means
    assert float(shared_noise(torch.tensor(0.8), few, torch.tensor(0.5), many)) == pytest.approx(
        8 * (1 / 10 + 1 / 40)
    )


def test_the_bar_never_falls_below_where_pooling_pays_and_rises_with_choice():
    assert 2.0 <= bar(1e9) < 2.6 and bar(3.0, 40) > bar(3.0, 10) > bar(50.0, 10) >= 2.0


def test_closeness_is_the_ratio_of_variances():
    """Clients whose optima vary three times as much as their gradients' noise: 1/(R - 1) is near a third."""
    draw = torch.Generator().manual_seed(0)
    grads = 2 * torch.randn(4000, 6, generator=draw, dtype=torch.float64)
    one = torch.ones(4000, 1, dtype=torch.float64)
    assert closeness(spread(grads, 6 * one, one), 4000, 6.0) == pytest.approx(1 / 3, rel=0.1)


def test_the_spread_of_a_pair_is_its_distance_in_units_of_both_noises():
    """|g - h|^2 / (v + w) for equal rows: neither the quieter nor the noisier client alone is the unit."""
    grads, rows = torch.tensor([[0.0, 0.0], [3.0, 4.0]]).double(), torch.full((2, 1), 7.0).double()
    assert spread(grads, torch.tensor([[1.0], [4.0]]).double(), rows) == pytest.approx(25 / (1 + 4))

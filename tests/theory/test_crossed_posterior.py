"""Uncertainty of crossed effects against the dense joint posterior, and of rows."""

import numpy as np
import torch

from coterie.theory.crossed import CellSums, Crossed
from coterie.theory.crossed_posterior import CrossedPosterior


def world(seed=0):
    """Five clients with an intercept and a slope that vary, six and three levels of two factors."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(5), [3, 8, 5, 9, 6])
    x = np.column_stack([rng.normal(size=len(owner)), np.ones(len(owner))])
    first, second = rng.integers(0, 6, len(owner)), rng.integers(0, 3, len(owner))
    return owner, x, first, second, rng.normal(size=len(owner))


def sums_of(owner, x, first, second, y):
    pick = [owner == k for k in range(5)]
    return CellSums.of(
        [torch.from_numpy(x[k]) for k in pick],
        [torch.from_numpy(y[k]) for k in pick],
        [torch.from_numpy(np.column_stack([first[k], 6 + second[k]])) for k in pick],
        sizes=(6, 3),
    )


def test_everything_is_that_of_the_dense_joint_posterior():
    """Precision of (common, client effects, levels) at known variances, flat in the common coefficients."""
    owner, x, first, second, y = world()
    noise, slope, intercept, a, b = 0.7, 0.5, 1.5, 0.9, 0.4
    own = np.zeros((len(owner), 10))
    own[np.arange(len(owner))[:, None], 2 * owner[:, None] + [0, 1]] = x
    design = np.hstack([x, own, np.eye(6)[first], np.eye(3)[second]])
    prior = np.concatenate([np.zeros(2), np.tile([1 / slope, 1 / intercept], 5), [1 / a] * 6, [1 / b] * 3])
    cover = np.linalg.inv(design.T @ design / noise + np.diag(prior))
    mean = cover @ design.T @ y / noise
    model = Crossed(sums_of(owner, x, first, second, y), torch.tensor([0, 1]), ("f", "s"))
    values = torch.tensor([noise, slope, intercept, a, b], dtype=torch.float64)
    found = CrossedPosterior(model, values, torch.zeros(5, 5, dtype=torch.float64))
    errors = found.client_errors()
    for i in range(5):
        lever = np.zeros((2, len(mean)))
        lever[[0, 1], [0, 1]] = lever[[0, 1], [2 + 2 * i, 3 + 2 * i]] = 1
        assert np.abs(found.clients[i].numpy() - lever @ mean).max() < 1e-9
        assert np.abs(errors[i].numpy() - np.sqrt(np.diag(lever @ cover @ lever.T))).max() < 1e-9
    assert np.abs(found.levels.numpy() - mean[12:]).max() < 1e-9
    assert np.abs(found.level_errors().numpy() - np.sqrt(np.diag(cover)[12:])).max() < 1e-9
    row = np.concatenate([x[4], np.zeros(10), np.eye(6)[2], np.eye(3)[1]])
    row[4:6] = x[4]  # of client 1
    z = torch.tensor([[*np.eye(6)[2], *np.eye(3)[1]]])
    error = found.row_error(1, torch.from_numpy(x[4:5]), z)
    assert abs(float(error) - np.sqrt(row @ cover @ row)) < 1e-9


def test_estimated_variances_widen_by_the_first_order_term():
    """The derivative of the effects in the log variances, by fitting again at other variances."""
    owner, x, first, second, y = world(1)
    model = Crossed(sums_of(owner, x, first, second, y), torch.tensor([-1, 0]), ("f", "s"))
    values = torch.tensor([1.0, 0.5, 0.8, 0.3], dtype=torch.float64)
    doubt = torch.zeros(4, 4, dtype=torch.float64)
    doubt[2, 2] = 0.09
    known = CrossedPosterior(model, values, torch.zeros_like(doubt))
    found = CrossedPosterior(model, values, doubt)
    moved = [
        CrossedPosterior(model, values * torch.tensor([1, 1, f, 1]), doubt).levels for f in (1.001, 0.999)
    ]
    slope = (moved[0] - moved[1]) / (np.log(1.001) - np.log(0.999))
    expected = (known.level_errors().square() + 0.09 * slope.square()).sqrt()
    assert (found.level_errors() - expected).abs().max() < 1e-6

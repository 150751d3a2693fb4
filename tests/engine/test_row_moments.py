"""Noisy sums of squares and products of rows: how much one row changes them, and what noise does to residuals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import coterie
from coterie import models
from coterie.engine import accounting
from coterie.engine.noise import Noise
from coterie.engine.privacy import BudgetSpent, Privacy
from coterie.engine.row_privacy import RowPrivacy, clipped_gram
from coterie.select.survey import Survey
from coterie.select.survey_rows import blurred
from coterie.theory import held_out
from coterie.train.private import row_privacy


def as_vector(gram):
    """The entries on the diagonal, and each pair off it once, times sqrt(2): noise of one size hides them all."""
    row, column = torch.triu_indices(len(gram), len(gram), 1)
    return torch.cat([gram.diagonal(), math.sqrt(2) * gram[row, column]])


@pytest.mark.parametrize("size", [0.1, 1.0, 100.0])
def test_one_row_changes_the_sums_by_the_bound_at_most(size):
    """Every row of many tables is left out in turn; rows at the bound reach it."""
    draw, most = torch.Generator().manual_seed(0), 0.0
    for width in (2, 5, 9):
        bound = math.sqrt(2 * width)
        for _ in range(20):
            z = size * torch.randn(12, width, generator=draw, dtype=torch.float64)
            whole = clipped_gram(z, bound)
            for k in range(len(z)):
                without = clipped_gram(torch.cat([z[:k], z[k + 1 :]]), bound)
                change = float(as_vector(whole - without).norm()) / bound**2
                assert change <= 1 + 1e-12
                most = max(most, change)
    assert (most > 1 - 1e-9) == (size > 0.1)


def federation(rows=40, clients=3, d=3):
    draw = torch.Generator().manual_seed(1)
    xs = [torch.randn(rows, d, generator=draw, dtype=torch.float64) for _ in range(clients)]
    ys = [x.sum(1) + torch.randn(rows, generator=draw, dtype=torch.float64) for x in xs]
    return coterie.Federation.from_arrays(xs, ys, models.linear(), dtype=torch.float64)


def moments(fed, privacy, secret):
    """What a survey asks of the rows, with the noise of this key."""
    fed = fed.fresh()
    fed.enter_round(0, None)
    fed.runtime.private = row_privacy(fed, fed.runtime, Survey(), privacy, Noise(secret))
    return fed, fed.map(Survey().moments).values


def test_the_noise_is_that_of_the_accountant():
    fed, privacy = federation(rows=400), Privacy(4.0, 1e-5, "row")
    expected = accounting.noise_for(4.0, 1e-5, 1) * 2 * 4  # C^2 = 2 (d + 1)
    assert accounting.epsilon(accounting.noise_for(4.0, 1e-5, 1), 1, 1e-5) <= 4.0
    drawn = [400 * moments(fed, privacy, k.to_bytes(16, "big"))[1] for k in range(60)]
    spread = torch.stack(drawn).std(0)  # [clients, X'X upper triangle, X'y, y'y]
    diagonal, others = [0, 3, 5, 9], [1, 2, 4, 6, 7, 8]
    assert spread[:, diagonal].mean().item() == pytest.approx(expected, rel=0.12)
    assert spread[:, others].mean().item() == pytest.approx(expected / math.sqrt(2), rel=0.12)


def test_rows_are_read_once():
    fed, _ = moments(federation(), Privacy(4.0, 1e-5, "row"), bytes(16))
    assert isinstance(fed.runtime.private, RowPrivacy) and fed.runtime.private.steps == 1
    assert fed.runtime.private.spent().tolist() == pytest.approx([4.0] * 3, rel=2e-3)
    with pytest.raises(BudgetSpent):
        fed.map(Survey().moments)
    with pytest.raises(Exception, match="asks for"):
        fed.map(Survey().slope, x=torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("centre", [0.0, 1.0])
def test_what_noise_adds_to_squared_residuals_is_taken_off(centre):
    """At any centre: the mean over noise of the explained squares is that without noise, to second order."""
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.normal(size=(500, 4)))
    w = torch.tensor([1.0, -2.0, 0.5, 1.5], dtype=torch.float64)
    y = x @ w + torch.from_numpy(draw.normal(size=500))
    matrix, side, square, tau = x.T @ x, x.T @ y, y @ y, 12.0
    c = centre * torch.ones(4, dtype=torch.float64)

    def explained(a, b, blur):
        along = blurred(torch.tensor([blur], dtype=torch.float64), a, b)
        rest = (square - c @ (2 * b - a @ c)).view(1)
        seen = held_out.profile_of_sums(a, b - a @ c, rest, torch.tensor([500.0]).double(), along)
        return float(seen.square[:4].sum())

    true, plain, mended = explained(matrix, side, 0.0), [], []
    for _ in range(600):
        drawn = tau * torch.from_numpy(draw.normal(size=(5, 5)))
        upper = drawn.triu(1) / math.sqrt(2) + torch.diag(drawn.diagonal())
        noise = upper + upper.triu(1).mT
        a, b = matrix + noise[:4, :4], side + noise[:4, 4]
        first = float((b - matrix @ c - noise[:4, :4] @ c - side + matrix @ c) @ (w - c)) * 2
        first -= float((w - c) @ noise[:4, :4] @ (w - c))  # of first order, with mean zero
        plain.append(explained(a, b, 0.0) - true - first)
        mended.append(explained(a, b, tau**2) - true - first)
    assert np.mean(plain) > 3.0
    assert abs(np.mean(mended)) < 0.15 * np.mean(plain)

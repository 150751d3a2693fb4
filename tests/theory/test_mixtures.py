"""The best mixtures of clients fulfil the conditions of their quadratic program."""

from __future__ import annotations

import pytest
import torch

from coterie.theory.simplex import best_mixtures


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_weight_can_be_moved_to_a_better_place(dtype: torch.dtype) -> None:
    """At the minimum the slope is the same for all weights above zero, and no smaller for the others."""
    draw = torch.Generator().manual_seed(0)
    means = torch.randn(30, 5, generator=draw, dtype=torch.float64).to(dtype)
    variances = torch.rand(30, generator=draw, dtype=torch.float64).to(dtype)
    a, m, v = best_mixtures(means, variances).double(), means.double(), variances.double()
    slope = a @ (m @ m.T + torch.diag(v)) - m @ m.T
    level = (slope * a).sum(1, keepdim=True)
    assert (slope - level).min() > -1e-5
    assert ((slope - level).abs() * (a > 1e-4)).max() < 1e-5
    torch.testing.assert_close(a.sum(1), torch.ones(30, dtype=torch.float64))


def test_the_start_does_not_matter() -> None:
    draw = torch.Generator().manual_seed(1)
    means = torch.randn(12, 4, generator=draw, dtype=torch.float64)
    variances = torch.rand(12, generator=draw, dtype=torch.float64)
    even = torch.full((12, 12), 1 / 12, dtype=torch.float64)
    torch.testing.assert_close(
        best_mixtures(means, variances, start=even), best_mixtures(means, variances), rtol=0, atol=1e-6
    )

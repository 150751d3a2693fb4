"""Probabilities that pairs gain by pooling: against draws from a known mixture, and against their own formula."""

from __future__ import annotations

import pytest
import torch

from coterie.theory.link_confidence import gain_probability


def drawn(scales: torch.Tensor, q: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return |seen|^2/s and |true|^2/s of pairs whose differences have these scales, in units of the noise."""
    generator = torch.Generator().manual_seed(seed)
    true = scales.sqrt().unsqueeze(1) * torch.randn(len(scales), q, generator=generator, dtype=torch.float64)
    seen = true + torch.randn(len(scales), q, generator=generator, dtype=torch.float64)
    return seen.square().mean(1), true.square().mean(1)


@pytest.mark.parametrize("q", [3, 12, 60])
def test_probabilities_are_what_they_say(q: int) -> None:
    generator = torch.Generator().manual_seed(q)
    scales = torch.exp(1.5 * torch.randn(8000, generator=generator, dtype=torch.float64))
    scales[::2] = 0.0
    ratio, true = drawn(scales, q, seed=q)
    found, gains = gain_probability(ratio, q), (true < 1).double()
    for low, high in ((0.0, 0.1), (0.1, 0.4), (0.4, 0.7), (0.7, 0.9), (0.9, 1.01)):
        inside = (found >= low) & (found < high)
        if int(inside.sum()) >= 100:
            assert float(found[inside].mean()) == pytest.approx(float(gains[inside].mean()), abs=0.12)
    assert float(found.mean()) == pytest.approx(float(gains.mean()), abs=0.03)


def test_one_scale_agrees_with_counting() -> None:
    """All pairs differ by scale 1, so that P(D < s | ratio) can be counted among draws with nearly that ratio."""
    ratio, true = drawn(torch.ones(400_000, dtype=torch.float64), 4, seed=0)
    asked = torch.tensor([1.0, 2.0, 3.5], dtype=torch.float64)
    found = gain_probability(torch.cat([asked, ratio[:5000]]), 4)[:3]
    for value, chance in zip(asked, found, strict=True):
        near = (ratio - value).abs() < 0.05
        assert float(chance) == pytest.approx(float((true[near] < 1).double().mean()), abs=0.03)


def test_nearer_pairs_are_surer_and_few_pairs_decide_little() -> None:
    ratio = torch.tensor([0.5, 1.0, 2.0, 4.0, 9.0, 50.0])
    found = gain_probability(ratio, 10.0)
    assert bool((found.diff() <= 1e-12).all()) and found[0] > 0.9 and found[-1] < 1e-6
    assert 0.3 < float(gain_probability(torch.tensor([2.5]), 1.0)) < 0.95
    assert gain_probability(torch.zeros(0), 5.0).shape == (0,)
    assert bool(gain_probability(torch.tensor([1e30, 0.0]), 5.0).isfinite().all())

"""Effects that are integrated out: numbers and derivatives of separate operations, and a brute-force integral."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coterie.theory.elimination import eliminate
from coterie.theory.hierarchical import lift, scaled


def apart(a: Tensor, b: Tensor, spread: Tensor) -> tuple[Tensor, ...]:
    h, g = lift(a, b, spread)
    logarithm = torch.linalg.slogdet(torch.eye(a.shape[-1]).to(a) + scaled(spread, a))[1]
    return logarithm, h, g, (b * scaled(spread, g.unsqueeze(-1)).squeeze(-1)).sum(-1, keepdim=True)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("same", [False, True], ids=["own", "repeated"])
def test_values_and_derivatives_are_those_of_separate_operations(full: bool, same: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(6, 9, 4, generator=generator, dtype=torch.float64)
    root = torch.randn(6, 4, 4, generator=generator, dtype=torch.float64)
    spread = root @ root.mT if full else root[..., 0].square()
    spread[0] = 0.0
    inputs = [rows.mT @ rows, rows[:, 0] - 0.3, spread]
    weights = [torch.randn(6, 1, 1, generator=generator, dtype=torch.float64) for _ in range(4)]
    symmetric = root[1] + root[1].mT

    def slopes(function: object) -> list[Tensor]:
        given = [part.clone().requires_grad_() for part in inputs]
        logarithm, h, g, fit = function(*given)  # type: ignore[operator]
        by_h = (h.sum(0) * symmetric).sum() if same else (h * weights[1] * symmetric).sum()
        total = (logarithm * weights[0].flatten()).sum() + by_h + (g * weights[2][..., 0]).sum()
        found = torch.autograd.grad(total + (fit * weights[3][..., 0]).sum(), given)
        return [part + part.mT if part.dim() == 3 else part for part in found]

    for ours, theirs in zip(eliminate(*inputs), apart(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(slopes(eliminate), slopes(apart), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_it_is_the_integral_over_the_effect() -> None:
    a, b, s, w = 1.7, 0.8, 0.6, 0.3
    t = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    inside = -0.5 * (a * t * t - 2 * b * t) - 0.5 * (t - w) ** 2 / s
    brute = torch.trapezoid(inside.exp(), t) / (2 * torch.pi * s) ** 0.5
    one = torch.ones(1, 1, dtype=torch.float64)
    logarithm, h, g, fit = (part.item() for part in eliminate(a * one[None], b * one, s * one))
    assert -0.5 * (logarithm + h * w * w - 2 * g * w - fit) == pytest.approx(brute.log().item(), abs=1e-10)


def test_infinite_variances_leave_nothing() -> None:
    one = torch.ones(2, 1, dtype=torch.float64)
    spread = torch.tensor([[torch.inf], [1.0]], dtype=torch.float64, requires_grad=True)
    logarithm, h, g, fit = eliminate(one.unsqueeze(-1), one, spread)
    assert torch.isinf(logarithm[0]) and h[0] == 0 and g[0] == 0 and fit[0] == 0
    (h.sum() + g.sum() + logarithm[1]).backward()
    assert spread.grad is not None and torch.isfinite(spread.grad).all()

"""Shared code of hierarchical models: a client's loss as a quadratic, and steps that go downhill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie.engine.client import Client
from coterie.theory.hierarchical import times
from coterie.theory.variance_components import Components


def weight_of(client: Client) -> Tensor | float:
    """Return the factor that turns the model's loss into a sum over rows."""
    return client.size if client.model.reduction == "mean" else 1.0


def quadratic(client: Client, x: Tensor, weight: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """Return A, b, c of the weighted loss around x, in float64."""
    a = client.hessian(x).double()
    grad, value = client.full_grad(x).double(), client.loss(x).double()
    b = times(a, x.double()) - grad
    c = value - (x.double() * (0.5 * times(a, x.double()) - b)).sum(-1, keepdim=True)
    scale: Any = weight.double() if isinstance(weight, Tensor) else weight
    return a * (scale.unsqueeze(-1) if isinstance(scale, Tensor) else scale), b * scale, c * scale


def downhill(objective: Callable[[Tensor], Tensor], x: Tensor, aim: Tensor) -> Tensor:
    """Step from x towards aim, halving the step until the objective does not rise."""
    before, share = objective(x), torch.ones_like(x[..., :1])
    for _ in range(8):
        worse = objective(x + share * (aim - x)) > before + 1e-12 * before.abs()
        if not worse.any():
            break
        share = torch.where(worse, 0.5 * share, share)
    return x + share * (aim - x)


def shortened(step: Tensor, longest: float) -> Tensor:
    """Return steps [..., d] of at most this length, in the same directions."""
    length: Tensor = torch.linalg.vector_norm(step, dim=-1, keepdim=True)
    return step * (longest / length.clamp(min=longest))


def log_volume(a: Tensor) -> Tensor:
    """Return log det A of symmetric A >= 0, [..., 1]; eigenvalues below rounding count as rounding."""
    values: Tensor = torch.linalg.eigvalsh(a)
    least = a.shape[-1] * torch.finfo(values.dtype).eps * values[..., -1:]
    return values.clamp(min=least.clamp(min=torch.finfo(values.dtype).tiny)).log().sum(-1, keepdim=True)


def digits(values: Tensor) -> Tensor:
    """Return variances with six digits, so that machines whose last bits differ give the same."""
    step = 10.0 ** (values.clamp(min=1e-300).log10().floor() - 5)
    return torch.where(values > 0, (values / step).round() * step, 0.0)


def rounded(found: Components) -> Components:
    """Return components with the digits of variances that all machines agree on."""
    noise = float(digits(torch.tensor(found.noise, dtype=torch.float64)))
    noises = None if found.noises is None else digits(found.noises)
    within = found.within if found.within.dim() == 3 else digits(found.within)
    return Components(noise, within, digits(found.between), noises)

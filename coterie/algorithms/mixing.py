"""Helpers of FLIX: reading and choosing the mixing weight, and each client's own minimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import CoterieError, SettingError
from coterie.engine.client import Client
from coterie.models.base import norm

Alpha = float | str | tuple[float, ...]
GRID = 11  # mixtures that `best_alpha` tries: 0, 0.1, ..., 1
CHECK_EVERY = 20  # local steps between checks of the gradient norm


def read_alpha(alpha: Any) -> Alpha:
    """Return a number, a tuple, or 'auto'; text may list one number per client, separated by commas."""
    if isinstance(alpha, str) and alpha != "auto":
        parts = alpha.split(",")
        try:
            values = tuple(float(part) for part in parts)
        except ValueError:
            raise SettingError(
                f"flix: alpha = {alpha!r} is not a number, a list of numbers, or 'auto'"
            ) from None
        return values[0] if len(values) == 1 else read_alpha(values)
    if isinstance(alpha, list | tuple | Tensor):
        values = tuple(float(one) for one in alpha)
        for k, one in enumerate(values):
            if not 0.0 <= one <= 1.0:
                raise SettingError(
                    f"flix: alpha = {one} of client {k} is outside its range: at least 0 and at most 1"
                )
        return values
    return float(alpha) if isinstance(alpha, int) else alpha


def best_alpha(client: Client, mixed: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the alpha whose mixture has the lowest error on validation rows, [..., 1]."""
    tried = torch.linspace(0, 1, GRID).to(x)
    errors = [client.error(mixed(a), split="validation") for a in tried]
    return tried[torch.cat(errors, -1).argmin(-1, keepdim=True)]


def local_minimiser(client: Client, x: Tensor, how: str, tol: float, lr: float, steps: int) -> Tensor:
    """Return the minimiser of the client's loss: "exact" by the model's solver, or by SGD from x."""
    if how == "exact":
        try:
            return client.solve(x, tol)
        except CoterieError as problem:
            remedy = "Or take local='sgd', which stops where the gradient is small or after local_steps."
            raise SettingError(f"flix: {problem} {remedy}") from problem
    active = torch.ones_like(x[..., :1], dtype=torch.bool)
    for step in range(steps):
        if step % CHECK_EVERY == 0:
            active = active & (norm(client.full_grad(x)) > tol)
            if not active.any():
                break
        x = torch.where(active, x - lr * client.grad(x), x)
    return x

"""Mixed precision, and torch.compile with a check that compiled gradients are right."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PRECISIONS = ("full", "bf16")
ROUNDING = 1e-3  # how far compiled gradients may be off, relative to the gradient, at full precision

Gradient = Callable[..., Tensor]
"""(w [d], x [B, ...], y [B], weight [B]) -> number or gradient of one client."""


def computing_in(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which products and convolutions use bfloat16 if asked for; parameters keep their dtype."""
    if precision == "full":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def compiled(function: Callable[..., Tensor], exact: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `function` compiled for each shape, if its gradient is right for the first inputs.

    A gradient is right if its distance to that of `exact`, the function at full precision, is within rounding or at
    most twice that of the uncompiled function. If compilation fails or errs, the uncompiled function is used.
    """
    fast = torch.compile(function, dynamic=False)
    trusted: dict[tuple[Any, ...], bool] = {}

    def call(w: Tensor, *rows: Tensor) -> Tensor:
        shape = (w.dtype, w.device, *(part.shape for part in (w, *rows)))
        if shape not in trusted:
            trusted[shape] = _agree(fast, function, exact, w, *rows)
        return (fast if trusted[shape] else function)(w, *rows)

    return call


def _agree(fast: Gradient, plain: Gradient, exact: Gradient, w: Tensor, *rows: Tensor) -> bool:
    def gradient(function: Gradient) -> Tensor:
        leaf = w.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(function(leaf, *rows), leaf)[0]

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = gradient(fast)
    except Exception as problem:  # a compiler fails in ways of its own
        warnings.warn(f"torch.compile failed and is not used: {first_line(problem)}", stacklevel=4)
        return False
    true = gradient(exact)
    wrong, usual = ((part - true).norm() / true.norm().clamp_min(1e-30) for part in (found, gradient(plain)))
    if not wrong <= max(ROUNDING, 2 * float(usual)):
        warnings.warn(
            f"compiled gradients are off by {float(wrong):.1e}, plain ones by {float(usual):.1e}: "
            "compiled code is not used",
            stacklevel=4,
        )
        return False
    return True


def first_line(problem: Exception) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"

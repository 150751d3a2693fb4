"""Group normalisation, ReLU and max pool of images in one operation, for bfloat16 on a GPU.

Of images u + bias, with mean m and standard deviation s of the channels of a group,

    xhat = (u + bias - m) / s,   z = weight xhat + shift,   y = max(z, 0), or its largest in squares of 2 x 2.

Backwards, with d the grad in z, which goes to the first of the largest, and averages over a group,

    du = (weight d - avg(weight d) - xhat avg(weight d xhat)) / s.

Torch's compiler passes over the images three times forwards and four backwards; here it is twice and twice.
Images are [rows, channels, height, width] with channels last in memory. Sums are float32, in a fixed order.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor

from coterie.models.compiling import first_line

INSTALLED = importlib.util.find_spec("triton") is not None  # comes with torch for GPUs on Linux


def takes(x: Tensor, channels: int, groups: int, pool: bool) -> bool:
    """Return True if images with so many output channels can be normalised here."""
    if not (INSTALLED and x.is_cuda and torch.is_autocast_enabled("cuda")):
        return False
    size = channels // groups
    fits = channels % 32 == 0 and size <= 32 and size & (size - 1) == 0
    even = not pool or (x.shape[-2] % 2 == 0 and x.shape[-1] % 2 == 0)
    lowered = torch.get_autocast_dtype("cuda") == torch.bfloat16
    return fits and even and lowered and (torch.compiler.is_compiling() or _works(x.device))


@functools.cache
def _works(device: torch.device) -> bool:
    """Return True if Triton works here: it needs a C compiler and a GPU that it supports."""
    u = torch.ones(1, 32, 2, 2, device=device, dtype=torch.bfloat16)
    ones = torch.ones(32, device=device)
    try:
        y, moments = _normalise(u, ones, ones, ones, 8, 1e-5, True)
        _normalise_backward(y, u, moments, ones, ones, 8, True)
    except Exception as problem:  # a compiler fails in ways of its own
        warnings.warn(f"{first_line(problem)}; without Triton norms on this GPU are slower", stacklevel=3)
        return False
    return True


def normalised(
    u: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, groups: int, eps: float, pool: bool
) -> Tensor:
    """Return y of images u."""
    found: Tensor = _normalise(u, bias, weight, shift, groups, eps, pool)[0]
    return found


@torch.library.custom_op("coterie::normalise", mutates_args=())
def _normalise(
    u: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, groups: int, eps: float, pool: bool
) -> tuple[Tensor, Tensor]:
    """Return y, and m - bias, 1 / s and the sum of xhat of each row and channel, [3, rows, channels]."""
    from coterie.models.fast import group_norm_triton

    y, moments = _results(u, pool)
    group_norm_triton.forward(_last(u), bias, weight, shift, y, moments, groups, eps, pool)
    return y, moments


@_normalise.register_fake
def _(
    u: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, groups: int, eps: float, pool: bool
) -> tuple[Tensor, Tensor]:
    return _results(u, pool)


@torch.library.custom_op("coterie::normalise_backward", mutates_args=())
def _normalise_backward(
    grad: Tensor, u: Tensor, moments: Tensor, weight: Tensor, shift: Tensor, groups: int, pool: bool
) -> tuple[Tensor, Tensor]:
    """Return du, and each row's part of the gradients of bias, weight and shift, [3, rows, channels]."""
    from coterie.models.fast import group_norm_triton

    du, sums = torch.empty_like(u, memory_format=torch.channels_last), torch.empty_like(moments)
    group_norm_triton.backward(_last(grad), _last(u), moments, weight, shift, du, sums, groups, pool)
    return du, sums


@_normalise_backward.register_fake
def _(
    grad: Tensor, u: Tensor, moments: Tensor, weight: Tensor, shift: Tensor, groups: int, pool: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(u, memory_format=torch.channels_last), torch.empty_like(moments)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    u, _, weight, shift, ctx.groups, _, ctx.pool = inputs
    ctx.save_for_backward(u, output[1], weight, shift)


def _grads(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    u, moments, weight, shift = ctx.saved_tensors
    du, sums = _normalise_backward(grad, u, moments, weight, shift, ctx.groups, ctx.pool)
    return du, *sums.sum(1).to(weight.dtype).unbind(), None, None, None


_normalise.register_autograd(_grads, setup_context=_keep)


def _results(u: Tensor, pool: bool) -> tuple[Tensor, Tensor]:
    n, channels, height, width = u.shape
    shape = (n, channels, height // 2, width // 2) if pool else u.shape
    y = torch.empty(shape, dtype=u.dtype, device=u.device, memory_format=torch.channels_last)
    return y, torch.empty(3, n, channels, device=u.device)


def _last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)

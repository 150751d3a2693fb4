# mypy: disable-error-code="no-untyped-def, attr-defined, untyped-decorator"
"""Triton kernels of `group_norm`. A program takes some channels of a row, first for sums, then for results."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 256  # that keep a GPU of today busy
VALUES = 8192  # of a tile; all four of a square count
WARPS = 8


def forward(
    u: Tensor,
    bias: Tensor,
    weight: Tensor,
    shift: Tensor,
    y: Tensor,
    moments: Tensor,
    groups: int,
    eps: float,
    pool: bool,
) -> None:
    """Write y and moments."""
    grid, sizes = _sizes(u, groups, pool)
    tiles = {"ROWS": _rows(VALUES, sizes), "SQUARES": _rows(VALUES // 4, sizes, 4)}
    _forward[grid](u, bias, weight, shift, y, moments, eps, **sizes, **tiles, num_warps=WARPS)


def backward(
    grad: Tensor,
    u: Tensor,
    moments: Tensor,
    weight: Tensor,
    shift: Tensor,
    du: Tensor,
    sums: Tensor,
    groups: int,
    pool: bool,
) -> None:
    """Write du and, for each row and channel, its part of the gradients of bias, weight and shift."""
    grid, sizes = _sizes(u, groups, pool)
    rows = _rows(VALUES // 4, sizes, 4) if pool else _rows(VALUES // 2, sizes)
    _backward[grid](grad, u, moments, weight, shift, du, sums, **sizes, ROWS=rows, num_warps=WARPS)


def _sizes(u: Tensor, groups: int, pool: bool) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid of programs and the sizes for all kernels; programs read whole cache lines if possible."""
    n, channels, height, width = u.shape
    wide = channels % 64 == 0 and n * channels >= 64 * PROGRAMS
    across = 64 if wide else 32
    return (n, channels // across), {
        "step": n * channels,
        "size": height * width,
        "width": width,
        "channels": channels,
        "GROUP": channels // groups,
        "CHANNELS": across,
        "POOL": pool,
    }


def _rows(values: int, sizes: dict[str, int], together: int = 1) -> int:
    """Return the rows of a tile, or squares of `together` rows: a power of two, at most as many as there are."""
    most: int = triton.next_power_of_2(sizes["size"] // together)
    return min(values // sizes["CHANNELS"], most)


@triton.jit
def _over_groups(sums, GROUP: tl.constexpr, CHANNELS: tl.constexpr):
    """Replace every channel's sum [1, CHANNELS] by that of its group."""
    whole = tl.sum(tl.reshape(sums, (CHANNELS // GROUP, GROUP)), 1)
    return tl.reshape(tl.broadcast_to(whole[:, None], (CHANNELS // GROUP, GROUP)), (1, CHANNELS))


@triton.jit
def _rows_at(first, size, channels, ROWS: tl.constexpr):
    """Return offsets of values, and a mask of those that exist."""
    at = first + tl.arange(0, ROWS)
    return at[:, None] * channels, (at < size)[:, None]


@triton.jit
def _corners(first, size, width, channels, ROWS: tl.constexpr):
    """Return offsets of the results and first values of 2 x 2 squares, and a mask of those that exist."""
    at = first + tl.arange(0, ROWS)
    half = width // 2
    corner = (at // half) * 2 * width + (at % half) * 2
    return at[:, None] * channels, corner[:, None] * channels, (at < size // 4)[:, None]


@triton.jit
def _values(at, inside):
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _forward(
    u,
    bias,
    weight,
    shift,
    y,
    moments,
    eps,
    step,
    size,
    width,
    channels,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SQUARES: tl.constexpr,
    CHANNELS: tl.constexpr,
    POOL: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    image = u + n * size * channels + k[None, :]
    plain = tl.zeros([ROWS, CHANNELS], tl.float32)
    squares = tl.zeros([ROWS, CHANNELS], tl.float32)
    for first in range(0, size, ROWS):
        at, inside = _rows_at(first, size, channels, ROWS)
        value = _values(image + at, inside)
        plain += value
        squares += value * value

    total, count = tl.sum(plain, 0)[None, :], size * GROUP
    added = tl.load(bias + k).to(tl.float32)[None, :]
    square = tl.sum(squares, 0)[None, :] + added * (2 * total + size * added)
    mean = _over_groups(total + size * added, GROUP, CHANNELS) / count
    variance = _over_groups(square, GROUP, CHANNELS) / count - mean * mean
    rstd = 1 / tl.sqrt(tl.maximum(variance, 0.0) + eps)
    centre = mean - added
    own = (n * channels + k)[None, :]
    tl.store(moments + own, centre)
    tl.store(moments + step + own, rstd)
    tl.store(moments + 2 * step + own, (total - size * centre) * rstd)
    scale = tl.load(weight + k).to(tl.float32)[None, :] * rstd
    level = tl.load(shift + k).to(tl.float32)[None, :] - centre * scale

    if POOL:
        result = y + n * (size // 4) * channels + k[None, :]
        for first in range(0, size // 4, SQUARES):
            at, corner, inside = _corners(first, size, width, channels, SQUARES)
            z = _values(image + corner, inside) * scale + level
            z = tl.maximum(z, _values(image + corner + channels, inside) * scale + level)
            z = tl.maximum(z, _values(image + corner + width * channels, inside) * scale + level)
            z = tl.maximum(z, _values(image + corner + (width + 1) * channels, inside) * scale + level)
            tl.store(result + at, tl.where(z < 0, 0.0, z).to(y.dtype.element_ty), mask=inside)
    else:
        result = y + n * size * channels + k[None, :]
        for first in range(0, size, ROWS):
            at, inside = _rows_at(first, size, channels, ROWS)
            z = _values(image + at, inside) * scale + level
            tl.store(result + at, tl.where(z < 0, 0.0, z).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _square(image, corner, inside, width, channels, centre, rstd, gain, level):
    """Return xhat of the four values of squares, and which of them is the first largest, if that is positive."""
    a = (_values(image + corner, inside) - centre) * rstd
    b = (_values(image + corner + channels, inside) - centre) * rstd
    c = (_values(image + corner + width * channels, inside) - centre) * rstd
    d = (_values(image + corner + (width + 1) * channels, inside) - centre) * rstd
    za, zb, zc, zd = a * gain + level, b * gain + level, c * gain + level, d * gain + level
    best = tl.maximum(tl.maximum(za, zb), tl.maximum(zc, zd))
    left = best > 0
    is_a = left & (za == best)
    left = left & (za < best)
    is_b = left & (zb == best)
    left = left & (zb < best)
    is_c = left & (zc == best)
    is_d = left & (zc < best)
    return a, b, c, d, is_a, is_b, is_c, is_d


@triton.jit
def _put(at, inside, hat, chosen, d, mean, tilt, gain, rstd):
    """Write du, where d is the gradient in the chosen value."""
    found = (gain * tl.where(chosen, d, 0.0) - mean - hat * tilt) * rstd
    tl.store(at, found.to(at.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad,
    u,
    moments,
    weight,
    shift,
    du,
    sums,
    step,
    size,
    width,
    channels,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    POOL: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    own = n * channels + k
    centre = tl.load(moments + own)[None, :]
    rstd = tl.load(moments + step + own)[None, :]
    gain = tl.load(weight + k).to(tl.float32)[None, :]
    level = tl.load(shift + k).to(tl.float32)[None, :]
    image = u + n * size * channels + k[None, :]
    written = du + n * size * channels + k[None, :]
    count = size // 4 if POOL else size
    given = grad + n * count * channels + k[None, :]
    plain = tl.zeros([ROWS, CHANNELS], tl.float32)
    along = tl.zeros([ROWS, CHANNELS], tl.float32)
    for first in range(0, count, ROWS):
        if POOL:
            at, corner, inside = _corners(first, size, width, channels, ROWS)
            a, b, c, d, is_a, is_b, is_c, is_d = _square(
                image, corner, inside, width, channels, centre, rstd, gain, level
            )
            passed = tl.where(is_a | is_b | is_c | is_d, _values(given + at, inside), 0.0)
            hat = tl.where(is_a, a, tl.where(is_b, b, tl.where(is_c, c, d)))
        else:
            at, inside = _rows_at(first, size, channels, ROWS)
            hat = (_values(image + at, inside) - centre) * rstd
            passed = tl.where(hat * gain + level > 0, _values(given + at, inside), 0.0)
        plain += passed
        along += passed * hat

    total, tilted = tl.sum(plain, 0)[None, :], tl.sum(along, 0)[None, :]
    mean = _over_groups(gain * total, GROUP, CHANNELS) / (size * GROUP)
    tilt = _over_groups(gain * tilted, GROUP, CHANNELS) / (size * GROUP)
    hats = tl.load(moments + 2 * step + own)[None, :]
    tl.store(sums + own[None, :], rstd * (gain * total - size * mean - tilt * hats))
    tl.store(sums + step + own[None, :], tilted)
    tl.store(sums + 2 * step + own[None, :], total)

    for first in range(0, count, ROWS):
        if POOL:
            at, corner, inside = _corners(first, size, width, channels, ROWS)
            a, b, c, d, is_a, is_b, is_c, is_d = _square(
                image, corner, inside, width, channels, centre, rstd, gain, level
            )
            passed = _values(given + at, inside)
            place = written + corner
            _put(place, inside, a, is_a, passed, mean, tilt, gain, rstd)
            _put(place + channels, inside, b, is_b, passed, mean, tilt, gain, rstd)
            _put(place + width * channels, inside, c, is_c, passed, mean, tilt, gain, rstd)
            _put(place + (width + 1) * channels, inside, d, is_d, passed, mean, tilt, gain, rstd)
        else:
            at, inside = _rows_at(first, size, channels, ROWS)
            hat = (_values(image + at, inside) - centre) * rstd
            chosen = hat * gain + level > 0
            _put(written + at, inside, hat, chosen, _values(given + at, inside), mean, tilt, gain, rstd)

"""Convolutions of 3 x 3 with a quarter of the multiplications (Winograd's F(4 x 4, 3 x 3); Lavin and Gray, CVPR 2016).

Outputs are computed in tiles of 4 x 4. Of a tile of 6 x 6 inputs d, with the kernel g of each pair of channels,

    V = B' d B,   U = G g G',   M = sum over channels of U V entry by entry,   outputs = A' M A,

36 multiplications in place of 144. Backwards, by the chain rule, dM = A (grads) A', dU = V' dM, dV = dM U', and what
goes to g is G' dU G and to the inputs B dV B', summed where tiles overlap.

In memory images are [height, width, rows, channels]: every transformation is then a product with a small matrix, and
tiles beside each other are rows of one product for each of the 36 entries. A band of tiles, four lines of outputs, is
taken at a time: what lies between its inputs and its outputs stays in the cache.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from coterie.models.fast.operations import Put, aten, positions_first

TILE, SPAN = 4, 6  # outputs and inputs of a tile, along one axis
FEWEST_CHANNELS = 16  # with fewer the transformations cost more than they save
MOST_ROWS = 256  # with more a band of tiles is far from fitting in a cache, and memory might run short

POINTS = (0.0, 1.0, -1.0, 0.5, -2.0)  # 2 and -2, or the halves, round two to four times as much
ONES = SPAN + 1  # a number added to this entry of M is added to all outputs of the tile


@functools.cache
def transformations() -> tuple[Tensor, Tensor, Tensor]:
    """Return B' [6, 6], G [6, 3] and A' [4, 6], which multiply polynomials by their values at POINTS and infinity."""
    inputs, kernel, results = np.zeros((SPAN, SPAN)), np.zeros((SPAN, 3)), np.zeros((TILE, SPAN))
    for k, point in enumerate(POINTS):
        others = [other for other in POINTS if other != point]
        inputs[k, :-1] = np.poly(others)[::-1]
        kernel[k] = point ** np.arange(3) / np.prod(point - np.array(others))
        results[:, k] = point ** np.arange(TILE)
    inputs[-1], kernel[-1, -1], results[-1, -1] = np.poly(POINTS)[::-1], 1, 1
    return torch.from_numpy(inputs), torch.from_numpy(kernel), torch.from_numpy(results)


class Winograd:
    """Convolution of inputs of one shape [N, C, H, W].

    `pooled`: also take the maximum of each 2 x 2 outputs, while they are in the cache.
    """

    def __init__(self, layer: nn.Conv2d, x: Tensor, pooled: bool = False) -> None:
        n, c, *sizes = x.shape
        outputs, padding = layer.out_channels, cast(tuple[int, int], layer.padding)
        ends = [size + 2 * edge - 2 for size, edge in zip(sizes, padding, strict=True)]
        down, across = (-(-end // TILE) for end in ends)
        tall, wide = TILE * down, TILE * across
        self.biased, self.pooled = layer.bias is not None, pooled
        self.inputs, kernel, self.results = (matrix.to(x.dtype) for matrix in transformations())
        self.kernels = torch.kron(kernel, kernel)
        self.u, self.du = (x.new_empty(SPAN * SPAN, c, outputs) for _ in range(2))
        self.v = x.new_empty(down, SPAN, SPAN, across, n * c)
        self.m = x.new_empty(SPAN, SPAN, across, n * outputs)
        self.half, self.pieces = (x.new_empty(TILE, size, *self.m.shape[2:]) for size in (SPAN, TILE))
        self.tiles, self.dv = (torch.empty_like(self.v[0]) for _ in range(2))
        self.lines = x.new_empty(SPAN, wide + 2, n * c)
        step = self.lines.stride()
        self.overlapping = self.lines.as_strided(self.tiles.shape, (step[0], step[1], TILE * step[1], 1))

        fits = not any(padding) and [tall, wide] == ends
        self.padded = None if fits else x.new_zeros(tall + 2, wide + 2, n, c)
        self.dx = x.new_empty(tall + 2, wide + 2, n, c)
        self.inside = tuple(slice(edge, edge + size) for size, edge in zip(sizes, padding, strict=True))
        per_tile = TILE // 2 if pooled else TILE
        self.kept = tuple(slice(end // 2 if pooled else end) for end in ends)
        self.y = x.new_empty(down * per_tile, across * per_tile, n, outputs)
        self.dy = None if self.y[self.kept].shape == self.y.shape else torch.zeros_like(self.y)
        self.largest = self.pieces.new_empty(2, 2, *self.m.shape[2:])
        self.places = torch.empty((down, *self.largest.shape), dtype=torch.int64) if pooled else None
        self.image, self.small = _image(self.pieces), _image(self.largest)

        rows = (SPAN * SPAN, across * n)
        places = [None] * down if self.places is None else map(_image, self.places)
        self.bands = [
            Band(v.flatten(2), v.view(*rows, c), y, self.dx[TILE * k : TILE * k + SPAN].flatten(1), place)
            for k, (v, y, place) in enumerate(zip(self.v, self._tiled(self.y), places, strict=True))
        ]
        self.products = self.m.view(*rows, outputs), self.dv.view(*rows, c)

    @staticmethod
    def takes(layer: nn.Conv2d, x: Tensor) -> bool:
        """Return True if the convolution of these inputs can be computed this way and might be faster."""
        return (
            len(x) <= MOST_ROWS
            and layer.kernel_size == (3, 3)
            and layer.stride == layer.dilation == (1, 1)
            and layer.groups == 1
            and min(layer.in_channels, layer.out_channels) >= FEWEST_CHANNELS
        )

    @staticmethod
    def pools(layer: nn.Module) -> bool:
        """Return True if this layer, the next one, can be computed in the same pass."""
        sizes = {"kernel_size": 2, "stride": 2, "padding": 0, "dilation": 1, "ceil_mode": False}
        plain = (getattr(layer, name, None) in (size, (size, size)) for name, size in sizes.items())
        return type(layer) is nn.MaxPool2d and all(plain)

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """Map [N, C, H, W] to [N, O, H', W'], which is [H', W', N, O] in memory."""
        x = self._surrounded(positions_first(x)).flatten(1)
        torch.mm(self.kernels, parameters[0].permute(2, 3, 1, 0).reshape(9, -1), out=self.u.flatten(1))
        lines, tiles, (m, _) = self.lines.flatten(1), self.tiles.flatten(2), self.products
        half, pieces = self.half.flatten(2), self.pieces.flatten(2)
        into, out_of = self.inputs.expand(SPAN, -1, -1), self.results.expand(TILE, -1, -1)
        m_lines, half_lines, ones = m.view(SPAN, -1), half.view(TILE, -1), m[ONES]
        for k, band in enumerate(self.bands):
            torch.mm(self.inputs, x[TILE * k : TILE * k + SPAN], out=lines)
            self.tiles.copy_(self.overlapping)
            torch.bmm(into, tiles, out=band.v)
            torch.bmm(band.factors, self.u, out=m)
            if self.biased:
                ones.add_(parameters[1])
            torch.mm(self.results, m_lines, out=half_lines)
            torch.bmm(out_of, half, out=pieces)
            if self.pooled:
                aten.max_pool2d_with_indices.out(self.image, [2, 2], out=self.small, indices=band.places)
            band.y.copy_(self.largest if self.pooled else self.pieces)
        return positions_first(self.y[self.kept])

    def backward(self, grad: Tensor, needs: bool, put: Put) -> Tensor | None:
        given = positions_first(grad).contiguous()
        if self.dy is not None:
            self.dy[self.kept].copy_(given)
            given = self.dy
        lines, tiles, (m, dv) = self.lines.flatten(1), self.tiles.flatten(2), self.products
        half, pieces, apart = self.half.flatten(2), self.pieces.flatten(2), self.dv.flatten(2)
        into, out_of = self.inputs.t().expand(SPAN, -1, -1), self.results.t().expand(TILE, -1, -1)
        m_lines, half_lines = m.view(SPAN, -1), half.view(TILE, -1)
        own, shared = (part.transpose(1, 2) for part in self.tiles.split(TILE, 1))
        to_own = self.lines[:, :-2].unflatten(1, (-1, TILE))
        to_shared, last = self.overlapping[:, TILE:].transpose(1, 2), self.lines[:, -2:]
        if needs:
            self.dx.zero_()
        for k, (band, dy) in enumerate(zip(self.bands, self._tiled(given), strict=True)):
            (self.largest if self.pooled else self.pieces).copy_(dy)
            if self.pooled:
                pool = (self.image, [2, 2], [2, 2], [0, 0], [1, 1], False, band.places)
                aten.max_pool2d_with_indices_backward.grad_input(self.small, *pool, grad_input=self.image)
            torch.bmm(out_of, pieces, out=half)
            torch.mm(self.results.t(), half_lines, out=m_lines)
            self.du.baddbmm_(band.factors.mT, m, beta=1 if k else 0)
            if needs:
                torch.bmm(m, self.u.mT, out=dv)
                torch.bmm(into, apart, out=tiles)
                last.zero_()
                to_own.copy_(own)
                to_shared.add_(shared)
                band.dx.addmm_(self.inputs.t(), lines)
        if self.biased:
            put(1, given.flatten(0, 2).sum(0))
        weight = torch.mm(self.kernels.t(), self.du.flatten(1)).view(3, 3, *self.u.shape[1:])
        put(0, weight.permute(3, 2, 0, 1))
        return positions_first(self.dx[self.inside]) if needs else None

    def _tiled(self, images: Tensor) -> Tensor:
        """Return outputs as [bands, lines, positions, tiles, rest], two or four of a tile along each axis."""
        down, across = self.v.shape[0], self.v.shape[3]
        tiles: Tensor = images.unflatten(1, (across, -1)).unflatten(0, (down, -1))
        return tiles.flatten(4).transpose(2, 3)

    def _surrounded(self, x: Tensor) -> Tensor:
        """Return the images surrounded by zeros."""
        if self.padded is None:
            return x.contiguous()
        self.padded[self.inside].copy_(x)
        return self.padded


class Band(NamedTuple):
    """Buffers of four lines of outputs."""

    v: Tensor  # [6, 6, tiles x rows x channels]
    factors: Tensor  # the same as [36, tiles x rows, channels]
    y: Tensor  # [4, 4, tiles, rows x outputs], or [2, 2, ...] of the largest
    dx: Tensor  # [6, positions x rows x channels]
    places: Tensor | None  # where the largest come from


def _image(pieces: Tensor) -> Tensor:
    """Return the pieces of all tiles [a, b, ...] as one image of a x b with many channels."""
    return pieces.flatten(2).unsqueeze(0).permute(0, 3, 1, 2)

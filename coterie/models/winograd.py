"""Convolutions of 3 x 3 with a quarter of the multiplications (Winograd's F(4 x 4, 3 x 3); Lavin and Gray, CVPR 2016).

Outputs are computed in tiles of 4 x 4. Of a tile of 6 x 6 inputs d, with the kernel g of each pair of channels,

    V = B' d B,   U = G g G',   M = sum over channels of U V entry by entry,   outputs = A' M A,

36 multiplications in place of 144. Backwards, by the chain rule, dM = A (slopes) A', dU = V' dM, dV = dM U', and what
goes to g is G' dU G and to the inputs B dV B', summed where tiles overlap.

In memory images are [height, width, rows, channels]: every transformation is then a product with a small matrix, and
tiles beside each other are rows of one product for each of the 36 entries. The tiles of four lines of outputs are
taken at a time, which the cache of a core holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coterie.models.operations import Put, positions_first

TILE, SPAN = 4, 6  # outputs and inputs of a tile, along one axis
FEWEST_CHANNELS = 16  # with fewer the transformations cost more than they save

POINTS = (
    0.0,
    1.0,
    -1.0,
    0.5,
    -2.0,
)  # with -0.5 and 0.5, or 2 and -2, errors of rounding were two to four times as large
ONES = SPAN + 1  # a number added to this entry of M is added to all outputs of the tile


def transformations() -> tuple[Tensor, Tensor, Tensor]:
    """B' [6, 6], G [6, 3] and A' [4, 6]: products of polynomials from their values at POINTS and at infinity."""
    inputs, kernel, results = np.zeros((SPAN, SPAN)), np.zeros((SPAN, 3)), np.zeros((TILE, SPAN))
    for k, point in enumerate(POINTS):
        others = [other for other in POINTS if other != point]
        inputs[k, :-1] = np.poly(others)[::-1]
        kernel[k] = point ** np.arange(3) / np.prod(point - np.array(others))
        results[:, k] = point ** np.arange(TILE)
    inputs[-1], kernel[-1, -1], results[-1, -1] = np.poly(POINTS)[::-1], 1, 1
    return torch.from_numpy(inputs), torch.from_numpy(kernel), torch.from_numpy(results)


class Winograd:
    """One convolution of inputs of one shape [N, C, H, W], an operation of a chain of layers."""

    def __init__(self, layer: nn.Conv2d, x: Tensor) -> None:
        n, c, *sizes = x.shape
        padding: Any = layer.padding
        self.ends = [size + 2 * edge - 2 for size, edge in zip(sizes, padding, strict=True)]
        self.down, self.across = (-(-end // TILE) for end in self.ends)
        tall, wide = TILE * self.down, TILE * self.across
        self.whole = [tall, wide] == self.ends
        self.padded = None if self.whole and not any(padding) else x.new_zeros(tall + 2, wide + 2, n, c)
        self.inside = [slice(edge, edge + size) for size, edge in zip(sizes, padding, strict=True)]
        self.inputs, kernel, self.results = (matrix.to(x.dtype) for matrix in transformations())
        self.kernels = torch.kron(kernel, kernel)
        self.lines = x.new_empty(SPAN, wide + 2, n * c)
        step = self.lines.stride()
        self.overlapping = self.lines.as_strided(
            (SPAN, SPAN, self.across, n * c), (step[0], step[1], TILE * step[1], 1)
        )
        self.tiles = x.new_empty(self.overlapping.shape)
        self.v = x.new_empty(self.down, *self.tiles.shape)
        self.dv = x.new_empty(self.tiles.shape)
        self.u, self.du = (x.new_empty(SPAN * SPAN, c, layer.out_channels) for _ in range(2))
        self.m = x.new_empty(SPAN, SPAN, self.across, n * layer.out_channels)
        self.half, self.pieces = (x.new_empty(TILE, size, *self.m.shape[2:]) for size in (SPAN, TILE))
        self.y = x.new_empty(tall, wide, n, layer.out_channels)
        self.cut = self.y if self.whole else x.new_empty(*self.ends, n, layer.out_channels)
        self.slopes = None if self.whole else torch.zeros_like(self.y)
        self.dx = x.new_empty(tall + 2, wide + 2, n, c)
        self.biased = layer.bias is not None

    @staticmethod
    def takes(layer: nn.Conv2d) -> bool:
        """Whether the convolution can be computed this way, and might be faster."""
        return (
            layer.kernel_size == (3, 3)
            and layer.stride == layer.dilation == (1, 1)
            and layer.groups == 1
            and min(layer.in_channels, layer.out_channels) >= FEWEST_CHANNELS
        )

    def forward(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, O, H', W'], which is [H', W', N, O] in memory."""
        x = self._surrounded(positions_first(x))
        torch.mm(self.kernels, parameters[0].permute(2, 3, 1, 0).reshape(9, -1), out=self.u.flatten(1))
        lines, tiles, m = self.lines.flatten(1), self.tiles.flatten(2), self._products(self.m)
        half, pieces = self.half.flatten(2), self.pieces.flatten(2)
        into, out_of = self.inputs.expand(SPAN, -1, -1), self.results.expand(TILE, -1, -1)
        for k, v in enumerate(self.v):
            at = TILE * k
            torch.mm(self.inputs, x[at : at + SPAN].flatten(1), out=lines)
            self.tiles.copy_(self.overlapping)
            torch.bmm(into, tiles, out=v.flatten(2))
            torch.bmm(self._products(v), self.u, out=m)
            if self.biased:
                m[ONES].add_(parameters[1])
            torch.mm(self.results, m.view(SPAN, -1), out=half.view(TILE, -1))
            torch.bmm(out_of, half, out=pieces)
            self._tiled(self.y[at : at + TILE]).copy_(self.pieces.transpose(1, 2))
        if not self.whole:
            self.cut.copy_(self.y[: self.ends[0], : self.ends[1]])
        return positions_first(self.cut)

    def backward(self, slope: Tensor, needs: bool, put: Put) -> Tensor | None:
        given = positions_first(slope)
        if self.slopes is not None:
            self.slopes[: self.ends[0], : self.ends[1]].copy_(given)
            given = self.slopes
        given = given.contiguous()
        lines, tiles, m = self.lines.flatten(1), self.tiles.flatten(2), self._products(self.m)
        half, pieces, dv = self.half.flatten(2), self.pieces.flatten(2), self._products(self.dv)
        into, out_of = self.inputs.t().expand(SPAN, -1, -1), self.results.t().expand(TILE, -1, -1)
        shared = self.overlapping[:, TILE:].transpose(1, 2)
        bias = m.new_zeros(m.shape[-1])
        if needs:
            self.dx.zero_()
        for k, v in enumerate(self.v):
            at = TILE * k
            self.pieces.transpose(1, 2).copy_(self._tiled(given[at : at + TILE]))
            torch.bmm(out_of, pieces, out=half)
            torch.mm(self.results.t(), half.view(TILE, -1), out=m.view(SPAN, -1))
            bias += m[ONES].sum(0)
            self.du.baddbmm_(self._products(v).mT, m, beta=1 if k else 0)
            if needs:
                torch.bmm(m, self.u.mT, out=dv)
                torch.bmm(into, self.dv.flatten(2), out=tiles)
                self.lines[:, -2:].zero_()
                self._tiled(self.lines[:, :-2]).copy_(self.tiles[:, :TILE].transpose(1, 2))
                shared.add_(self.tiles[:, TILE:].transpose(1, 2))
                self.dx[at : at + SPAN].flatten(1).addmm_(self.inputs.t(), lines)
        if self.biased:
            put(1, bias)
        own = torch.mm(self.kernels.t(), self.du.flatten(1)).view(3, 3, *self.u.shape[1:])
        put(0, own.permute(3, 2, 0, 1))
        return positions_first(self.dx[self.inside[0], self.inside[1]]) if needs else None

    def _surrounded(self, x: Tensor) -> Tensor:
        """With zeros around."""
        if self.padded is None:
            return x.contiguous()
        self.padded[self.inside[0], self.inside[1]].copy_(x)
        return self.padded

    def _products(self, tiles: Tensor) -> Tensor:
        """[6, 6, tiles, rows x channels] -> [36, tiles x rows, channels]."""
        return tiles.view(SPAN * SPAN, self.across * self.y.shape[2], -1)

    def _tiled(self, lines: Tensor) -> Tensor:
        """[lines, positions, ...] -> [lines, tiles, 4, rest]."""
        return lines.unflatten(1, (self.across, TILE)).flatten(3)

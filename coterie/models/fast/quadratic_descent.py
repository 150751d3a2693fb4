"""Fast path: full-batch gradient descent on least squares, many steps as one affine map."""

from __future__ import annotations

import torch
from torch import Tensor

POWERS = 8  # so many steps are taken at once at most
POWERS_ELEMENTS = 1 << 22  # numbers in the powers of all clients that are worth holding


def supports(statistics: tuple[Tensor, ...] | None, step: Tensor) -> bool:
    """Return True if the loss is quadratic and a second matrix per client fits in memory."""
    return statistics is not None and statistics[0].numel() <= POWERS_ELEMENTS


def run(statistics: tuple[Tensor, ...], step: Tensor) -> QuadraticDescent:
    """Return a function that takes steps of these sizes [n, 1]."""
    return QuadraticDescent(statistics[0], statistics[1], step)


class QuadraticDescent:
    """Compute k steps x <- x - pace (A x - b) as x <- x M_k + c_k, for A [n, d, d], b [n, d] and pace [n, 1].

    M_1 = I - pace A, M_k = M_1 M_(k-1), c_k = c_(k-1) M_1 + pace b; powers are computed when first needed.
    """

    def __init__(self, matrix: Tensor, b: Tensor, pace: Tensor) -> None:
        self.pace, self.most = pace, min(POWERS, POWERS_ELEMENTS // max(1, matrix.numel()))
        identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        self.maps = [(identity - pace.unsqueeze(-1) * matrix, (pace * b).unsqueeze(-2))]

    def __call__(self, x: Tensor, steps: int, out: Tensor | None = None) -> Tensor:
        """Return x [n, d] after so many steps, in `out` if given."""
        while steps > self.most:
            x, steps = self._taken(x, self.most), steps - self.most
        return self._taken(x, steps, out) if steps else x

    def _taken(self, x: Tensor, steps: int, out: Tensor | None = None) -> Tensor:
        matrix, shift = self._power(steps)
        into = None if out is None else out.unsqueeze(-2)
        return torch.baddbmm(shift, x.unsqueeze(-2), matrix, out=into).squeeze(-2)

    def _power(self, steps: int) -> tuple[Tensor, Tensor]:
        while len(self.maps) < steps:
            (first, start), (matrix, shift) = self.maps[0], self.maps[-1]
            self.maps.append((matrix @ first, torch.baddbmm(start, shift, first)))
        return self.maps[steps - 1]

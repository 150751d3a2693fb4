"""Least squares, from the rows or from their sufficient statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from coterie.models.base import dot
from coterie.models.glm import Glm, gram_eigenvalues
from coterie.models.targets import check_column

Statistics = tuple[Tensor, ...]


@dataclass(frozen=True)
class Linear(Glm):
    """Least squares, 1/2 (x'w - y)^2; with statistics A, b, c the loss is 1/2 w'Aw - b'w + c."""

    name: ClassVar[str] = "linear"
    curvature: ClassVar[float] = 1.0
    convex: ClassVar[bool] = True
    has_statistics: ClassVar[bool] = True

    @property
    def task(self) -> str:
        return "regression"

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        check_column(y)
        return super().fit_to(x, y)

    def statistics(self, x: Tensor, y: Tensor, weight: Tensor) -> Statistics:
        """Return A = X'DX + l2 [..., d, d], b = X'Dy [..., d], c = y'Dy / 2 [..., 1], with D = diag(weight)."""
        rooted = x * weight.sqrt().unsqueeze(-1)
        matrix = rooted.mT @ rooted
        matrix.diagonal(dim1=-2, dim2=-1).add_(self._penalty_diagonal(matrix))
        weighted = weight * y
        return matrix, _times(weighted, x.mT), 0.5 * dot(weighted, y)

    def loss_from(self, stats: Statistics, w: Tensor) -> Tensor:
        """Return 1/2 w'Aw - b'w + c, [..., 1]."""
        matrix, b, c = stats
        return dot(w, 0.5 * _times(w, matrix) - b) + c

    def grad_from(self, stats: Statistics, w: Tensor) -> Tensor:
        """Return A w - b, [..., d]."""
        if w.dim() == 2:
            return torch.baddbmm(stats[1].unsqueeze(1), w.unsqueeze(1), stats[0], beta=-1).squeeze(1)
        return _times(w, stats[0]).sub_(stats[1])

    def solve_from(self, stats: Statistics, w: Tensor, prox: float = 0.0) -> Tensor:
        """Return w + (A + prox)^+ (b - A w), the minimiser of loss + prox/2 |. - w|^2 nearest to w."""
        matrix, b = stats[0].double(), stats[1].double()
        gap = b - _times(w.double(), matrix)
        matrix = matrix + prox * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        inverse = _inverse(matrix, definite=prox > 0 or (self.l2 > 0 and not self.intercept))
        step = inverse(gap)
        return (w + step + inverse(gap - _times(step, matrix))).to(w.dtype)

    def solve(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, tol: float, prox: float = 0.0) -> Tensor:
        """Return the exact minimiser, whatever `tol`; if it is not unique, the one nearest to w."""
        return self.solve_from(self.statistics(x.double(), y.double(), weight.double()), w, prox)

    def hessian(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self.statistics(x, y, weight)[0]

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the largest eigenvalue of the Hessian."""
        return self._eigenvalues(x, y, weight)[..., -1:].to(w.dtype)

    def convexity(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the smallest eigenvalue of the Hessian."""
        if x.shape[-2] < x.shape[-1] and self._evenly_penalised:
            return torch.full_like(weight[..., :1], self.l2, dtype=w.dtype)
        return self._eigenvalues(x, y, weight)[..., :1].clamp_min(0.0).to(w.dtype)

    @property
    def _evenly_penalised(self) -> bool:
        return self.l2 == 0 or not self.intercept

    def _eigenvalues(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        if self._evenly_penalised:
            return gram_eigenvalues(x, weight) + self.l2
        matrix = self.statistics(x.double(), y.double(), weight.double())[0]
        values: Tensor = torch.linalg.eigvalsh(matrix)
        return values

    def _row_losses(self, scores: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (scores.squeeze(-2) - y.to(scores.dtype)).square()

    @staticmethod
    def _residuals(scores: Tensor, y: Tensor) -> Tensor:
        return scores.sub_(y.unsqueeze(-2))

    def _bend(self, scores: Tensor, y: Tensor, change: Tensor) -> Tensor:
        return change


def linear(l2: float = 0.0, intercept: bool = False, reduction: str = "mean") -> Linear:
    """Return least squares for numeric targets: 1/2 (x'w - y)^2 for each row.

    Parameters
    ----------
    l2
        Strength of the penalty l2/2 |w|^2; the intercept is not penalised.
    intercept
        Add an intercept.
    reduction
        Combine the losses of a client's rows by their "mean" or their "sum".

    Returns
    -------
    Linear
        A model with gradients and minimisers in closed form.

    Examples
    --------
    >>> import torch, coterie
    >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 2.0])
    >>> model = coterie.models.linear().fit_to(x, y)
    >>> model.solve(torch.zeros(1), x, y, torch.full((2,), 0.5), tol=1e-9)
    tensor([1.])
    """
    return Linear(l2, intercept, reduction)


def _inverse(matrix: Tensor, definite: bool) -> Callable[[Tensor], Tensor]:
    """Return the function v -> M^+ v for symmetric M [..., d, d], by Cholesky if M is definite."""
    if definite:
        factor, info = torch.linalg.cholesky_ex(matrix)
        if not bool(info.any()):
            return lambda v: torch.cholesky_solve(v.unsqueeze(-1), factor).squeeze(-1)
    values, vectors = torch.linalg.eigh(matrix)
    zero = values <= 10 * matrix.shape[-1] * torch.finfo(values.dtype).eps * values[..., -1:]
    inverse = torch.where(zero, 0.0, 1 / values)
    return lambda v: _times(inverse * _times(v, vectors.mT), vectors)


def _times(w: Tensor, matrix: Tensor) -> Tensor:
    """Return M w for M [..., n, d], computed as w'M', the fastest of the batched products."""
    return (w.unsqueeze(-2) @ matrix.mT).squeeze(-2)

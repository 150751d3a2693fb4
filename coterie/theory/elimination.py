"""Integrate the effects of one level out of a Gaussian likelihood, with derivatives from the same factorisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.theory.hierarchical import scaled, tied_covariance, times


def eliminate(a: Tensor, b: Tensor, spread: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Integrate t ~ N(w, S) out of exp(-(t'At - 2 b't)/2): what is left is log det, H, g and a constant.

    Parameters
    ----------
    a
        A, [n, d, d], symmetric.
    b
        b, [n, d].
    spread
        Variances [n, d] or covariances S [n, d, d].

    Returns
    -------
    tuple of Tensor
        log det(I + A S) [n], H = (I + A S)^-1 A [n, d, d], g = (I + A S)^-1 b [n, d], and b'S g [n, 1]. All are
        differentiable once. Variances that are not finite leave nothing of w: log det is infinite, H, g and the last 0.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.elimination import eliminate
    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> [round(part.item(), 3) for part in eliminate(one[None], one, one)]
    [0.693, 0.5, 0.5, 0.5]
    """
    logarithm, h, g, fit = _Elimination.apply(a, b, spread)  # type: ignore[no-untyped-call]
    return logarithm, h, g, fit


class _Elimination(torch.autograd.Function):
    """Reuse the factors of I + A S: autograd would factorise again for every operation, and several times backwards."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, spread: Tensor) -> tuple[Tensor, ...]:
        tied, spread = tied_covariance(spread, b)
        identity = torch.eye(b.shape[-1], dtype=a.dtype, device=a.device)
        factors, pivots = torch.linalg.lu_factor(identity + scaled(spread, a).mT)
        both = torch.linalg.lu_solve(factors, pivots, torch.cat([a, b.unsqueeze(-1)], -1))
        h, g = _symmetric(both[..., :-1]) * tied.unsqueeze(-1), both[..., -1] * tied
        move = scaled(spread, g.unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(factors, pivots, h, g, move, spread, tied)
        logarithm = factors.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
        return torch.where(tied.squeeze(-1), logarithm, torch.inf), h, g, (b * move).sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        by_log, by_h, by_g, by_fit = upstream
        factors, pivots, h, g, move, spread, tied = ctx.saved_tensors
        by_log, by_fit, by_h = by_log[..., None, None], by_fit.unsqueeze(-1), _symmetric(by_h)
        to_a = to_b = None
        half, toward = _product(h, by_h), times(h, by_g)
        if spread.dim() == h.dim():
            to_spread = by_log * h - half @ h + by_fit * _outer(g, g) - _outer(toward, g)
        else:
            to_spread = by_log.squeeze(-1) * h.diagonal(dim1=-2, dim2=-1) - (half * h).sum(-1)
            to_spread = to_spread + by_fit.squeeze(-1) * g.square() - toward * g
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            inverse = torch.linalg.lu_solve(factors, pivots, torch.eye(h.shape[-1]).to(h).expand_as(h))
            inverse = inverse * tied.unsqueeze(-1)
            back = times(inverse.mT, by_g)
            to_b = back + 2 * by_fit.squeeze(-1) * move
            to_a = by_log * scaled(spread, inverse) + inverse.mT @ by_h @ inverse
            to_a = to_a - _outer(back, move) - by_fit * _outer(move, move)
        return to_a, to_b, to_spread


def _symmetric(matrices: Tensor) -> Tensor:
    """Return the symmetric parts of a stack of matrices, as one if it is one that is repeated."""
    if matrices.stride(0) == 0 and len(matrices):
        return (0.5 * (matrices[0] + matrices[0].mT)).expand_as(matrices)
    return 0.5 * (matrices + matrices.mT)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of two stacks of matrices; one matrix that is repeated makes it a single product."""
    if right.stride(0) == 0 and len(right):
        return (left.reshape(-1, left.shape[-1]) @ right[0]).view(left.shape)
    return left @ right


def _outer(u: Tensor, v: Tensor) -> Tensor:
    """Return u v' for stacks of vectors."""
    return u.unsqueeze(-1) * v.unsqueeze(-2)

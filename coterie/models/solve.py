"""Newton and L-BFGS for a stack of independent problems, each stopped by its own gradient norm.

Functions take `w` [k, d] and tensors with the same leading axis and return [k, 1], [k, d] or
[k, d, d]. Problems that are done leave the stack, so the work shrinks with the number still active.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.models.base import dot, norm

Function = Callable[..., Tensor]
_ARMIJO = 1e-4
_HALVINGS = 40


@dataclass(frozen=True)
class Solution:
    """Points [k, d], their gradient norms [k, 1], and which of them met the tolerance [k]."""

    w: Tensor
    gradient: Tensor
    converged: Tensor


class _Stack:
    """Problems still active: their numbers, and tensors whose first axis follows them."""

    def __init__(self, w: Tensor, tensors: tuple[Tensor, ...]) -> None:
        self.ids = torch.arange(w.shape[0], device=w.device)
        self.tensors = tensors
        infinite = torch.full_like(w[:, :1], torch.inf)
        self.solution = Solution(w.clone(), infinite, torch.zeros_like(self.ids, dtype=torch.bool))

    def retire(self, done: Tensor, w: Tensor, gradient: Tensor, converged: Tensor) -> Tensor:
        """Store the finished problems and return the positions of the others."""
        out, at = self.solution, self.ids[done]
        out.w[at], out.gradient[at], out.converged[at] = w[done], norm(gradient[done]), converged[done]
        stay = (~done).nonzero().squeeze(-1)
        if bool(done.any()):
            self.ids = self.ids[stay]
            self.tensors = tuple(tensor[stay] for tensor in self.tensors)
        return stay


def newton(
    loss: Function,
    grad: Function,
    hessian: Function,
    w: Tensor,
    data: tuple[Tensor, ...],
    tol: Tensor,
    gains: Function | None = None,
    steps: int = 100,
) -> Solution:
    """Minimise convex problems by damped Newton: w <- w - t H^-1 g, with t halved until the loss falls.

    If rounding hides the decrease, the whole step is taken if it shortens the gradient.
    `gains(step, *data)` [k, n], if given, are changes of quantities in each of which the loss is decreasing. A
    step that lowers none of them proves that there is no minimiser and ends its problem unconverged. While any of
    them changes by more than 0.1, a small gradient does not count as convergence: it also vanishes at infinity.
    """
    stack = _Stack(w, (tol, *data))
    for count in range(steps + 1):
        limit, *rest = stack.tensors
        gradient = grad(w, *rest)
        step = -_solve_positive(hessian(w, *rest), gradient)
        converged = (norm(gradient) <= limit).squeeze(-1)
        endless = torch.zeros_like(converged)
        if gains is not None:
            change = gains(step, *rest)
            converged &= change.abs().amax(-1) <= 0.1
            endless = ~converged & (change.amax(-1) > 0) & (change.amin(-1) >= -1e-9 * change.amax(-1))
        done = converged | endless if count < steps else torch.ones_like(converged)
        stay = stack.retire(done, w, gradient, converged)
        if not stay.numel():
            break
        w, gradient, step = w[stay], gradient[stay], step[stay]
        after, progress = _descend(loss, w, gradient, step, stack.tensors[1:])
        if not bool(progress.all()):
            flatter = norm(grad(w + step, *stack.tensors[1:])) < norm(gradient)
            after = torch.where(flatter & ~progress.unsqueeze(-1), w + step, after)
        w = after
    return stack.solution


def lbfgs(
    loss: Function,
    grad: Function,
    w: Tensor,
    data: tuple[Tensor, ...],
    tol: Tensor,
    history: int = 10,
    steps: int = 2000,
    patience: int = 10,
) -> Solution:
    """Minimise by L-BFGS with Armijo backtracking; stop early if the loss stands still for `patience` steps.

    It does so at rounding level, and at a kink, where no gradient vanishes.
    """
    stack = _Stack(w, (tol, *data))
    gradient = grad(w, *data)
    moves = w.new_zeros(w.shape[0], history, w.shape[1])
    turns = torch.zeros_like(moves)
    idle = torch.zeros_like(stack.ids)
    for count in range(steps + 1):
        converged = (norm(gradient) <= stack.tensors[0]).squeeze(-1)
        done = converged | (idle >= patience) if count < steps else torch.ones_like(converged)
        stay = stack.retire(done, w, gradient, converged)
        if not stay.numel():
            break
        if stay.numel() < done.numel():
            w, gradient, moves, turns, idle = w[stay], gradient[stay], moves[stay], turns[stay], idle[stay]
        step = -_two_loops(gradient, moves, turns)
        uphill = dot(step, gradient) >= 0
        step = torch.where(uphill, -gradient / norm(gradient).clamp_min(1.0), step)
        after, progress = _descend(loss, w, gradient, step, stack.tensors[1:])
        idle = torch.where(progress, 0, idle + 1)
        bend = grad(after, *stack.tensors[1:])
        move, turn = after - w, bend - gradient
        useful = dot(move, turn) > 1e-12 * norm(move) * norm(turn)
        moves = torch.cat([moves[:, 1:], (move * useful).unsqueeze(1)], 1)
        turns = torch.cat([turns[:, 1:], (turn * useful).unsqueeze(1)], 1)
        w, gradient = after, bend
    return stack.solution


def prox_lbfgs(
    loss: Function, grad: Function, w: Tensor, data: tuple[Tensor, ...], tol: float, prox: float, steps: int
) -> Tensor:
    """Return the minimiser of loss + prox/2 |. - w|^2 for `w` [d] or a stack [k, d], by L-BFGS."""

    def whole(x: Tensor, centre: Tensor, *rows: Tensor) -> Tensor:
        return loss(x, *rows) + 0.5 * prox * (x - centre).square().sum(-1, keepdim=True)

    def whole_grad(x: Tensor, centre: Tensor, *rows: Tensor) -> Tensor:
        return grad(x, *rows) + prox * (x - centre)

    parts = (w, *data)
    start, *rows = parts if w.dim() > 1 else tuple(part.unsqueeze(0) for part in parts)
    limit = torch.full_like(start[:, :1], tol)
    return lbfgs(whole, whole_grad, start, (start, *rows), limit, steps=steps).w.view_as(w)


def _two_loops(gradient: Tensor, moves: Tensor, turns: Tensor) -> Tensor:
    """Return the inverse Hessian of the pairs (moves, turns) [k, m, d] times `gradient`; zero pairs are ignored."""
    bends = (moves * turns).sum(-1, keepdim=True)
    inverse = torch.where(bends > 0, 1.0 / bends.clamp_min(torch.finfo(bends.dtype).tiny), 0.0)
    q, alphas = gradient, {}
    for j in reversed(range(moves.shape[1])):
        alphas[j] = inverse[:, j] * dot(moves[:, j], q)
        q = q - alphas[j] * turns[:, j]
    length = dot(turns[:, -1], turns[:, -1])
    first = 1.0 / norm(gradient).clamp_min(1.0)
    q = q * torch.where(length > 0, bends[:, -1] / length.clamp_min(torch.finfo(length.dtype).tiny), first)
    for j in range(moves.shape[1]):
        q = q + (alphas[j] - inverse[:, j] * dot(turns[:, j], q)) * moves[:, j]
    return q


def _descend(
    loss: Function, w: Tensor, gradient: Tensor, step: Tensor, data: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Halve the step of each problem until its loss falls enough; return the points and which losses fell, [k]."""
    start, fall = loss(w, *data), _ARMIJO * dot(gradient, step)
    rounding = 8 * torch.finfo(w.dtype).eps * start.abs()
    t = torch.ones_like(start)
    for _ in range(_HALVINGS):
        trial = w + t * step
        value = loss(trial, *data)
        enough = value <= start + t * fall + rounding
        if bool(enough.all()):
            break
        t = torch.where(enough, t, t / 2)
    return torch.where(enough, trial, w), (enough & (value < start - rounding)).squeeze(-1)


def _solve_positive(matrix: Tensor, right: Tensor) -> Tensor:
    """Return (H + ridge)^-1 g for positive semidefinite H [k, d, d], the ridge at the level of rounding."""
    size = matrix.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(matrix.dtype).tiny)
    ridge = 1e-11 * size
    for _ in range(8):
        shifted = matrix + torch.diag_embed(ridge.unsqueeze(-1).expand(right.shape))
        factor, info = torch.linalg.cholesky_ex(shifted)
        if not bool(info.any()):
            break
        ridge = torch.where(info > 0, 100 * ridge, ridge)
    return torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)


def largest_curvature(curve: Function, start: Tensor, steps: int) -> Tensor:
    """Return the largest |eigenvalue| [..., 1] of the symmetric map `curve`, by `steps` of Lanczos from `start`."""
    tiny = torch.finfo(start.dtype).tiny
    v, before = start / norm(start), torch.zeros_like(start)
    beta, diagonal, beside = torch.zeros_like(v[..., :1]), [], []
    for _ in range(steps):
        u = curve(v) - beta * before
        alpha = dot(u, v)
        u = u - alpha * v
        diagonal.append(alpha)
        beta = norm(u)
        beside.append(beta)
        v, before = u / beta.clamp_min(tiny), v
    off = torch.cat(beside, -1)[..., :-1]
    middle = torch.cat(diagonal, -1)
    matrix = torch.diag_embed(middle) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    values: Tensor = torch.linalg.eigvalsh(matrix)
    return values.abs().amax(-1, keepdim=True)

"""Closed forms of the global and personalised least-squares models of Cheng, Chadha, Duchi (2022).

With S_j = X_j'X_j/n_j every global model is (sum_j p_j g(S_j))^-1 sum_j p_j h(S_j) X_j'y_j/n_j for a spectral
filter g and h(s) = g(s)/s, and every personal model is c + k(S_i) X_i'(y_i - X_i c)/n_i with k(s) = f(s)/s around
a centre c. Both are computed from the n x n Gram matrix, which is small when there are fewer rows than features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coterie.errors import SettingError

Filter = Callable[[Tensor], Tensor]
"""g(s)/s of the eigenvalues s > 0 of a client's X'X/n."""


def average(steps: int = 1, lr: float = 1.0) -> Filter:
    """FedAvg: g = s; with several local gradient steps g = 1 - (1 - lr s)^steps."""
    return _descent(lambda s: torch.ones_like(s), steps, lr)


def maml(alpha: float, steps: int = 1, lr: float = 1.0, first_order: bool = False) -> Filter:
    """MAML-FL: g = s (1 - alpha s)^2, first order s (1 - alpha s); local steps as in `average`."""
    return _descent(lambda s: (1 - alpha * s) ** (1 if first_order else 2), steps, lr)


def proximal(lam: float, steps: int = 1, lr: float = 1.0) -> Filter:
    """pFedMe: g = lam s / (s + lam), a constant times s / (s + lam); local steps as in `average`."""
    return _descent(lambda s: lam / (s + lam), steps, lr)


def nothing(s: Tensor) -> Tensor:
    """No personalisation: f = 0."""
    return torch.zeros_like(s)


def interpolate(s: Tensor) -> Tensor:
    """Fit the client's rows exactly: f = 1."""
    return 1 / s


def ridge(lam: float) -> Filter:
    """Ridge around the centre: f = s / (s + lam)."""
    return lambda s: 1 / (s + lam)


def stopped(lr: float, steps: int) -> Filter:
    """Gradient descent from the centre, stopped: f = 1 - (1 - lr s)^steps."""
    return lambda s: _steps_over(torch.ones_like(s), s, steps, lr) * lr


def centre(
    xs: Sequence[Tensor], ys: Sequence[Tensor], g: Filter, weights: Sequence[float] | None = None
) -> Tensor:
    """The global model of a filter; p_j are the shares of the rows unless `weights` says otherwise.

    Targets may have several columns [n, k], which gives [d, k].
    """
    if not xs or len(xs) != len(ys):
        raise SettingError(f"{len(xs)} blocks of inputs and {len(ys)} of targets; give as many of each")
    shares = [float(len(x)) for x in xs] if weights is None else list(weights)
    d, columns = xs[0].shape[1], ys[0].shape[1:]
    matrix, side = xs[0].new_zeros(d, d), xs[0].new_zeros(d, *columns)
    for x, y, share in zip(xs, ys, shares, strict=True):
        matrix += share * apply(x, x, g)
        side += share * apply(x, y, g)
    solution = torch.linalg.lstsq(matrix, side.view(d, -1), driver="gelsd").solution
    return solution.view(side.shape)


def personal(x: Tensor, y: Tensor, middle: Tensor, f: Filter) -> Tensor:
    """The personal model of a filter around a centre [d] or [d, k]."""
    return middle + apply(x, y - x @ middle, f)


def apply(x: Tensor, target: Tensor, h: Filter) -> Tensor:
    """h(S) X' target / n with S = X'X/n, on the space the rows span, from the n x n side where that is smaller."""
    n, d = x.shape
    small = (x @ x.T if n <= d else x.T @ x) / n
    values, vectors = torch.linalg.eigh(small)
    alive = values > 10 * max(n, d) * torch.finfo(values.dtype).eps * values[-1]
    scale = torch.where(alive, h(values.clamp_min(torch.finfo(values.dtype).tiny)), 0.0)
    columns = target if target.dim() > 1 else target[:, None]
    if n <= d:
        found = x.T @ (vectors @ (scale[:, None] * (vectors.T @ columns))) / n
    else:
        found = vectors @ (scale[:, None] * (vectors.T @ (x.T @ columns))) / n
    return found if target.dim() > 1 else found[:, 0]


def _descent(slope: Filter, steps: int, lr: float) -> Filter:
    """[1 - (1 - lr s slope(s))^steps] / s: `steps` gradient steps on the loss whose gradient filter is s slope."""
    if steps == 1:
        return slope
    return lambda s: _steps_over(slope(s), s, steps, lr)


def _steps_over(slope: Tensor, s: Tensor, steps: int, lr: float) -> Tensor:
    """[1 - (1 - lr s slope)^steps] / (lr s) without cancellation for small s."""
    kept, total = 1 - lr * s * slope, torch.zeros_like(s)
    for _ in range(steps):
        total = 1 + kept * total
    return total * slope

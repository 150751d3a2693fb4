"""Closed forms of the global and personalised least-squares models of Cheng, Chadha, Duchi (2022).

With S_j = X_j'X_j/n_j every global model is (sum_j p_j g(S_j))^-1 sum_j p_j h(S_j) X_j'y_j/n_j for a spectral filter g
and h(s) = g(s)/s, and every personal model is c + k(S_i) X_i'(y_i - X_i c)/n_i with k(s) = f(s)/s around a centre c.
Both are computed from the n x n Gram matrix, which is small when there are fewer rows than features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coterie._core.errors import SettingError

Filter = Callable[[Tensor], Tensor]
"""g(s)/s of the eigenvalues s > 0 of a client's X'X/n."""


def average(steps: int = 1, lr: float = 1.0) -> Filter:
    """Return the filter of FedAvg: g = s; with several local gradient steps g = 1 - (1 - lr s)^steps.

    Parameters
    ----------
    steps
        Local gradient steps per round.
    lr
        Their step size.

    Returns
    -------
    Filter
        g(s)/s.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import filters
    >>> x, y = torch.eye(2), torch.tensor([1.0, 3.0])
    >>> filters.centre([x, x], [y, 3 * y], filters.average()).round(decimals=4).tolist()
    [2.0, 6.0]
    """
    return _descent(lambda s: torch.ones_like(s), steps, lr)


def maml(alpha: float, steps: int = 1, lr: float = 1.0, first_order: bool = False) -> Filter:
    """Return the filter of MAML-FL: g = s (1 - alpha s)^2, or s (1 - alpha s) to first order.

    Parameters
    ----------
    alpha
        Step size of the inner step.
    steps
        Local gradient steps per round, as in `average`.
    lr
        Their step size.
    first_order
        Whether to leave second derivatives out (FO-MAML).

    Returns
    -------
    Filter
        g(s)/s.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import filters
    >>> filters.maml(alpha=0.5)(torch.tensor([1.0])).item()
    0.25
    """
    return _descent(lambda s: (1 - alpha * s) ** (1 if first_order else 2), steps, lr)


def proximal(lam: float, steps: int = 1, lr: float = 1.0) -> Filter:
    """Return the filter of pFedMe: g = lam s / (s + lam).

    Parameters
    ----------
    lam
        Strength of the proximal term.
    steps
        Local gradient steps per round, as in `average`.
    lr
        Their step size.

    Returns
    -------
    Filter
        g(s)/s.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import filters
    >>> filters.proximal(lam=1.0)(torch.tensor([1.0])).item()
    0.5
    """
    return _descent(lambda s: lam / (s + lam), steps, lr)


def nothing(s: Tensor) -> Tensor:
    """Do not personalise: f = 0.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import filters
    >>> filters.nothing(torch.tensor([2.0])).item()
    0.0
    """
    return torch.zeros_like(s)


def interpolate(s: Tensor) -> Tensor:
    """Fit the client's rows exactly: f = 1.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import filters
    >>> filters.interpolate(torch.tensor([2.0])).item()
    0.5
    """
    return 1 / s


def ridge(lam: float) -> Filter:
    """Return the filter of ridge around the centre: f = s / (s + lam).

    Parameters
    ----------
    lam
        Strength of the penalty.

    Returns
    -------
    Filter
        f(s)/s.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import filters
    >>> filters.ridge(lam=1.0)(torch.tensor([1.0])).item()
    0.5
    """
    return lambda s: 1 / (s + lam)


def stopped(lr: float, steps: int) -> Filter:
    """Return the filter of gradient descent from the centre, stopped early: f = 1 - (1 - lr s)^steps.

    Parameters
    ----------
    lr
        Step size.
    steps
        Number of steps.

    Returns
    -------
    Filter
        f(s)/s.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import filters
    >>> filters.stopped(lr=0.5, steps=2)(torch.tensor([1.0])).item()
    0.75
    """
    return lambda s: _steps_over(torch.ones_like(s), s, steps, lr) * lr


def centre(
    xs: Sequence[Tensor], ys: Sequence[Tensor], g: Filter, weights: Sequence[float] | None = None
) -> Tensor:
    """Return the global model of a filter.

    Parameters
    ----------
    xs
        Inputs of each client, [rows, d].
    ys
        Targets of each client, [rows], or [rows, k] for several targets.
    g
        The filter, such as `average()`.
    weights
        Weight p_j of each client, by default its number of rows.

    Returns
    -------
    Tensor
        The model, [d] or [d, k].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import filters
    >>> x = torch.eye(2)
    >>> found = filters.centre([x, x], [torch.zeros(2), torch.ones(2)], filters.average(), weights=[1.0, 3.0])
    >>> found.round(decimals=4).tolist()
    [0.75, 0.75]
    """
    if not xs or len(xs) != len(ys):
        raise SettingError(f"{len(xs)} blocks of inputs and {len(ys)} of targets; give as many of each")
    shares = [float(len(x)) for x in xs] if weights is None else list(weights)
    d, columns = xs[0].shape[1], ys[0].shape[1:]
    matrix, side = xs[0].new_zeros(d, d), xs[0].new_zeros(d, *columns)
    for x, y, share in zip(xs, ys, shares, strict=True):
        matrix += share * apply(x, x, g)
        side += share * apply(x, y, g)
    solution: Tensor = torch.linalg.lstsq(matrix, side.view(d, -1), driver="gelsd").solution
    return solution.view(side.shape)


def personal(x: Tensor, y: Tensor, middle: Tensor, f: Filter) -> Tensor:
    """Return the personal model of a filter around a centre.

    Parameters
    ----------
    x
        The client's inputs, [rows, d].
    y
        The client's targets, [rows] or [rows, k].
    middle
        The centre, [d] or [d, k].
    f
        The filter, such as `ridge(1.0)`.

    Returns
    -------
    Tensor
        The model, [d] or [d, k].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import filters
    >>> x, y = torch.eye(2), torch.tensor([1.0, 3.0])
    >>> filters.personal(x, y, torch.zeros(2), filters.ridge(0.5)).tolist()
    [0.5, 1.5]
    """
    return middle + apply(x, y - x @ middle, f)


def apply(x: Tensor, target: Tensor, h: Filter) -> Tensor:
    """Return h(S) X' target / n with S = X'X/n, on the space that the rows span.

    Parameters
    ----------
    x
        Inputs X, [n, d].
    target
        Targets, [n] or [n, k].
    h
        The filter divided by s.

    Returns
    -------
    Tensor
        [d] or [d, k], computed from X X' or X'X, whichever is smaller.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import filters
    >>> filters.apply(2 * torch.eye(2), torch.tensor([2.0, 6.0]), filters.interpolate).tolist()
    [1.0, 3.0]
    """
    n, d = x.shape
    small = (x @ x.T if n <= d else x.T @ x) / n
    values, vectors = torch.linalg.eigh(small)
    alive = values > 10 * max(n, d) * torch.finfo(values.dtype).eps * values[-1]
    scale = torch.where(alive, h(values.clamp_min(torch.finfo(values.dtype).tiny)), 0.0)
    columns = target if target.dim() > 1 else target[:, None]
    found: Tensor
    if n <= d:
        found = x.T @ (vectors @ (scale[:, None] * (vectors.T @ columns))) / n
    else:
        found = vectors @ (scale[:, None] * (vectors.T @ (x.T @ columns))) / n
    return found if target.dim() > 1 else found[:, 0]


def _descent(ratio: Filter, steps: int, lr: float) -> Filter:
    """Return [1 - (1 - lr s ratio(s))^steps] / s: `steps` gradient steps on the loss whose filter is s ratio(s)."""
    if steps == 1:
        return ratio
    return lambda s: _steps_over(ratio(s), s, steps, lr)


def _steps_over(ratio: Tensor, s: Tensor, steps: int, lr: float) -> Tensor:
    """Return [1 - (1 - lr s ratio)^steps] / (lr s) without cancellation for small s."""
    kept, total = 1 - lr * s * ratio, torch.zeros_like(s)
    for _ in range(steps):
        total = 1 + kept * total
    return total * ratio

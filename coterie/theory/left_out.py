"""The shared least-squares model without one client's rows, and what tuning it would give that client.

With A = sum_j X_j'X_j and b = sum_j X_j'y_j, which the server knows, client i computes the others' model
c = (A - A_i)^+ (b - b_i) itself. The shared model and ridge around it are linear in e = y_i - X_i c, so their
expected risks follow from the variance of the client's deviation from c and of its noise, with nothing approximated:

    ridge around the shared model:  deviation left over  P Q,  noise passed on  F + P A^+
    ridge around zero:              deviation left over  P,    noise passed on  F

with F = (A_i + n lam)^+, P = I - F A_i, Q = I - A^+ A_i. Works on any number of clients before the last two axes.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TINY = 1e-10  # eigenvalues below this share of the largest count as zero


def model(matrix: Tensor, side: Tensor, own: Tensor, own_side: Tensor) -> Tensor:
    """Return the others' least-squares model of smallest norm, [..., d].

    Parameters
    ----------
    matrix
        A, the sum over all clients, [..., d, d].
    side
        b, the sum over all clients, [..., d].
    own
        A_i of the client, [..., d, d].
    own_side
        b_i of the client, [..., d].

    Returns
    -------
    Tensor
        c, [..., d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import left_out
    >>> left_out.model(torch.tensor([[3.0]]), torch.tensor([5.0]), torch.tensor([[1.0]]), torch.tensor([1.0])).tolist()
    [2.0]
    """
    return (inverse(matrix - own) @ (side - own_side).unsqueeze(-1)).squeeze(-1)


def inverse(matrix: Tensor) -> Tensor:
    """Return the pseudo-inverse of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    alive = values > _TINY * values[..., -1:].clamp_min(torch.finfo(values.dtype).tiny)
    scale = torch.where(alive, 1 / torch.where(alive, values, 1.0), 0.0)
    found: Tensor = (vectors * scale.unsqueeze(-2)) @ vectors.mT
    return found


def curves(matrix: Tensor, own: Tensor, count: Tensor, total: Tensor, lam: Tensor) -> Tensor:
    """Return the risk per unit of deviation (variance of a coordinate) and of noise for each penalty, [..., 4, L].

    Rows: around the shared model (deviation, noise), around zero (deviation, noise). The covariance of the
    features is that of the other clients.

    Parameters
    ----------
    matrix
        A, the sum over all clients, [..., d, d].
    own
        A_i of the client, [..., d, d].
    count
        Rows of the client, [..., 1].
    total
        Rows of all clients.
    lam
        Penalties, [L].

    Returns
    -------
    Tensor
        [..., 4, L].
    """
    values, basis = torch.linalg.eigh(own)
    alive = values > _TINY * values[..., -1:].clamp_min(torch.finfo(values.dtype).tiny)
    values = torch.where(alive, values, 0.0)
    solved = _turned(basis, inverse(matrix))
    covariance = _turned(basis, matrix - own) / (total - count).unsqueeze(-1)
    held = solved * values.unsqueeze(-2)  # A^+ A_i in the eigenbasis of A_i
    left = torch.eye(own.shape[-1], dtype=own.dtype, device=own.device) - held
    deviation, passed = left @ left.mT * covariance, held @ solved * covariance
    cross, spread = solved * covariance, covariance.diagonal(dim1=-2, dim2=-1)
    f = _filter(values, alive, count, lam)
    p = 1 - f * values.unsqueeze(-2)
    alone = torch.stack(
        [(p.square() * spread.unsqueeze(-2)).sum(-1), (f.square() * (values * spread).unsqueeze(-2)).sum(-1)],
        -2,
    )
    shared_noise = alone[..., 1, :] + 2 * _form(f * values.unsqueeze(-2), cross, p) + _form(p, passed, p)
    return torch.cat([torch.stack([_form(p, deviation, p), shared_noise], -2), alone], -2)


def shift(matrix: Tensor, own: Tensor, count: Tensor) -> Tensor:
    """Return how much more the client's covariance differs from the others' than chance explains, [..., 1].

    With G = C^-1 A_i for the others' C, d tr(G^2) / tr(G)^2 is about 1 + d/n if the covariances are proportional.

    Parameters
    ----------
    matrix
        A, the sum over all clients, [..., d, d].
    own
        A_i of the client, [..., d, d].
    count
        Rows of the client, [..., 1].

    Returns
    -------
    Tensor
        [..., 1], about 0 without a shift.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory import left_out
    >>> others, own = 300 * torch.eye(2), torch.diag(torch.tensor([5.0, 195.0]))
    >>> round(left_out.shift(others + own, own, torch.tensor([100.0])).item(), 2)
    0.88
    """
    d = own.shape[-1]
    relative = inverse(matrix - own) @ own
    trace = relative.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    square = (relative * relative.mT).sum((-1, -2)).unsqueeze(-1)
    return d * square / trace.square().clamp_min(torch.finfo(own.dtype).tiny) - 1 - d / count


def _filter(values: Tensor, alive: Tensor, count: Tensor, lam: Tensor) -> Tensor:
    """Return 1 / (eigenvalue + n lam), [..., L, d]; 0 on directions without rows, as for infinite lam."""
    shifted = values.unsqueeze(-2) + (count * lam).unsqueeze(-1)
    known = alive.unsqueeze(-2) & torch.isfinite(shifted)
    return torch.where(known, 1 / torch.where(known, shifted, 1.0), 0.0)


def _turned(basis: Tensor, matrix: Tensor) -> Tensor:
    """Return the matrix in another basis."""
    return basis.mT @ matrix @ basis


def _form(a: Tensor, matrix: Tensor, b: Tensor) -> Tensor:
    """Return a' M b for every penalty, [..., L]."""
    return ((a @ matrix) * b).sum(-1)

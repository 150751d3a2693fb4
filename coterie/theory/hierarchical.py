"""Exact minimisers of least squares in known clusters: personal models, cluster centres and a common centre.

Lyu, Hanzely, Kolar, "Personalized Federated Learning with Multiple Known Clusters" (2022). Shapes: models
[n, d], numbers per client [n, 1], numbers per cluster [k, 1]; a client's loss is 1/2 t'At - b't + const.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.theory.cluster_penalty import Penalty
from coterie.theory.groups import group_sum


@dataclass(frozen=True)
class Hierarchy:
    """Minimiser of the multi-task form.

    Parameters
    ----------
    models
        Models of the clients, [n, d].
    centres
        Centres of the clusters, [k, d].
    common
        The common centre, [d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.hierarchical import minimise
    >>> a, b, one = torch.ones(2, 1, 1), torch.tensor([[0.0], [4.0]]), torch.ones(2, 1)
    >>> found = minimise(a, b, torch.tensor([0, 0]), within=one, between=one[:1])
    >>> found.centres.tolist(), found.common.tolist()
    ([[2.0]], [2.0])
    """

    models: Tensor
    centres: Tensor
    common: Tensor


def lift(a: Tensor, b: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Minimise over t: 1/2 t'At - b't + |t - w|^2 / (2 spread) = 1/2 w'Hw - g'w + const, and return H and g.

    Parameters
    ----------
    a
        A, [..., d, d].
    b
        b, [..., d].
    spread
        Inverse of the strength that ties t to w, [..., 1] or [..., d] (one per coordinate), or a covariance
        [..., d, d]; 0 makes t equal to w, infinity (in all coordinates) unties them, so that nothing is said about w.

    Returns
    -------
    tuple of Tensor
        H [..., d, d] and g [..., d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.hierarchical import lift
    >>> h, g = lift(torch.eye(1), torch.ones(1), spread=torch.ones(1))
    >>> h.item(), g.item()
    (0.5, 0.5)
    """
    tied, s = tied_covariance(spread, b)
    identity = torch.eye(b.shape[-1], dtype=a.dtype, device=a.device)
    both = torch.linalg.solve(identity + scaled(s, a).mT, torch.cat([a, b.unsqueeze(-1)], -1))
    both = both * tied.unsqueeze(-1)
    h = both[..., :-1]
    return 0.5 * (h + h.mT), both[..., -1]


def settle(a: Tensor, b: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    """Return the t of `lift` for a given w: (I + spread A)^-1 (spread b + w), or A^+ b where nothing ties it to w.

    Parameters
    ----------
    a
        A, [..., d, d].
    b
        b, [..., d].
    centre
        w, [..., d].
    spread
        As in `lift`.

    Returns
    -------
    Tensor
        t, [..., d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.hierarchical import settle
    >>> settle(torch.eye(1), torch.ones(1), centre=torch.zeros(1), spread=torch.ones(1)).item()
    0.5
    """
    tied, s = tied_covariance(spread, b)
    identity = torch.eye(b.shape[-1], dtype=a.dtype, device=a.device)
    right = scaled(s, b.unsqueeze(-1)) + centre.unsqueeze(-1)
    t = torch.linalg.solve(identity + scaled(s, a), right).squeeze(-1)
    return t if bool(tied.all()) else torch.where(tied, t, pseudo_solve(a, b))


def centres(h: Tensor, g: Tensor, clusters: Tensor, between: Tensor) -> tuple[Tensor, Tensor]:
    """Return cluster centres and the common centre from the clients' `lift`.

    Parameters
    ----------
    h
        H of each client, [n, d, d].
    g
        g of each client, [n, d].
    clusters
        Cluster of each client, [n].
    between
        1 / lambda_j, [k, 1 or d].

    Returns
    -------
    tuple of Tensor
        Cluster centres [k, d] and the common centre [d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.hierarchical import centres
    >>> h, g = torch.ones(2, 1, 1), torch.tensor([[1.0], [3.0]])
    >>> [part.tolist() for part in centres(h, g, torch.tensor([0, 1]), between=torch.ones(2, 1))]
    [[[1.5], [2.5]], [2.0]]
    """
    k = len(between)
    h, g = group_sum(h, clusters, k), group_sum(g, clusters, k)
    above, right = lift(h, g, between)
    common = pseudo_solve(above.sum(0), right.sum(0))
    return settle(h, g, common, between), common


def certainty(h: Tensor, clusters: Tensor, between: Tensor) -> Tensor:
    """Return the inverse covariances [k, d, d] of the cluster centres given all rows.

    The clients of a cluster inform about its centre, and so do the other clusters, as far as the common centre
    ties them.

    Parameters
    ----------
    h
        H of each client, from `lift`, [n, d, d].
    clusters
        Cluster of each client, [n].
    between
        1 / lambda_j, [k, 1 or d].

    Returns
    -------
    Tensor
        [k, d, d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.hierarchical import certainty
    >>> untied = torch.full((2, 1), torch.inf)
    >>> certainty(torch.ones(3, 1, 1), torch.tensor([0, 0, 1]), between=untied).flatten().tolist()
    [2.0, 1.0]
    """
    h = group_sum(h, clusters, len(between))
    nothing = torch.zeros_like(h[..., 0])
    about_common, _ = lift(h, nothing, between)
    from_others, _ = lift(about_common.sum(0) - about_common, nothing, between)
    return h + from_others


def minimise(a: Tensor, b: Tensor, clusters: Tensor, within: Tensor, between: Tensor) -> Hierarchy:
    """Minimise losses 1/2 t'At - b't in the multi-task form by block elimination: n + k + 1 systems of size d.

    With A = X'X / sigma^2 and b = X'y / sigma^2, `within` and `between` are the variances of the hierarchical
    linear model.

    Parameters
    ----------
    a
        A of each client, [n, d, d].
    b
        b of each client, [n, d].
    clusters
        Cluster of each client, [n].
    within
        1 / gamma_i, [n, 1 or d].
    between
        1 / lambda_j, [k, 1 or d].

    Returns
    -------
    Hierarchy
        The minimiser; where it is not unique, the one whose centres have the smallest norm.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.hierarchical import minimise
    >>> a, b, one = torch.ones(2, 1, 1), torch.tensor([[0.0], [4.0]]), torch.ones(2, 1)
    >>> minimise(a, b, torch.tensor([0, 0]), within=one, between=one[:1]).models.tolist()
    [[1.0], [3.0]]
    """
    middle, common = centres(*lift(a, b, within), clusters, between)
    return Hierarchy(settle(a, b, middle[clusters], within), middle, common)


def minimiser(a: Tensor, b: Tensor, penalty: Penalty) -> Hierarchy:
    """Return `minimise` for a penalty in the form of regularised averages.

    Parameters
    ----------
    a
        A of each client, [n, d, d].
    b
        b of each client, [n, d].
    penalty
        The penalty.

    Returns
    -------
    Hierarchy
        The minimiser.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.cluster_penalty import Penalty
    >>> from coterie.theory.hierarchical import minimiser
    >>> a, b = torch.ones(2, 1, 1, dtype=torch.float64), torch.tensor([[0.0], [4.0]], dtype=torch.float64)
    >>> minimiser(a, b, Penalty.of([0, 0], gamma=1.0, alpha=0.5)).models.tolist()
    [[1.0], [3.0]]
    """
    return minimise(a, b, penalty.clusters, _inverted(penalty.gamma, a), _inverted(penalty.lambda_, a))


def _inverted(strength: Tensor, like: Tensor) -> Tensor:
    """Return 1 / strength in the type of `like`; a strength without an inverse there ties nothing."""
    return (1 / strength).to(like).nan_to_num(posinf=torch.inf)


def tied_covariance(spread: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return which t are tied to their w at all, [..., 1], and the variances [..., d] or covariances of the others.

    Variances beyond the square root of the largest number untie as infinity does: their products would overflow.
    """
    most = torch.finfo(b.dtype).max ** 0.5
    spread = spread.to(b.dtype)
    if spread.dim() == b.dim() + 1 and spread.shape[-2:] == (b.shape[-1], b.shape[-1]):
        tied = (spread.abs() < most).all(-1).all(-1, keepdim=True)
        return tied, torch.where(tied.unsqueeze(-1), spread, 0.0)
    tied = (spread < most).all(-1, keepdim=True)
    return tied, torch.where(tied, spread, 0.0).expand(b.shape)


def pseudo_solve(a: Tensor, b: Tensor) -> Tensor:
    """Return A^+ b for symmetric A >= 0 [..., d, d] and b [..., d]."""
    inverse, vectors = _inverse_spectrum(a)
    return times(vectors, inverse * times(vectors.mT, b))


def pseudo_inverse(a: Tensor) -> Tensor:
    """Return A^+ for symmetric A >= 0 [..., d, d]."""
    inverse, vectors = _inverse_spectrum(a)
    return vectors * inverse.unsqueeze(-2) @ vectors.mT


def _inverse_spectrum(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of A^+ [..., d] and its eigenvectors; those of A near 0 count as 0."""
    values, vectors = torch.linalg.eigh(a)
    top = values[..., -1:].clamp(min=torch.finfo(values.dtype).tiny)
    inverse = torch.where(values > 10 * a.shape[-1] * torch.finfo(values.dtype).eps * top, 1 / values, 0.0)
    return inverse, vectors


def scaled(spread: Tensor, matrix: Tensor) -> Tensor:
    """Return S M for variances [..., d] or covariances [..., d, d] and matrices [..., d, e]."""
    return spread.unsqueeze(-1) * matrix if spread.dim() < matrix.dim() else spread @ matrix


def times(a: Tensor, v: Tensor) -> Tensor:
    """Return A v for stacks of matrices [..., d, d] and vectors [..., d]."""
    return (a @ v.unsqueeze(-1)).squeeze(-1)


def pulled_share(a: Tensor, spread: Tensor) -> Tensor:
    """Return the share of each client's model that comes from its centre: the mean of diag (I + S A)^-1, [n].

    Parameters
    ----------
    a
        A, what the client's rows say about its parameters, in units of the noise, [n, d, d].
    spread
        S, variances around the centre [n, d], or covariances [n, d, d].

    Returns
    -------
    Tensor
        The mean over the parameters that vary; 1 if none does.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.hierarchical import pulled_share
    >>> pulled_share(torch.tensor([[[3.0]], [[0.0]]]), torch.ones(2, 1)).tolist()
    [0.25, 1.0]
    """
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    left = torch.linalg.solve(identity + scaled(spread, a), identity.expand(a.shape))
    varies = (spread if spread.dim() == 2 else spread.diagonal(dim1=-2, dim2=-1)) > 0
    shares = torch.where(varies, left.diagonal(dim1=-2, dim2=-1).clamp(0, 1), 0.0).sum(-1)
    return torch.where(varies.any(-1), shares / varies.sum(-1).clamp(min=1), 1.0)

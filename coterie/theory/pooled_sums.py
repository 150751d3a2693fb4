"""Who may pool rows? Clusters of clients from sums over rows, and the models that held-out rows prefer.

The rows of a client are dealt to folds. It sends H and b of each fold: curvature and slope of the quadratic loss
w'H w/2 - b'w (`coterie.theory.pooled_tree`). From these sums the server computes what any group would fit, with or
without a fold, and how much chance alone makes clients differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.theory.pooled_tree import HEAVIEST, apart, columns, joined, least_losses

BARS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 1e9)  # times the best cut through chance; the last joins all
WIDE_BARS = (*BARS[:-1], 3.0, 5.0, 8.0, 14.0, 24.0, 40.0, BARS[-1])  # if members have models of their own
USUAL = 2.0  # the bar if no rows can be held out
CLEAR = 2.0  # standard errors that are given to chance
NEAR, NEAR_PULLED = 0.5, 1.0  # standard errors within which the largest bar is taken
ENOUGH = 2  # rows for each parameter that are left when some are held out
EXACT = 1e-7  # of what models explain: less noise than that is rounding
RIDGE, TRIAL_RIDGE = 1e-3, 1e-2  # of the information of one row


def dispersion(hessians: Tensor, slopes: Tensor, labels: Tensor, ridge: Tensor) -> float:
    """Return phi: how much gradients of folds vary at their cluster's best model, in units of their curvature.

    At the minimiser of a cluster with curvature H the gradient of a fold with curvature C has the covariance
    phi (C - C H^-1 C), so that phi is the sum of g'H^-1 g divided by tr(H^-1 C) - tr(H^-1 C H^-1 C), summed over folds.
    Clusters are weighted by their folds, and none counts for more than ten times the median.

    Parameters
    ----------
    hessians
        Sums of each fold, [n, folds, d, d].
    slopes
        Sums of each fold, [n, folds, d].
    labels
        Cluster of each client, [n].
    ridge
        Small curvature, [d].

    Returns
    -------
    float
        phi; 0 if every cluster is one fold.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pooled_sums import dispersion
    >>> curves, pulls = torch.ones(1, 2, 1, 1).double(), torch.tensor([[[3.0], [1.0]]]).double()
    >>> round(dispersion(curves, pulls, torch.zeros(1, dtype=torch.long), torch.zeros(1)), 2)
    2.0
    """
    inverse, best = _solved(hessians.sum(1), slopes.sum(1), labels, ridge)
    grads = hessians @ best[labels].unsqueeze(1) - columns(slopes, hessians)
    spread = torch.einsum("nfik,nij,nfjk->n", grads, inverse[labels], grads) / grads.shape[-1]
    share = inverse[labels].unsqueeze(1) @ hessians
    trace = share.diagonal(dim1=-2, dim2=-1).sum((-2, -1))
    room = trace - (share * share.mT).sum((-3, -2, -1))
    pieces = (hessians.abs().amax((-2, -1)) > 0).sum(1).double()
    count = len(inverse)
    spread, room, pieces = (
        torch.zeros(count, dtype=torch.float64).index_add_(0, labels, each.double())
        for each in (spread, room, pieces)
    )
    known = room > 0.1
    if not known.any():
        return 0.0
    found, weight = (spread / room)[known], (pieces * room)[known]
    return float((found.clamp(max=HEAVIEST * found.median()) * weight).sum() / weight.sum())


def excess(hessians: Tensor, slopes: Tensor, labels: Tensor, ridge: Tensor, least: float = 0.0) -> Tensor:
    """Return how much members of each cluster differ beyond chance: their variance in units of that of a client's fit.

    Sharing one model costs the members R times what chance explains. R - 1 is returned, less two standard errors, and 0
    where that is negative. The best pull of each to the mean is the loss's curvature divided by it.

    Parameters
    ----------
    hessians
        Sums of each fold, [n, folds, d, d].
    slopes
        Sums of each fold, [n, folds, d].
    labels
        Cluster of each client, [n].
    ridge
        Small curvature, [d].
    least
        The dispersion is not less than this.

    Returns
    -------
    Tensor
        [clusters].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pooled_sums import excess
    >>> curves, wiggle = torch.ones(4, 2, 1, 1).double(), torch.tensor([-0.1, 0.1]).view(1, 2, 1).double()
    >>> slopes = torch.tensor([0.0, 9.0, 0.0, 0.1]).view(4, 1, 1).double() + wiggle
    >>> far, near = excess(curves, slopes, torch.tensor([0, 0, 1, 1]), torch.zeros(1)).tolist()
    >>> far > 100, near
    (True, 0.0)
    """
    phi = max(least, dispersion(hessians, slopes, torch.arange(len(labels)), ridge))
    if phi == 0:
        return torch.zeros(int(labels.max()) + 1, dtype=torch.float64)
    curves, pulls = hessians.sum(1), slopes.sum(1)
    inverse, best = _solved(curves, pulls, labels, ridge)
    own, alone = _solved(curves, pulls, torch.arange(len(labels)), ridge)
    cost, filled = torch.zeros_like(best[:, 0, 0]), torch.zeros_like(best[:, 0, 0])
    cost.index_add_(0, labels, ((alone - best[labels]).squeeze(-1) * pulls).sum(1))
    ranks = (own @ curves).diagonal(dim1=-2, dim2=-1).sum(-1)
    filled.index_add_(0, labels, ranks - (inverse[labels] @ curves).diagonal(dim1=-2, dim2=-1).sum(-1))
    filled = filled.clamp(min=1e-12)
    found = cost / (phi * filled) - 1 - CLEAR * (2 / filled).sqrt()
    return torch.where(filled > 0.5, found, 0.0).clamp(min=0)


def shrunken(hessians: Tensor, slopes: Tensor, labels: Tensor, differ: Tensor, ridge: Tensor) -> Tensor:
    """Return the models of clients that are pulled to the best model of their cluster, the less the more they differ.

    With H the mean curvature of the members and e what `excess` returns, client i minimises its loss plus the quadratic
    with curvature H/e around the cluster's model: the posterior mean in a normal hierarchy. With e = 0 that is the
    cluster's model.

    Parameters
    ----------
    hessians
        Sums of each fold, [n, folds, d, d].
    slopes
        Sums of each fold, [n, folds, d].
    labels
        Cluster of each client, [n].
    differ
        What `excess` returns, [clusters].
    ridge
        Small curvature, [d].

    Returns
    -------
    Tensor
        [n, d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pooled_sums import shrunken
    >>> curves, slopes, one = torch.ones(2, 1, 1, 1), torch.tensor([0.0, 4.0]).view(2, 1, 1), torch.tensor([0, 0])
    >>> [shrunken(curves, slopes, one, torch.tensor([e]), torch.zeros(1)).flatten().tolist() for e in (0.0, 1.0)]
    [[2.0, 2.0], [1.0, 3.0]]
    """
    curves, pulls = hessians.sum(1), slopes.sum(1)
    centre = _solved(curves, pulls, labels, ridge)[1][labels].squeeze(-1)
    count = torch.bincount(labels).to(curves)
    mean = curves.new_zeros(len(count), *curves.shape[1:]).index_add_(0, labels, curves) / count.view(
        -1, 1, 1
    )
    mean = (mean + torch.diag(ridge.to(mean)))[labels]
    e = differ[labels].to(curves).view(-1, 1, 1)
    target = e.squeeze(-1) * pulls + (mean @ centre.unsqueeze(-1)).squeeze(-1)
    found: Tensor = torch.linalg.solve(e * curves + mean, target.unsqueeze(-1)).squeeze(-1)
    return found


def pooled_clusters(
    hessians: Tensor, slopes: Tensor, rows: Tensor, pulled: bool = False, least: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the clusters that held-out folds choose, the best model of each, and how much its members differ.

    For each of `BARS` there are clusters, from much apart to much together. They are made anew without each fold, and
    the loss on that fold of the models so found says which bar is best; a larger one is taken if it is hardly worse.
    Rows of a client are held out only if two for each parameter are left; if nobody has so many, the bar is 2.

    If members are pulled, clusters may be wide (`WIDE_BARS`): clients that differ by more than chance still gain by a
    weak pull to what they have in common.

    Parameters
    ----------
    hessians
        Sums of each fold, [n, folds, d, d].
    slopes
        Sums of each fold, [n, folds, d].
    rows
        Number of rows of each client, [n].
    pulled
        Members need not share the model of their cluster: what is judged are the models that `shrunken` returns.
    least
        The dispersion that the model has at least, 1 for classes and counts. Clients with few rows for each parameter
        fit them almost exactly and would seem to have none, so that they all seemed to differ.

    Returns
    -------
    tuple of Tensor
        Cluster of each client, int64 [n]; models [clusters, d]; what `excess` returns [clusters]; and how far from its
        cluster's model a client's own is, [n, d], zero unless members are pulled and differ.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pooled_sums import pooled_clusters
    >>> slopes = torch.tensor([0.0, 0.1, 5.0, 5.1]).view(4, 1, 1) + torch.tensor([-0.1, 0.1]).view(1, 2, 1)
    >>> labels, models, *_ = pooled_clusters(torch.ones(4, 2, 1, 1), slopes, torch.full((4,), 4.0))
    >>> labels.tolist(), models.flatten().round(decimals=2).tolist()
    ([0, 0, 1, 1], [0.05, 5.05])
    """
    hessians, slopes = hessians.double(), slopes.double()
    pieces = (hessians.abs().amax((-2, -1)) > 0).sum(1).clamp(min=1)
    ridge = _ridge(hessians, rows)
    several = rows.double() * (1 - 1 / pieces) >= ENOUGH * _rank(hessians, ridge)
    bars = WIDE_BARS if pulled else BARS
    losses = torch.zeros(len(bars), *hessians.shape[:2], dtype=torch.float64)
    for fold in range(hessians.shape[1]):
        held, pull = (part[:, fold] * _wide(several, part[:, fold]) for part in (hessians, slopes))
        left, pulls = hessians.clone(), slopes.clone()
        left[several, fold], pulls[several, fold] = 0.0, 0.0
        done: dict[tuple[int, ...], Tensor] = {}  # several bars often give the same clusters
        for k, labels in enumerate(_by_bar(left, pulls, ridge, bars, least=least)):
            same = tuple(labels.tolist())
            if same not in done:
                trial = ridge * (TRIAL_RIDGE / RIDGE)
                differ = excess(left, pulls, labels, trial, least) * pulled
                model = shrunken(left, pulls, labels, differ, trial)
                done[same] = torch.einsum("ni,nij,nj->n", model, held, model) / 2 - (pull * model).sum(1)
            losses[k, :, fold] = done[same]
    flat = losses.flatten(1)
    more = flat - flat[flat.sum(1).argmin()]
    near = more.sum(1) <= (NEAR_PULLED if pulled else NEAR) * more.std(1) * flat.shape[1] ** 0.5
    best = int(near.nonzero().max()) if several.any() else bars.index(USUAL)
    labels = _by_bar(hessians, slopes, ridge, bars, least=least)[best]
    prior = 4 * ridge / RIDGE if least else ridge  # classes that can be told apart have no finite best model
    models = _solved(hessians.sum(1), slopes.sum(1), labels, prior)[1].squeeze(-1)
    differ = excess(hessians, slopes, labels, ridge, least)
    own = shrunken(hessians, slopes, labels, differ * pulled, ridge) - models[labels]
    return labels, models, differ, torch.where((differ * pulled > 0)[labels].unsqueeze(1), own, 0.0)


def clear_clusters(hessians: Tensor, slopes: Tensor, rows: Tensor) -> Tensor:
    """Return clusters that are apart by far more than chance explains; nothing is held out.

    If most clients have fewer than two rows for each parameter, nothing is clear, and all are one cluster.

    Parameters
    ----------
    hessians
        Sums of each fold, [n, folds, d, d].
    slopes
        Sums of each fold, [n, folds, d] or [n, folds, d, outputs].
    rows
        Number of rows of each client, [n].

    Returns
    -------
    Tensor
        Cluster of each client, int64 [n].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pooled_sums import clear_clusters
    >>> slopes = torch.tensor([0.0, 0.1, 5.0, 5.1]).view(4, 1, 1) + torch.tensor([-0.1, 0.1]).view(1, 2, 1)
    >>> clear_clusters(torch.ones(4, 2, 1, 1), slopes, torch.full((4,), 4.0)).tolist()
    [0, 0, 1, 1]
    """
    hessians, slopes = hessians.double(), slopes.double()
    if float(rows.median()) < ENOUGH * hessians.shape[-1]:
        return torch.zeros(len(rows), dtype=torch.long)
    ridge = _ridge(hessians, rows)
    return _by_bar(hessians, slopes, ridge, (USUAL,), filled_dimensions(hessians, slopes, ridge))[0]


def filled_dimensions(hessians: Tensor, slopes: Tensor, ridge: Tensor) -> float:
    """Return how many dimensions the noise of gradients fills: (tr S)^2 / tr S^2, S their covariance.

    With u the gradients of folds at their clients' best models, in the metric of information and of length 1, it is one
    over the mean of <u, u'>^2 over folds of two clients. Errors of several outputs are far from independent.

    Parameters
    ----------
    hessians
        Sums of each fold, [n, folds, d, d].
    slopes
        Sums of each fold, [n, folds, d] or [n, folds, d, outputs].
    ridge
        Small curvature, [d].

    Returns
    -------
    float
        The number.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pooled_sums import filled_dimensions
    >>> draw = torch.Generator().manual_seed(0)
    >>> slopes = torch.randn(200, 2, 3, 1, generator=draw, dtype=torch.float64)
    >>> curves, ridge = torch.eye(3).double().expand(200, 2, 3, 3), torch.zeros(3)
    >>> [round(filled_dimensions(curves, slopes.repeat(1, 1, 1, k), ridge)) for k in (1, 4)]
    [3, 3]
    """
    n = len(hessians)
    inverse, best = _solved(hessians.sum(1), slopes.sum(1), torch.arange(n), ridge)
    grads = hessians @ best.unsqueeze(1) - columns(slopes, hessians)
    metric = torch.linalg.cholesky((inverse + inverse.mT) / 2).mT.unsqueeze(1)
    rows = (metric @ grads).flatten(2)
    size = rows.square().sum(-1)
    rows = (rows / size.sqrt().clamp(min=1e-150).unsqueeze(-1))[size > 0]
    owner = torch.arange(n).unsqueeze(1).expand(size.shape)[size > 0]
    across = (rows @ rows.T).square()[owner.unsqueeze(1) != owner]
    return 1 / float(across.mean()) if len(across) else 1.0


def _ridge(hessians: Tensor, rows: Tensor) -> Tensor:
    """Return a small part of what one row tells, [d]."""
    one_row = hessians.sum((0, 1)).diagonal() / rows.double().sum()
    return (RIDGE * one_row).clamp(min=1e-12 * float(one_row.max().clamp(min=1e-288)))


def _rank(hessians: Tensor, ridge: Tensor) -> int:
    """Return how many directions of the parameters change the loss: a softmax has as many too many as inputs."""
    curve = hessians.sum((0, 1))
    return max(1, round(float(torch.linalg.solve(curve + torch.diag(ridge.to(curve)), curve).trace())))


def _by_bar(
    hessians: Tensor,
    slopes: Tensor,
    ridge: Tensor,
    bars: tuple[float, ...],
    filled: float | None = None,
    least: float = 0.0,
) -> list[Tensor]:
    """Return clusters for each bar."""
    n, d = len(slopes), _rank(hessians, ridge) * (slopes[0, 0].numel() // slopes.shape[2])
    everyone = torch.zeros(n, dtype=torch.long)
    curves, pulls = hessians.sum(1), slopes.sum(1)
    tree = joined(curves, pulls, ridge)
    noiseless = EXACT * float(-2 * least_losses(curves, pulls, ridge).mean()) / d
    first = dispersion(hessians, slopes, torch.arange(n), ridge) or dispersion(
        hessians, slopes, everyone, ridge
    )
    found: list[Tensor] = []
    known: dict[tuple[int, ...], float] = {}
    for bar in bars:
        labels = apart(tree, max(first, noiseless, least), d, bar, filled)
        same = tuple(labels.tolist())
        if same not in known:
            known[same] = dispersion(hessians, slopes, labels, ridge) or first
        found.append(apart(tree, max(known[same], noiseless, least), d, bar, filled))
    return found


def _solved(hessians: Tensor, slopes: Tensor, labels: Tensor, ridge: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each cluster the inverse of its curvature, [k, d, d], and its best model, [k, d, outputs]."""
    slopes, count = columns(slopes, hessians), int(labels.max()) + 1
    sums = hessians.new_zeros(count, *hessians.shape[1:]).index_add_(0, labels, hessians)
    pulls = slopes.new_zeros(count, *slopes.shape[1:]).index_add_(0, labels, slopes)
    inverse = torch.linalg.inv(sums + torch.diag(ridge.to(sums)))
    return inverse, inverse @ pulls


def _wide(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *(1 for _ in like.shape[1:])).to(like)

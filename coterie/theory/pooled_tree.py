"""A tree of clients from quadratic losses: which groups lose least by pooling their rows, in the metric of information.

Client i has the loss w'H_i w/2 - b_i'w, exactly for least squares and near its fit for other linear models. The loss of
a group is the sum of its members' losses. Joining two groups raises the sum of the two least losses by a cost; if both
have one distribution, twice the cost is phi times a chi-squared number with d degrees of freedom, phi the dispersion,
however unequal rows and features are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coterie.theory.cluster_tree import Tree, numbered

ROUNDING = 1e-4  # relative size of negative curvature that rounding explains, in float32 on any device
FOREIGN = 100.0  # times the median information of a row: such a client's numbers are in other units
HEAVIEST = 10.0  # times the median information: nobody has more


def best_cut(dimensions: float, count: int) -> float:
    """Return what the best cut through `count` points of one Gaussian cloud gives, in units of the noise.

    Parameters
    ----------
    dimensions
        Number q of dimensions.
    count
        Number of points.

    Returns
    -------
    float
        (2/pi) (sqrt(count) + sqrt(q))^2 / q.

    Examples
    --------
    >>> from coterie.theory.pooled_tree import best_cut
    >>> round(best_cut(5.0, 2), 2), round(best_cut(5.0, 12), 2)
    (1.7, 4.14)
    """
    return 2 / math.pi * (math.sqrt(count) + math.sqrt(dimensions)) ** 2 / dimensions


def credible_sums(hessians: Tensor, slopes: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return who sent sums that rows can have, and the sums in float64, nobody's heavier than ten times the median.

    Rows have no negative curvature; and a row that tells a hundred times as much as others do is in other units.

    Parameters
    ----------
    hessians
        Sums of each fold, [n, folds, d, d].
    slopes
        Sums of each fold, [n, folds, d], or [n, folds, d, outputs].
    rows
        Number of rows of each client, [n].

    Returns
    -------
    tuple of Tensor
        Whose sums can be believed, bool [n]; Hessians and slopes of these.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pooled_tree import credible_sums
    >>> hessians = torch.tensor([1.0, -1.0, 2.0]).view(3, 1, 1, 1)
    >>> credible_sums(hessians, torch.zeros(3, 1, 1), torch.ones(3))[0].tolist()
    [True, False, True]
    """
    hessians, slopes = hessians.detach().double().cpu(), slopes.detach().double().cpu()
    size = hessians.abs().amax((-3, -2, -1)).clamp(min=1e-300)
    even = (hessians - hessians.mT).abs().amax((-3, -2, -1)) <= ROUNDING * size
    hessians = (hessians + hessians.mT) / 2
    least = torch.linalg.eigvalsh(hessians)[..., 0].amin(-1)
    good = even & (least >= -ROUNDING * size)
    told = hessians.diagonal(dim1=-2, dim2=-1).sum((-2, -1)) / rows.double().clamp(min=1)
    good &= told <= FOREIGN * told[good].median() if good.any() else good
    if not good.any():
        return good, hessians[good], slopes[good]
    hessians, slopes = hessians[good], slopes[good]
    weight = hessians.diagonal(dim1=-2, dim2=-1).sum((-2, -1))
    share = (HEAVIEST * weight.median() / weight.clamp(min=1e-300)).clamp(max=1)
    return good, hessians * share.view(-1, 1, 1, 1), slopes * share.view(-1, *(1 for _ in slopes.shape[1:]))


def joined(hessians: Tensor, slopes: Tensor, ridge: Tensor) -> Tree:
    """Join, again and again, the two groups whose union costs least.

    Parameters
    ----------
    hessians
        H, [n, d, d].
    slopes
        b, [n, d] or [n, d, outputs].
    ridge
        Small curvature that is added where a group has none, [d].

    Returns
    -------
    Tree
        The tree; its costs are those of the merges.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pooled_tree import joined
    >>> tree = joined(torch.ones(3, 1, 1), torch.tensor([[0.0], [0.1], [5.0]]), torch.zeros(1))
    >>> tree.children.tolist(), round(tree.costs[0].item(), 4)
    ([[0, 1], [3, 2]], 0.0025)
    """
    n = len(slopes)
    sums, pulls = hessians.double().clone(), slopes.double().clone()
    least = least_losses(sums, pulls, ridge)
    cost = torch.full((n, n), torch.inf, dtype=torch.float64)
    for i in range(n - 1):
        cost[i, i + 1 :] = _costs(sums, pulls, least, ridge, i, torch.arange(i + 1, n))
    cost = torch.minimum(cost, cost.T)
    members = torch.eye(2 * n - 1, n, dtype=torch.bool)
    children = torch.zeros(max(0, n - 1), 2, dtype=torch.long)
    costs = torch.zeros(max(0, n - 1), dtype=torch.float64)
    node, here = torch.arange(n), torch.ones(n, dtype=torch.bool)
    for k in range(n - 1):
        i, j = sorted(divmod(int(cost.argmin()), n))
        children[k], costs[k] = torch.stack([node[i], node[j]]), cost[i, j].clamp(min=0)
        members[n + k] = members[node[i]] | members[node[j]]
        sums[i] += sums[j]
        pulls[i] += pulls[j]
        least[i] = least_losses(sums[i], pulls[i], ridge)
        node[i], here[j] = n + k, False
        cost[j], cost[:, j] = torch.inf, torch.inf
        others = (here & (torch.arange(n) != i)).nonzero().squeeze(1)
        cost[i, others] = cost[others, i] = _costs(sums, pulls, least, ridge, i, others)
    return Tree(children, members, costs)


def apart(tree: Tree, phi: float, dimensions: int, bar: float, filled: float | None = None) -> Tensor:
    """Return the largest groups of the tree none of whose merges cost more than `bar` times what chance brings.

    Parameters
    ----------
    tree
        What `joined` returns.
    phi
        The dispersion.
    dimensions
        Number of parameters.
    bar
        Multiple of what the best cut through a cloud of chance costs.
    filled
        Number of dimensions that chance fills; None: all.

    Returns
    -------
    Tensor
        Cluster of each client, int64 [n].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pooled_tree import apart, joined
    >>> tree = joined(torch.ones(3, 1, 1), torch.tensor([[0.0], [0.1], [5.0]]), torch.zeros(1))
    >>> apart(tree, phi=0.1, dimensions=1, bar=1.0).tolist()
    [0, 0, 1]
    """
    n = tree.points
    whole = [True] * n
    top = torch.arange(n)
    for k, (i, j) in enumerate(tree.children.tolist()):
        inside = tree.members[n + k]
        allowed = bar * best_cut(filled or dimensions, int(inside.sum())) * phi * dimensions
        whole.append(whole[i] and whole[j] and 2 * float(tree.costs[k]) <= allowed)
        if whole[-1]:
            top[inside] = n + k
    return numbered(top)


def least_losses(hessians: Tensor, slopes: Tensor, ridge: Tensor) -> Tensor:
    """Return the least loss of each group, -b'H^-1 b/2.

    Parameters
    ----------
    hessians
        H, [..., d, d].
    slopes
        b, [..., d].
    ridge
        Small curvature that is added to H, [d].

    Returns
    -------
    Tensor
        [...].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pooled_tree import least_losses
    >>> least_losses(torch.eye(1), torch.tensor([2.0]), torch.zeros(1)).item()
    -2.0
    """
    pulls = columns(slopes, hessians)
    best = torch.linalg.solve(hessians + torch.diag(ridge.to(hessians)), pulls)
    least: Tensor = -(pulls * best).sum((-2, -1)) / 2
    return least


def columns(slopes: Tensor, hessians: Tensor) -> Tensor:
    """Return slopes as [..., d, outputs]: models with several outputs share their curvature.

    Parameters
    ----------
    slopes
        [..., d] or [..., d, outputs].
    hessians
        [..., d, d].

    Returns
    -------
    Tensor
        [..., d, outputs].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pooled_tree import columns
    >>> tuple(columns(torch.zeros(5, 3), torch.zeros(5, 3, 3)).shape)
    (5, 3, 1)
    """
    return slopes if slopes.dim() == hessians.dim() else slopes.unsqueeze(-1)


def _costs(sums: Tensor, pulls: Tensor, least: Tensor, ridge: Tensor, i: int, others: Tensor) -> Tensor:
    """Return what joining group i with each of the others costs."""
    return least_losses(sums[i] + sums[others], pulls[i] + pulls[others], ridge) - least[i] - least[others]

"""Weights between a few of many clients: candidates from sketches, and steps in time linear in the links."""

from __future__ import annotations

import scipy  # loads its parts when they are first used
import torch
from torch import Tensor

from coterie.theory.cluster_quality import cluster_quality
from coterie.theory.pair_tests import CLEAR

SLACK = 0.5  # a candidate may be this much farther than the nearest that was not found


def candidates(points: Tensor, k: int) -> Tensor:
    """Return pairs of near points: about the k nearest of each, from a k-d tree.

    Parameters
    ----------
    points
        Points in few dimensions, such as sketches of gradients, [n, p].
    k
        Candidates of each point.

    Returns
    -------
    Tensor
        Pairs i < j, each once, int64 [2, E] with E <= n k.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.sparse_links import candidates
    >>> candidates(torch.tensor([[0.0], [5.0], [0.1], [5.1]]), k=1).tolist()
    [[0, 1], [2, 3]]
    """
    n, k = len(points), min(k, len(points) - 1)
    if k < 1:
        return torch.zeros(2, 0, dtype=torch.long, device=points.device)
    places = points.detach().cpu().numpy()
    tree = scipy.spatial.cKDTree(places, balanced_tree=False, compact_nodes=False)
    near = torch.as_tensor(tree.query(places, k + 1, eps=SLACK)[1])
    own = torch.arange(n).unsqueeze(1).expand_as(near)
    return unique_pairs(torch.stack([own.flatten(), near.flatten()]), n).to(points.device)


def unique_pairs(pairs: Tensor, n: int) -> Tensor:
    """Return the pairs [2, E] with i < j, each once, in order.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.sparse_links import unique_pairs
    >>> unique_pairs(torch.tensor([[2, 0, 1], [0, 2, 1]]), n=3).tolist()
    [[0], [2]]
    """
    low, high = pairs.amin(0), pairs.amax(0)
    codes = (low * n + high)[low < high].unique()
    return torch.stack([codes // n, codes % n])


def merge(links: Tensor, weights: Tensor, more: Tensor, n: int, start: float = 1.0) -> tuple[Tensor, Tensor]:
    """Add pairs to weighted links; those that are new start at weight `start`.

    Parameters
    ----------
    links
        Pairs i < j, [2, E].
    weights
        Their weights, [E].
    more
        Further pairs, some of them perhaps there already, [2, F].
    n
        Number of clients.
    start
        Weight of a new link.

    Returns
    -------
    tuple of Tensor
        Links in order and their weights.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.sparse_links import merge
    >>> links, weights = merge(torch.tensor([[0], [2]]), torch.tensor([0.5]), torch.tensor([[0, 1], [2, 2]]), n=3)
    >>> links.tolist(), weights.tolist()
    ([[0, 1], [2, 2]], [0.5, 1.0])
    """
    both = torch.cat([links, more], 1)
    codes, place = (both[0] * n + both[1]).unique(return_inverse=True)
    values = weights.new_full((len(codes),), start)
    values[place[: links.shape[1]]] = weights
    return torch.stack([codes // n, codes % n]), values


def link_degrees(links: Tensor, weights: Tensor, n: int) -> Tensor:
    """Return the sum of each client's weights, [n].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.sparse_links import link_degrees
    >>> link_degrees(torch.tensor([[0], [2]]), torch.tensor([0.5]), n=3).tolist()
    [0.5, 0.0, 0.5]
    """
    return weights.new_zeros(n).index_add_(0, links[0], weights).index_add_(0, links[1], weights)


def sparse_consensus(
    models: Tensor, links: Tensor, weights: Tensor, prox: float, tol: float = 1e-3, most: int = 10
) -> Tensor:
    """Solve (1 + prox Lap W) x = models by conjugate gradients, a product with W for each step.

    Parameters
    ----------
    models
        Models after their gradient steps, [n, d].
    links
        Pairs i < j, [2, E].
    weights
        Their weights, [E].
    prox
        Strength of the pull, the step size included.
    tol
        Largest residual, relative to that of the start, of any coordinate.
    most
        Most steps.

    Returns
    -------
    Tensor
        [n, d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.sparse_links import sparse_consensus
    >>> models = torch.tensor([[0.0], [4.0], [9.0]])
    >>> sparse_consensus(models, torch.tensor([[0], [1]]), torch.ones(1), prox=0.5).round(decimals=4).tolist()
    [[1.0], [3.0], [9.0]]
    """
    n, used = len(models), weights > 0
    if not used.any():
        return models
    ends, w = links[:, used].cpu().numpy(), weights[used].to(models.dtype)
    half = scipy.sparse.csr_array((w.cpu().numpy(), (ends[0], ends[1])), shape=(n, n))
    matrix = half + half.T
    scale = 1 + prox * link_degrees(links[:, used], w, n).unsqueeze(-1)

    def times(x: Tensor) -> Tensor:
        return scale * x - prox * torch.as_tensor(matrix @ x.cpu().numpy(), device=x.device)

    x = models.clone()
    residual = models - times(x)
    direction = residual / scale
    product = (residual * direction).sum(0)
    first = product.clamp(min=torch.finfo(product.dtype).tiny)
    for _ in range(most):
        if bool((product <= tol**2 * first).all()):
            break
        applied = times(direction)
        step = product / (direction * applied).sum(0).clamp(min=torch.finfo(product.dtype).tiny)
        x = x + step * direction
        residual = residual - step * applied
        solved = residual / scale
        after = (residual * solved).sum(0)
        direction = solved + after / product.clamp(min=torch.finfo(product.dtype).tiny) * direction
        product = after
    return x


def neighbourhood_means(points: Tensor, links: Tensor) -> Tensor:
    """Return the mean of each point and those it is linked to.

    Parameters
    ----------
    points
        [n, d].
    links
        Pairs, [2, E].

    Returns
    -------
    Tensor
        [n, d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.sparse_links import neighbourhood_means
    >>> neighbourhood_means(torch.tensor([[0.0], [3.0], [9.0]]), torch.tensor([[0, 0], [1, 2]])).flatten().tolist()
    [4.0, 1.5, 4.5]
    """
    (i, j), ones = links, points.new_ones(links.shape[1], 1)
    total, count = points.clone(), torch.ones_like(points[:, :1])
    for here, there in ((i, j), (j, i)):
        total.index_add_(0, here, points[there])
        count.index_add_(0, here, ones)
    return total / count


def best_pulls(points: Tensor, noise: Tensor, links: Tensor, prox: float, dimensions: float) -> Tensor:
    """Return the best pull along each link, in units of the curvature; infinite where chance explains differences.

    All links are used at first. What that moves points by, summed over a client and those it is linked to, is R times
    what their noise explains if links lead to strangers, or members differ; 1/(R - 1) is best then, as in
    `coterie.theory.pair_tests.closeness`. The smaller of the two ends' pulls is taken.

    Parameters
    ----------
    points
        What clients fit alone, [n, d].
    noise
        Expected squared distance of each from that of its distribution, [n].
    links
        Pairs i < j, [2, E].
    prox
        Strength of the full pull, in units of the curvature.
    dimensions
        Number of dimensions that the noise fills.

    Returns
    -------
    Tensor
        [E].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.sparse_links import best_pulls
    >>> links = torch.tensor([[0, 0, 1, 3], [1, 2, 2, 4]])
    >>> points = torch.tensor([[0.0], [0.1], [-0.1], [5.0], [25.0]]).double()
    >>> best_pulls(points, torch.ones(5), links, prox=10.0, dimensions=4.0).round(decimals=2).tolist()
    [inf, inf, inf, 0.01]
    """
    ones = points.new_ones(links.shape[1])
    moved = (points - sparse_consensus(points, links, ones, prox, most=30)).square().sum(1)
    company = link_degrees(links, ones, len(points)).to(moved).clamp(min=1)
    chance = noise.to(moved) * company / (company + 1)  # a point is as far from a mean that it is part of
    around = neighbourhood_means(torch.stack([moved, chance], 1), links)
    ratio = around[:, 0] / around[:, 1].clamp(min=torch.finfo(moved.dtype).tiny)
    excess = ratio - 1 - CLEAR * (2 / (company * max(1.0, dimensions))).sqrt()
    pull = torch.where(excess > 0, 1 / excess, torch.inf)
    return torch.minimum(pull[links[0]], pull[links[1]])


def observed_links(links: Tensor, weights: Tensor, truth: Tensor | None, n: int) -> dict[str, Tensor]:
    """Return what is recorded of sparse weights: strong links, degrees, groups, and their quality.

    Parameters
    ----------
    links
        Pairs i < j, [2, E].
    weights
        Their weights, [E].
    truth
        True cluster of each client, [n], or None.
    n
        Number of clients.

    Returns
    -------
    dict of Tensor
        `links` [E', 3]: two ends and the weight of links above 1/2; `degree` [n]; what `cluster_quality` gives of
        groups of linked clients; and `between`, the share of the weight that crosses true clusters.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.sparse_links import observed_links
    >>> found = observed_links(torch.tensor([[0, 1], [1, 2]]), torch.tensor([1.0, 0.1]), torch.tensor([0, 0, 1]), n=3)
    >>> found["links"].tolist(), found["ari"].item()
    ([[0.0, 1.0, 1.0]], 1.0)
    """
    strong = weights > 0.5
    ends = links[:, strong].cpu()
    graph = scipy.sparse.csr_array(
        (torch.ones(ends.shape[1]).numpy(), (ends[0].numpy(), ends[1].numpy())), shape=(n, n)
    )
    groups = torch.as_tensor(
        scipy.sparse.csgraph.connected_components(graph, directed=False)[1], dtype=torch.long
    )
    found = {
        "links": torch.cat([links[:, strong], weights[strong].unsqueeze(0)]).T.double(),
        "degree": link_degrees(links, weights, n),
        **cluster_quality(groups, truth),
    }
    if truth is not None and len(weights):
        truth = truth.to(links.device)
        across = truth[links[0]] != truth[links[1]]
        found["between"] = weights[across].sum() / weights.sum().clamp(min=1e-12)
    return found

"""Should two clients pool their rows? A test of their gradients at one point, free of units.

Let g_i be the gradient of client i's rows at a point z that both share, v_i the part of |g_i|^2 that the choice of its
rows explains, and D the squared distance between the gradients of the two distributions. Pooling trades the variance v
against the bias D: for two alike clients it pays if D < v_i + v_j. The squared distance of the gradients that are seen
has expectation D + v_i + v_j, so that a pair is better off together while it is below 2 (v_i + v_j).
"""

from __future__ import annotations

import math

import torch
from scipy.special import gammaincinv
from torch import Tensor

from coterie.theory.cluster_tree import numbered, ward

ROUNDING = 1e-10  # relative to the size of gradients: smaller differences are none
BAR = 2.0  # times the noise: squared distance of two gradients from which pooling harms
CHOSEN = 3.0  # times the best cut through a cloud of chance
CLEAR = 2.0  # standard errors
RARE = 0.99  # quantile of what chance alone puts between two clients of one distribution


def shared_noise(noise: Tensor, rows: Tensor, other: Tensor, other_rows: Tensor) -> Tensor:
    """Return the noise of the difference of two gradients if both clients draw their rows from one distribution.

    Then a row of either has the same noise. The smaller of the two estimates is taken: far from its optimum a client's
    gradient is noisier, which would hide just the differences that are looked for; and nobody agrees with everybody by
    claiming to know nothing.

    Parameters
    ----------
    noise
        Noise of one client's gradient.
    rows
        Its number of rows.
    other
        Noise of the other's gradient.
    other_rows
        Its number of rows.

    Returns
    -------
    Tensor
        min(noise rows, other other_rows) (1/rows + 1/other_rows), at least 0.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pair_tests import shared_noise
    >>> shared_noise(torch.tensor(1.0), torch.tensor(4.0), torch.tensor(9.0), torch.tensor(4.0)).item()
    2.0
    """
    of_a_row = torch.minimum(noise * rows, other * other_rows).clamp(min=0)
    return of_a_row * (1 / rows.clamp(min=1) + 1 / other_rows.clamp(min=1))


def link_distances(grads: Tensor, links: Tensor, piece: int = 1 << 22) -> Tensor:
    """Return |g_i - g_j|^2 of the pairs `links` [2, E], [E].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pair_tests import link_distances
    >>> link_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[0], [1]])).tolist()
    [25.0]
    """
    step = max(1, piece // max(1, grads.shape[1]))
    found = [(grads[i] - grads[j]).square().sum(-1) for i, j in links.split(step, 1)]
    return torch.cat(found) if found else grads.new_zeros(0)


def bar(dimensions: float, count: int = 2) -> float:
    """Return the cost of joining two groups, in units of the noise, above which they count as different.

    It is the largest of: 2, where pooling ceases to pay; the 99 % point of what chance puts between two clients of one
    distribution, which varies much in few dimensions; and three times what the best cut through `count` points of one
    Gaussian cloud gives, (2/pi) (sqrt(count) + sqrt(q))^2 / q, since the cut is chosen after looking.

    Parameters
    ----------
    dimensions
        Number q of dimensions that the noise fills.
    count
        Clients in both groups together.

    Returns
    -------
    float
        The bar.

    Examples
    --------
    >>> from coterie.theory.pair_tests import bar
    >>> [round(bar(q), 2) for q in (2.0, 5.0, 100.0)], round(bar(5.0, count=12), 2)
    ([7.64, 5.09, 2.49], 12.41)
    """
    q = max(1.0, dimensions)
    best_cut = 2 / math.pi * (math.sqrt(count) + math.sqrt(q)) ** 2 / q
    return max(pair_bar(q), CHOSEN * best_cut)


def pair_bar(dimensions: float) -> float:
    """Return the first two of the bars of `bar`: for pairs that were not chosen by what they look like.

    Examples
    --------
    >>> from coterie.theory.pair_tests import pair_bar
    >>> [round(pair_bar(q), 2) for q in (2.0, 5.0, 100.0)]
    [4.61, 3.02, 2.0]
    """
    q = max(1.0, dimensions)
    return max(BAR, 2 * float(gammaincinv(q / 2, RARE)) / q)


def halves(grads: Tensor, noise: Tensor, rows: Tensor, dimensions: Tensor) -> tuple[Tensor, float]:
    """Return two groups of clients if their gradients at one point differ by more than chance explains, else one.

    Ward's tree joins groups with a and b rows at the cost a b/(a + b) |g - h|^2, g and h their mean gradients. If all
    clients have one distribution, that is the noise of a row, in expectation. The last merge is undone if it cost more
    than `bar` times that. The noise of a row is the smaller of the medians of the two halves, since a gradient is
    noisier far from the optimum; for the same reason each half is looked at again only at a point of its own.

    Parameters
    ----------
    grads
        Gradients at one point, [n, d].
    noise
        Expected squared distance of each from that of its distribution, [n, 1].
    rows
        Number of rows of each client, [n, 1].
    dimensions
        Number of dimensions that the noise fills, [n, 1].

    Returns
    -------
    tuple of Tensor and float
        Group of each client, 0 or 1, int64 [n]; and how many times above the bar the cost is, at most 1 with one group.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pair_tests import halves
    >>> grads = torch.tensor([[0.0, 0.1], [0.1, 0.0], [5.0, 5.0]])
    >>> groups, times = halves(grads, torch.full((3, 1), 0.02), torch.ones(3, 1), torch.full((3, 1), 2.0))
    >>> groups.tolist(), times > 100
    ([0, 0, 1], True)
    """
    tree = ward(grads, rows)
    labels = torch.zeros(len(grads), dtype=torch.long)
    if tree.points < 2:
        return labels.to(grads.device), 0.0
    of_a_row = (noise * rows).clamp(min=0).double().flatten().cpu()
    parts = tree.members[tree.children[-1]]
    usual = min(float(of_a_row[part].median()) for part in parts)
    lengths = torch.linalg.vector_norm(grads, dim=1).double().cpu().square() * rows.double().flatten().cpu()
    allowed = bar(float(dimensions.median()), len(grads)) * usual + ROUNDING * float(lengths.sum())
    times = float(tree.costs[-1]) / max(allowed, 1e-300)
    labels[parts[1]] = int(times > 1)
    return numbered(labels).to(grads.device), times


def spread(grads: Tensor, noise: Tensor, rows: Tensor) -> float:
    """Return R: the squared distances of a group's gradients from their mean, in units of what the noise explains.

    Parameters
    ----------
    grads
        Gradients at one point, [n, d], of two clients or more.
    noise
        Expected squared distance of each from that of its distribution, [n, 1].
    rows
        Number of rows of each client, [n, 1].

    Returns
    -------
    float
        R, 1 in expectation if all have one distribution.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pair_tests import spread
    >>> one = torch.ones(2, 1)
    >>> spread(torch.tensor([[0.0], [2.0]]), one, one)
    2.0
    """
    share = (rows / rows.sum()).to(grads.dtype)
    lengths = torch.linalg.vector_norm(grads - share.t() @ grads, dim=1, keepdim=True)
    apart = float((rows * lengths.square()).sum())
    of_a_row = (noise * rows).clamp(min=0)
    usual = float(of_a_row.median() - (-of_a_row).median()) / 2  # an even number has two middle values
    return apart / max((len(grads) - 1) * usual, 1e-300)


def closeness(ratio: float, count: int, dimensions: float) -> float:
    """Return 1/(R - 1), the best pull to the mean of a group in units of the curvature; infinite from R = 1 down.

    It is the posterior mean in a normal hierarchy whose members differ R - 1 times as much as noise explains. Two
    standard errors of R are given to chance.

    Parameters
    ----------
    ratio
        R, what `spread` returns.
    count
        Number of clients.
    dimensions
        Number of dimensions that the noise fills.

    Returns
    -------
    float
        1/(R - 1), with R less two standard errors.

    Examples
    --------
    >>> from coterie.theory.pair_tests import closeness
    >>> round(closeness(7.0, count=3, dimensions=4.0), 2), closeness(1.5, count=3, dimensions=4.0)
    (0.2, inf)
    """
    slack = CLEAR * math.sqrt(2 / ((count - 1) * max(1.0, dimensions)))
    excess = ratio - 1 - slack
    return 1 / excess if excess > 0 else math.inf


def evidence(apart: Tensor, noise: Tensor, bar: float = BAR) -> Tensor:
    """Return by how much pairs are nearer than the bar, in units of the noise: positive if they gain by pooling.

    Parameters
    ----------
    apart
        Squared distance between the gradients of a pair.
    noise
        What `shared_noise` returns.
    bar
        What `bar` returns.

    Returns
    -------
    Tensor
        bar - apart/noise.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.pair_tests import evidence
    >>> evidence(torch.tensor([1.0, 6.0]), torch.tensor(1.0)).tolist()
    [1.0, -4.0]
    """
    return bar - apart / noise.clamp(min=torch.finfo(apart.dtype).tiny)

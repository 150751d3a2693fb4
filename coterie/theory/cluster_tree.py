"""A tree of clients by their fits (Ward), and the clusters that held-out rows make of it.

Every node of the tree is a cluster that could be; the leaves are clients alone. Held-out rows say for each node what
its members lose or gain by sharing one model, and the cheapest set of nodes that covers all clients is found exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LARGEST = 512  # points from which near ones are first put together
FEW = 25  # points whose distances are computed from differences
SMALLEST = 0.25  # of an equal share: smaller groups are no cluster if their number is given
CLEAR = 2.25  # standard errors
PIECE = 1 << 20  # coordinates whose distances are computed together
CREDIBLE = 3.0  # times the usual: what one client says about a cluster counts at most so much


@dataclass(frozen=True)
class Tree:
    """Binary tree over n points: nodes 0..n-1 are the points, node n + k joined two earlier ones in merge k.

    Parameters
    ----------
    children
        The two nodes that each merge joined, int64 [n - 1, 2].
    members
        Which points are below each node, bool [2 n - 1, n].
    costs
        What each merge added to the weighted squared distances, [n - 1].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.cluster_tree import ward
    >>> tree = ward(torch.tensor([[0.0], [0.1], [5.0]]), torch.ones(3))
    >>> tree.children.tolist()
    [[0, 1], [3, 2]]
    """

    children: Tensor
    members: Tensor
    costs: Tensor

    @property
    def points(self) -> int:
        """Number of points."""
        return self.members.shape[1]

    def top(self, most: int) -> Tensor:
        """Return the nodes that the last `most` - 1 merges made or joined, and all leaves, in ascending order."""
        n = self.points
        first = max(0, len(self.children) - (most - 1))
        made = torch.arange(n + first, n + len(self.children))
        found: Tensor = torch.cat([torch.arange(n), self.children[first:].flatten(), made]).unique()
        return found


def ward(points: Tensor, weights: Tensor) -> Tree:
    """Join, again and again, the two groups whose union adds least to the weighted squared distances from centres.

    Joining groups of weights a and b with centres p and q adds a b/(a + b) |p - q|^2. With the numbers of rows as
    weights, a client with few rows, whose fit is noisy, does not stand apart.

    Parameters
    ----------
    points
        Points, [n, d].
    weights
        Weight of each, [n].

    Returns
    -------
    Tree
        The tree.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.cluster_tree import ward
    >>> ward(torch.tensor([[0.0], [1.0], [5.0], [5.5]]), torch.ones(4)).children.tolist()
    [[2, 3], [0, 1], [5, 4]]
    """
    n = len(points)
    mass = weights.detach().double().cpu().flatten().clamp(min=1e-12).numpy().copy()
    members = np.zeros((2 * n - 1, n), dtype=bool)
    members[:n] = np.eye(n, dtype=bool)
    cost = _squared_distances(points).numpy() * (mass[:, None] * mass / (mass[:, None] + mass))
    np.fill_diagonal(cost, np.inf)
    node, children, costs = list(range(n)), [], []  # numpy: a step has many small operations
    gone = np.zeros(n, dtype=bool)
    for k in range(n - 1):
        i, j = sorted(divmod(int(cost.argmin()), n))
        children.append((node[i], node[j]))
        costs.append(float(cost[i, j]))
        members[n + k] = members[node[i]] | members[node[j]]
        both = mass[i] + mass[j]
        row = (mass[i] + mass) * cost[i] + (mass[j] + mass) * cost[j] - mass * costs[k]
        row = np.maximum(row / (both + mass), 0.0)  # Lance, Williams (1967)
        row[i] = np.inf
        mass[i], node[i], gone[j] = both, n + k, True
        row[gone] = np.inf
        cost[i] = cost[:, i] = row
        cost[j] = cost[:, j] = np.inf
    joined = torch.tensor(children, dtype=torch.long).view(-1, 2)
    return Tree(joined, torch.from_numpy(members), torch.tensor(costs, dtype=torch.float64))


def _squared_distances(points: Tensor) -> Tensor:
    """Return |p - q|^2 in float64 [n, n], computed where the points are; long ones a piece at a time.

    Many points are multiplied with each other. Of few, differences are taken, which are zero where points coincide.
    """
    total = torch.zeros(len(points), len(points), dtype=torch.float64)
    for piece in points.detach().split(PIECE, 1):
        part = piece.to(torch.float64, copy=True)
        part -= part.mean(0)
        if len(part) <= FEW:
            total += torch.cdist(part, part).square().cpu()
            continue
        products = part @ part.t()
        lengths = products.diagonal()
        total += (lengths + lengths.unsqueeze(1) - 2 * products).clamp(min=0).cpu()
    return total


def coarse(points: Tensor, weights: Tensor, most: int, seed: int) -> Tensor:
    """Put near points together until `most` groups are left (K-means), for trees of many points.

    Parameters
    ----------
    points
        Points, [n, d].
    weights
        Weight of each, [n].
    most
        Largest number of groups.
    seed
        Seed of K-means++.

    Returns
    -------
    Tensor
        Group of each point, int64 [n]; each is its own if there are no more than `most`.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.cluster_tree import coarse
    >>> coarse(torch.tensor([[0.0], [5.0]]), torch.ones(2), most=8, seed=0).tolist()
    [0, 1]
    """
    if len(points) <= most:
        return torch.arange(len(points))
    from sklearn.cluster import MiniBatchKMeans

    means = MiniBatchKMeans(most, random_state=seed % (1 << 31), n_init=1, batch_size=4 * most)
    found = means.fit_predict(points.detach().double().cpu().numpy(), sample_weight=weights.cpu().numpy())
    groups: Tensor = torch.as_tensor(found, dtype=torch.long).unique(return_inverse=True)[1]
    return groups


def chosen(tree: Tree, nodes: Tensor, losses: Tensor, fine: Tensor) -> Tensor:
    """Return the clusters that held-out rows choose among the nodes of a tree.

    From the leaves up, two halves become one cluster unless the rows of both together, or of one of them, speak clearly
    against it: what members lose by it, fold by fold, is more than 2.25 standard errors above zero (1.5 for two,
    1.75 for three, 2 for four). Chance alone then splits few clusters, and clusters that differ lose in every fold.
    Halves are asked one by one too, so that many do not outvote one.

    Parameters
    ----------
    tree
        The tree.
    nodes
        Nodes that may be clusters, all leaves among them, ascending, [m].
    losses
        What each client loses in each of them, compared with alone, by folds, [m, clients, folds]; 0 outside.
    fine
        Leaf of each client, [clients].

    Returns
    -------
    Tensor
        Cluster of each client, int64, numbered by first appearance.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.cluster_tree import chosen, ward
    >>> tree = ward(torch.tensor([[0.0], [1.0], [5.0]]), torch.ones(3))
    >>> losses = torch.zeros(5, 3, 4)
    >>> losses[3, :2], losses[4] = -0.1, 2.0
    >>> chosen(tree, torch.arange(5), losses, torch.arange(3)).tolist()
    [0, 0, 1]
    """
    n, clients = tree.points, len(fine)
    row = {int(node): k for k, node in enumerate(nodes)}
    kept: dict[
        int, tuple[Tensor, Tensor]
    ] = {}  # of each node: cluster of its clients, and what they lose in it
    nobody, nothing = torch.full((clients,), -1), torch.zeros_like(losses[0])
    for node in range(2 * n - 1):
        inside = tree.members[node][fine]
        if node < n:
            apart = (torch.where(inside, 2 * n + torch.arange(clients), nobody), nothing)
            halves = [inside]
        else:
            children = tree.children[node - n].tolist()
            (left, lost_left), (right, lost_right) = (kept[child] for child in children)
            apart = (torch.maximum(left, right), lost_left + lost_right)
            halves = [tree.members[child][fine] for child in children]
        more = losses[row[node]] - apart[1] if node in row else nothing
        asked = [(inside, min(CLEAR, 1 + 0.25 * int(inside.sum()))), *((half, CLEAR) for half in halves)]
        whole = node in row and int(inside.sum()) > 1 and not any(_against(more, *one) for one in asked)
        kept[node] = (torch.where(inside, node, nobody), losses[row[node]]) if whole else apart
    return numbered(kept[2 * n - 2][0])


def _against(losses: Tensor, inside: Tensor, clear: float) -> bool:
    """Return True if losses [clients, folds] of those inside are so many standard errors above zero."""
    own = losses[inside].flatten()
    return bool(own.mean() > clear * own.std() / len(own) ** 0.5)


def cut(tree: Tree, points: Tensor, k: int) -> Tensor:
    """Return k clusters: the tree is cut until k groups have a quarter of an equal share or more.

    Smaller groups, such as lone points far away, start no cluster; they join the nearest.

    Parameters
    ----------
    tree
        The tree.
    points
        Its points, [n, d].
    k
        Number of clusters.

    Returns
    -------
    Tensor
        Cluster of each point, int64 [n]; fewer than k clusters if the tree has no k groups that large.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.cluster_tree import cut, ward
    >>> points = torch.tensor([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2], [99.0]])
    >>> cut(ward(points, torch.ones(7)), points, k=2).tolist()
    [0, 0, 0, 1, 1, 1, 1]
    """
    n = tree.points
    least = min(max(2.0, SMALLEST * n / k), n / k)
    pieces, best = [2 * n - 2], [2 * n - 2]
    sizes = tree.members.sum(1)
    while True:
        large = [node for node in pieces if sizes[node] >= least]
        if len(large) > len(best):
            best = large
        inner = [node for node in pieces if node >= n]
        if len(large) >= k or not inner:
            break
        last = max(inner)
        pieces.remove(last)
        pieces += tree.children[last - n].tolist()
    places = points.detach().double().cpu()
    middle = torch.stack([places[tree.members[node]].mean(0) for node in best])
    labels = torch.cdist(places, middle).argmin(1)
    for label, node in enumerate(best):
        labels[tree.members[node]] = label
    return numbered(labels)


def numbered(labels: Tensor) -> Tensor:
    """Return labels numbered by their first appearance.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.cluster_tree import numbered
    >>> numbered(torch.tensor([7, 7, 3, 7])).tolist()
    [0, 0, 1, 0]
    """
    order: dict[int, int] = {}
    return torch.tensor([order.setdefault(int(label), len(order)) for label in labels], dtype=torch.long)


def credible(gains: Tensor) -> Tensor:
    """Limit what one client says: to three times the median size of what is said, either way.

    Parameters
    ----------
    gains
        What each client loses in each cluster that it could be in, [v].

    Returns
    -------
    Tensor
        [v].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.cluster_tree import credible
    >>> credible(torch.tensor([1.0, -2.0, 1.0, -1e9])).tolist()
    [1.0, -2.0, 1.0, -3.0]
    """
    size = gains.abs()[gains != 0].median() if (gains != 0).any() else gains.new_zeros(())
    return torch.maximum(torch.minimum(gains, CREDIBLE * size), -CREDIBLE * size)

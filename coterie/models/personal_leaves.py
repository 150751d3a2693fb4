"""Personal values of leaves, shrunken to the shared ones, and the cross-fitted judgement of how strongly.

A client differs from the others by `away`, which goes down the tree: at the root all of its rows decide, and at each
node the node's rows correct what came from above. The root is pulled to 0 with `root`, every other node to the node
above it with `deep`. So an effect that is the same everywhere is estimated from all rows of the client, and not in each
leaf anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.models.objectives import Objective
from coterie.models.tree_walk import PARENT

SHARED = 1e30  # a pull that leaves nothing personal
PULLS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, SHARED)


class Nodes(NamedTuple):
    """Root, and both sides of every split, of trees with L leaves: N = 2 L - 1 nodes.

    Attributes
    ----------
    under : Tensor
        1 where a leaf lies under a node, [trees, N, L].
    levels : list of tuple
        The nodes of each level below the root and the nodes above them, int64 [nodes] each, tree k from k N on.
    leaves : Tensor
        The node of each leaf, int64 [trees, L].
    """

    under: Tensor
    levels: list[tuple[Tensor, Tensor]]
    leaves: Tensor


def nodes_of(splits: Tensor) -> Nodes:
    """Return the nodes of trees [trees, L - 1, 5]."""
    trees, count, _ = splits.shape
    parents = splits[..., PARENT].long().tolist()
    above = [[0] * (2 * count + 1) for _ in range(trees)]
    level = [[0] * (2 * count + 1) for _ in range(trees)]
    leaves = [[0] * (count + 1) for _ in range(trees)]
    for tree, row in enumerate(parents):
        for s, parent in enumerate(row):
            if parent < 0:
                break
            node = leaves[tree][parent]
            for side, leaf in ((2 * s + 1, parent), (2 * s + 2, s + 1)):
                above[tree][side], level[tree][side] = node, level[tree][node] + 1
                leaves[tree][leaf] = side
    at, depth = torch.tensor(leaves), torch.tensor(level)
    up = torch.tensor(above)
    under = torch.zeros(trees, 2 * count + 1, count + 1, dtype=torch.float64)
    place = at.clone()
    for _ in range(int(depth.max()) + 1):
        under.scatter_(1, place.unsqueeze(1), 1.0)
        place = up.gather(1, place)
    device, first = splits.device, (2 * count + 1) * torch.arange(trees).unsqueeze(-1)
    flat, levels = (up + first).flatten(), []
    for k in range(1, int(depth.max()) + 1):
        here = (depth.flatten() == k).nonzero().squeeze(-1)
        levels.append((here.to(device), flat[here].to(device)))
    return Nodes(under.to(device), levels, at.to(device))


@dataclass(frozen=True)
class Step:
    """One round of trees as a client takes it.

    Attributes
    ----------
    objective : Objective
        The loss.
    nodes : Nodes
        The nodes of the trees.
    shared : Tensor
        Values of the leaves that all clients share, [C, L].
    low, high : Tensor
        Bounds of the personal values, [C, L].
    lr : float
        Share of the values by which scores move.
    root, deep : float
        The pulls, lambda of the root and of the nodes below it.
    """

    objective: Objective
    nodes: Nodes
    shared: Tensor
    low: Tensor
    high: Tensor
    lr: float
    root: float
    deep: float

    def personal(self, sums: Tensor, root: Tensor, deep: Tensor) -> Tensor:
        """Return the personal values [..., pulls, C, L] for sums [..., C, L, 2] and pulls [pulls]."""
        tiny = torch.finfo(sums.dtype).tiny
        under = self.nodes.under.to(sums.dtype)
        first = sums[..., 0] + sums[..., 1] * self.shared  # derivatives at the shared values
        g, h = ((under @ part.unsqueeze(-1)).squeeze(-1) for part in (first, sums[..., 1]))
        lead, outputs = g.shape[:-2], g.shape[-2]
        g, h = (
            part.flatten(-2).movedim(-1, 0).unsqueeze(-1).contiguous() for part in (g, h)
        )  # [C N, ..., 1]
        root, deep = root.to(g), deep.to(g)
        away = -g / (h + root).clamp(min=tiny)  # holds for the roots, which come first
        for nodes, above in self.nodes.levels:
            from_above, own_h = away[above], h[nodes]
            shrunk = 1 / (own_h + deep).clamp(min=tiny)
            away[nodes] = from_above - (g[nodes] + own_h * from_above) * shrunk
        away = away.view(outputs, -1, *lead, len(root))
        tree = torch.arange(outputs, device=away.device).unsqueeze(-1)
        own = self.shared + away[tree, self.nodes.leaves].movedim((0, 1), (-2, -1))
        return own.clamp(min=self.low, max=self.high)


def leaf_sums(pairs: Tensor, leaf: Tensor, count: int) -> Tensor:
    """Return the sums of pairs [..., B, C, 2] over the rows of each of `count` leaves, [..., C, count, 2]."""
    spread = pairs.transpose(-3, -2)
    empty = pairs.new_zeros(*spread.shape[:-2], count, 2)
    return empty.scatter_add_(-2, leaf.mT.unsqueeze(-1).expand(spread.shape), spread)


def boost(
    step: Step, scores: Tensor, target: Tensor, weight: Tensor, leaf: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Give leaves their personal values and move the scores; judge every pull of the grid.

    Path 0 of the scores is the model. Path k > 0 is a model that never sees fold k of the rows (row r is in fold
    1 + r mod K): its values come from the other rows, and are judged on fold k by the second-order change of the loss
    for the whole value. (Judged by the step lr v alone, noise would count for little in each of many steps.) The pull
    of the root is judged with nothing personal below it, the pull below with the root's as it is.

    Parameters
    ----------
    step
        The trees.
    scores
        [..., 1 + K, B, C].
    target, weight
        [..., B].
    leaf
        Leaf of each row, int64 [..., B, C].

    Returns
    -------
    tuple of Tensor
        Personal values [..., C, L], moved scores, and the change of the loss for each pull of the root, then of the
        nodes below, [..., 2 len(PULLS)].
    """
    paths, rows = scores.shape[-3:-1]
    size = step.shared.shape[-1]
    wide = target.unsqueeze(-2).expand(*target.shape[:-1], paths, rows)
    weights = weight.view(*weight.shape[:-1], 1, rows, 1, 1)
    pair = torch.stack(step.objective.derivatives(scores, wide), -1) * weights
    fold = torch.arange(rows, device=leaf.device) % max(1, paths - 1)
    out = fold == torch.arange(-1, paths - 1, device=leaf.device).unsqueeze(
        -1
    )  # [1 + K, B]; nobody on path 0
    at = leaf.unsqueeze(-3) + size * out.unsqueeze(-1)
    seen, unseen = leaf_sums(pair, at, 2 * size).split(size, -2)
    grid = torch.tensor(PULLS if paths > 1 else (), device=leaf.device, dtype=torch.float64)
    root = torch.cat([grid, torch.full_like(grid, step.root), grid.new_tensor([step.root])])
    deep = torch.cat([torch.full_like(grid, SHARED), grid, grid.new_tensor([step.deep])])
    values = step.personal(seen, root, deep)
    tried, own = values[..., :-1, :, :], values[..., -1, :, :]
    g, h = unseen.unsqueeze(-4).unbind(-1)
    judged = (tried * (g + 0.5 * h * tried)).sum((-2, -1))[..., 1:, :].sum(-2)
    moved = scores + step.lr * own.gather(-1, leaf.mT.unsqueeze(-3).expand(*own.shape[:-1], rows)).mT
    nothing = seen.new_zeros(*target.shape[:-1], 2 * len(PULLS))
    return own.select(-3, 0), moved, judged if paths > 1 else nothing

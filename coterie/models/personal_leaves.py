"""Personal values of leaves, shrunken to the shared ones, and the cross-fitted judgement of how strongly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.models.objectives import Objective

SHARED = 1e30  # a pull that leaves nothing personal
PULLS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, SHARED)


@dataclass(frozen=True)
class Step:
    """One round of trees as a client takes it.

    Attributes
    ----------
    objective : Objective
        The loss.
    shared : Tensor
        Values of the leaves that all clients share, [C, L].
    low, high : Tensor
        Bounds of the personal values, [C, L].
    lr : float
        Share of the values by which scores move.
    pull : float
        lambda, the strength of the pull to the shared values.
    """

    objective: Objective
    shared: Tensor
    low: Tensor
    high: Tensor
    lr: float
    pull: float

    def personal(self, sums: Tensor, pull: float) -> Tensor:
        """Return v - (G + H v) / (H + lambda), which is (lambda v - G) / (lambda + H), for sums [..., C, L, 2]."""
        g, h = sums.unbind(-1)
        away = (g + h * self.shared) / (h + pull).clamp(min=torch.finfo(h.dtype).tiny)
        return (self.shared - away).clamp(min=self.low, max=self.high)


def leaf_sums(pairs: Tensor, leaf: Tensor, count: int) -> Tensor:
    """Return the sums of pairs [..., B, C, 2] over the rows of each of `count` leaves, [..., C, count, 2]."""
    spread = pairs.transpose(-3, -2)
    empty = pairs.new_zeros(*spread.shape[:-2], count, 2)
    return empty.scatter_add_(-2, leaf.mT.unsqueeze(-1).expand(spread.shape), spread)


def boost(
    step: Step, scores: Tensor, target: Tensor, weight: Tensor, leaf: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Give leaves their personal values and move the scores; judge every lambda of the grid.

    Path 0 of the scores is the model. Path k > 0 is a model that never sees fold k of the rows (row r is in fold
    1 + r mod K): its values come from the other rows, and are judged on fold k by the second-order change of the loss
    for the whole value. (Judged by the step lr v alone, noise would count for little in each of many steps.)

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
        Personal values [..., C, L], moved scores, and the change of the loss for each lambda, [..., len(PULLS)].
    """
    paths, rows = scores.shape[-3:-1]
    size = step.shared.shape[-1]
    wide = target.unsqueeze(-2).expand(*target.shape[:-1], paths, rows)
    pair = torch.stack(step.objective.derivatives(scores, wide), -1) * weight.view(
        *weight.shape[:-1], 1, rows, 1, 1
    )
    fold = torch.arange(rows, device=leaf.device) % max(1, paths - 1)
    out = fold == torch.arange(-1, paths - 1, device=leaf.device).unsqueeze(-1)  # [1 + K, B]; nobody on path 0
    at = leaf.unsqueeze(-3) + size * out.unsqueeze(-1)
    seen, unseen = leaf_sums(pair, at, 2 * size).split(size, -2)
    changes = []
    for pull in PULLS if paths > 1 else ():
        v = step.personal(seen, pull)
        changes.append((v * (unseen[..., 0] + 0.5 * unseen[..., 1] * v)).sum((-3, -2, -1)))
    own = step.personal(seen, step.pull)
    moved = scores + step.lr * own.gather(-1, leaf.mT.unsqueeze(-3).expand(*own.shape[:-1], rows)).mT
    nothing = seen.new_zeros(*target.shape[:-1], len(PULLS))
    return own.select(-3, 0), moved, torch.stack(changes, -1) if changes else nothing

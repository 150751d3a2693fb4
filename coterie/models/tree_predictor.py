"""What a client's trees predict, as a module that exporters can write."""

from __future__ import annotations

from torch import Tensor, nn

from coterie.models.predictor import predictions
from coterie.models.tree_walk import Walk


class TreePredictor(nn.Module):
    """The trees of one client: raw features in, predictions out.

    Parameters
    ----------
    walk
        Finds the leaves of rows in the trees in use.
    base
        Score without trees, [C].
    values
        Values of the leaves of all trees, [T, C, L].
    task
        Kind of target.
    counts
        Whether scores are logarithms of what is predicted.
    """

    base: Tensor
    values: Tensor

    def __init__(self, walk: Walk, base: Tensor, values: Tensor, task: str, counts: bool) -> None:
        super().__init__()
        self.walk, self.task, self.counts, self.outputs = walk, task, counts, len(base)
        self.register_buffer("base", base.clone())
        self.register_buffer("values", values.flatten(0, 1)[: len(walk.first)].clone())

    def forward(self, x: Tensor) -> Tensor:
        found = self.walk(x.to(self.base.dtype))
        picked = self.values.gather(1, found.t())
        scores = picked.unflatten(0, (-1, self.outputs)).sum(0).t() + self.base
        return predictions(scores.exp() if self.counts else scores, self.task)

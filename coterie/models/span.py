"""Local SGD of a generalised linear model in the span of a client's rows.

Gradients are combinations of rows, so the weights stay  w_t = a_t w_0 + b_t c + C_t X  where c is what they are pulled
towards. The scores of the rows at w_t follow from those at w_0 and c and from the inner products X X', and the steps
touch nothing as long as w: all rows are read twice, at the start and at the end, instead of a minibatch twice in
every step.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from coterie.data.rows import Rows
from coterie.models.base import Model
from coterie.models.glm import Glm
from coterie.models.ragged import combine_rows, score_rows, scripted

FEWEST_PRODUCTS = (
    1 << 17
)  # rows times parameters of a client, below which calls cost more than what they compute
BLOCK = 512  # rows of a product with one table of weights: what stays in the processor's cache


def pays(model: Model, rows: Rows, drawn: float) -> TypeGuard[Glm]:
    """Whether all rows of a client are no more than are `drawn`, and their inner products no more than they are."""
    if not isinstance(model, Glm) or (model.l2 and model.intercept) or rows.augment is not None:
        return False
    total, clients = len(rows.x), len(rows)
    return (
        total <= drawn * clients
        and total * model.d >= FEWEST_PRODUCTS * clients
        and clients * rows.largest**2 <= total * model.columns
    )


def descend(
    model: Glm,
    rows: Rows,
    own: Own,
    w: Tensor,
    drawn: Tensor,
    weight: Tensor,
    lr: float,
    pull: float = 0.0,
    towards: Tensor | None = None,
) -> Tensor:
    """`w` [k, d] of the clients `own` after a step w <- w - lr (grad(w) + pull (w - towards)) per minibatch.

    `drawn` [k, steps, B] are rows of the whole array and `weight` their weights.
    """
    count, steps, batch = drawn.shape
    inside = drawn - own.start.view(-1, 1, 1)
    packed = (inside + own.offset.view(-1, 1, 1)).flatten()

    def drawn_scores(tables: Tensor) -> Tensor:
        picked = own.scores(tables).index_select(1, packed)
        return picked.view(-1, count, steps, batch).permute(2, 1, 0, 3)  # [steps, k, outputs, B]

    tables = w.unflatten(-1, (model.outputs, model.columns))
    scores = drawn_scores(tables)
    centre = None
    if towards is not None and pull:
        centre = towards.unflatten(-1, (model.outputs, model.columns))
        middle = drawn_scores(centre)
    pulled = lr * pull if centre is not None else 0.0
    keeps, share, centre_share = 1 - pulled - lr * model.l2, 1.0, 0.0
    kernels = rows.kernels(own.at)
    near = (inside + own.kernel.view(-1, 1, 1)).transpose(0, 1).flatten(1)
    labels = rows.y.index_select(0, drawn.flatten()).view(drawn.shape)
    paces = (weight * -lr).unsqueeze(-2)
    places = inside.unsqueeze(-2).expand(count, steps, model.outputs, batch)
    combination = w.new_zeros(count, model.outputs, rows.largest)
    for t in range(steps):
        here = scores[t] if share == 1 else scores[t] * share
        if centre is not None and t:
            here = here.add(middle[t], alpha=centre_share)
        if t:
            products = kernels.index_select(0, near[t]).view(count, batch, -1)
            here = torch.baddbmm(here, combination, products.mT)
            if keeps != 1:
                combination.mul_(keeps)
        slopes = model._residuals(here, labels[:, t]).mul_(paces[:, t])
        combination.scatter_add_(-1, places[:, t], slopes)
        share, centre_share = share * keeps, centre_share * keeps + pulled
    base = tables if share == 1 else tables * share
    if centre is not None:
        base = base.add(centre, alpha=centre_share)
    return own.combined(base, combination).flatten(-2)


class Own:
    """The rows of the clients `at` (None: everybody)."""

    def __init__(self, rows: Rows, at: Tensor | None) -> None:
        self.at = at
        self.start, size = (rows.start, rows.size) if at is None else (rows.start[at], rows.size[at])
        self.offset = size.cumsum(0) - size  # where a client begins when only these are counted
        self.kernel = (torch.arange(len(rows)) if at is None else at) * rows.largest
        self.x, self.starts, self.sizes = rows.x, self.start.tolist(), size.tolist()
        self.total, first = sum(self.sizes), self.starts[0]
        adjoining = bool((self.start - self.offset == first).all())
        self.together = rows.x[first : first + self.total] if adjoining else None
        self._last: tuple[Tensor, Tensor] | None = None

    def scores(self, tables: Tensor) -> Tensor:
        """Scores [outputs, rows] of all rows, each client's with its own table [k, outputs, columns].

        Those of a table that all clients share are kept until another is asked for.
        """
        shared = tables.stride(0) == 0
        if shared and self._last is not None and self._last[0].data_ptr() == tables.data_ptr():
            return self._last[1]
        scores = tables.new_empty(tables.shape[1], self.total)
        self._last = (tables, scores) if shared else self._last
        if self.together is not None and shared:
            for part, place in zip(self.together.split(BLOCK), scores.split(BLOCK, 1), strict=True):
                torch.mm(tables[0], part.mT, out=place)
        else:
            scripted(score_rows)(scores, tables, self.x, self.starts, self.sizes)
        return scores

    def combined(self, base: Tensor, combination: Tensor) -> Tensor:
        """base + combination X, client by client, [k, outputs, columns]."""
        result = base.new_empty(base.shape)
        return scripted(combine_rows)(result, base, combination, self.x, self.starts, self.sizes)

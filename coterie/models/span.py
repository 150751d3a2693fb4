"""Local SGD of a generalised linear model in the span of a client's rows.

Gradients are combinations of rows, so the weights stay  w_t = a_t w_0 + b_t c + C_t X  where c is what they are pulled
towards. The scores of the rows at w_t follow from those at w_0 and c and from the inner products X X', and the steps
touch nothing as long as w: all rows are read twice, at the start and at the end, instead of a minibatch twice in
every step.
"""

from __future__ import annotations

import itertools
from typing import TypeGuard

import torch
from torch import Tensor

from coterie.data.rows import Rows
from coterie.models.base import Model
from coterie.models.glm import Glm
from coterie.models.ragged import score_rows, score_together, scripted, stepper
from coterie.models.unwritten import Unwritten
from coterie.runtime.workers import side_by_side

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
    parts: list[Own],
    w: Tensor,
    drawn: Tensor,
    weight: Tensor,
    lr: float,
    pull: float = 0.0,
    towards: Tensor | None = None,
) -> Unwritten:
    """`w` [k, d] of all clients after a step w <- w - lr (grad(w) + pull (w - towards)) per minibatch.

    `drawn` [k, steps, B] are rows of the whole array and `weight` their weights. Parts are computed side by side.
    """
    shape = (model.outputs, model.columns)
    tables, centres = w.unflatten(-1, shape), None
    if towards is not None and pull:
        centres = towards.unflatten(-1, shape)
    pulled = lr * pull if centres is not None else 0.0
    keeps, share, centre_share = 1 - pulled - lr * model.l2, 1.0, 0.0
    for _ in range(drawn.shape[1]):
        share, centre_share = share * keeps, centre_share * keeps + pulled
    paces, steps = weight * -lr, stepper(model._residuals)

    def train(own: Own) -> tuple[Tensor, Tensor]:
        k, kernels = own.clients, rows.kernels(own.at)
        scores, middle = own.scores(tables[k]), None if centres is None else own.scores(centres[k])
        places = (own.start, own.size, kernels, own.at * rows.largest)
        shares = steps(scores, middle, drawn[k], paces[k], rows.y, *places, keeps, pulled)
        witness = shares.sum() + scores.sum()
        return shares, witness if middle is None else witness + middle.sum()

    shares, witnesses = zip(*side_by_side(train, parts), strict=True)
    by_part = dict(zip(parts, shares, strict=True))
    return Unwritten(tables, share, centres, centre_share, parts, by_part, sum(witnesses))


def parts(rows: Rows, at: Tensor | None, count: int) -> list[Own]:
    """The clients `at` (None: everybody) in so many parts, or fewer, with about as many rows each."""
    at = torch.arange(len(rows)) if at is None else at
    start, size = rows.start[at], rows.size[at]
    if count == 1:
        return [Own(rows, at, start, size, slice(None))]
    until = size.cumsum(0)
    ends = torch.searchsorted(until, until[-1] * torch.arange(1, count + 1) // count).add_(1).tolist()
    cuts = [slice(*cut) for cut in itertools.pairwise(sorted({0, *ends}))]
    return [Own(rows, at[cut], start[cut], size[cut], cut) for cut in cuts]


class Own:
    """The rows of the clients `at`, which are `clients` of a stack."""

    def __init__(self, rows: Rows, at: Tensor, start: Tensor, size: Tensor, clients: slice) -> None:
        self.at, self.start, self.size, self.clients, self.x = at, start, size, clients, rows.x
        self.starts, self.sizes = start.tolist(), size.tolist()
        self.total = sum(self.sizes)
        self.adjoining = bool((size.cumsum(0) - size == start - self.starts[0]).all())
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
        if shared and self.adjoining:
            return scripted(score_together)(scores, tables[0], self.x, self.starts[0], BLOCK)
        return scripted(score_rows)(scores, tables, self.x, self.starts, self.sizes)

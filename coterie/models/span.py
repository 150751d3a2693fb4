"""Local SGD of a generalised linear model in the span of a client's rows.

Gradients are combinations of rows, so the weights stay  w_t = a_t w_0 + b_t c + C_t X  where c is what they are pulled
towards. The scores of the rows at w_t follow from those at w_0 and c and from the inner products X X', and the steps
touch nothing as long as w: all rows are read twice, at the start and at the end, instead of a minibatch twice in
every step.
"""

from __future__ import annotations

import copy
import itertools
from typing import TypeGuard

import torch
from torch import Tensor

from coterie.data.rows import Rows
from coterie.models.base import Model
from coterie.models.glm import Glm
from coterie.models.ragged import Layout, score, scripted, stepper
from coterie.models.unwritten import Unwritten
from coterie.runtime.workers import side_by_side

FEWEST_PRODUCTS = 1 << 17  # rows times parameters of a client, below which calls cost more than arithmetic
BLOCK = 128  # copies of rows are filled up to a multiple of so many
PACKED_ELEMENTS = 1 << 21  # largest copy of rows that a cache holds until they are read again


def pays(model: Model, rows: Rows, drawn: float) -> TypeGuard[Glm]:
    """Whether all rows of a client are no more than are `drawn`, and their inner products no more than they are."""
    if not isinstance(model, Glm) or (model.l2 and model.intercept) or rows.augment is not None:
        return False
    total, clients = rows.x.shape[0], len(rows)
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
    works = []  # slices are made here: threads that ask for Python's lock by turns are slow
    for own in parts:
        k = own.clients
        works.append((own, tables[k], None if centres is None else centres[k], drawn[k], paces[k]))

    def train(work: tuple[Own, Tensor, Tensor | None, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        own, table, centre, *draws = work
        places = (rows.y, own.layout, rows.kernels(own.at), own.kernel)
        middle = None if centre is None else own.scores(centre)
        return steps(own.scores(table), middle, *draws, *places, keeps, pulled)

    shares, witnesses = zip(*side_by_side(train, works), strict=True)
    by_part = dict(zip(parts, shares, strict=True))
    return Unwritten(tables, share, centres, centre_share, parts, by_part, sum(witnesses))


def parts(rows: Rows, at: Tensor | None, count: int) -> list[Own]:
    """The clients `at` (None: everybody) in so many parts, or fewer, with about as many rows each."""
    if at is None and count not in rows.parts:
        rows.parts[count] = parts(rows, torch.arange(len(rows)), count)
    if at is None:
        return [copy.copy(own) for own in rows.parts[count]]
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
        self.at, self.clients, self.rows = at, clients, rows.x
        self.kernel = at * rows.largest  # where their kernels are
        offset, starts, sizes = size.cumsum(0) - size, start.tolist(), size.tolist()
        total = sum(sizes)
        adjoining = bool((offset == start - starts[0]).all())
        self.copies = not adjoining and total * rows.x.shape[1] <= PACKED_ELEMENTS
        if adjoining:
            self.rows, starts = rows.x.narrow(0, starts[0], total), offset.tolist()
        self.alone = adjoining  # whether `rows` are theirs only
        length = -(-total // BLOCK) * BLOCK if self.copies else total
        self.layout = Layout(start, offset, size, starts, sizes, length)
        self._last: tuple[Tensor, Tensor] | None = None

    def scores(self, tables: Tensor) -> Tensor:
        """Scores [outputs, length] of all rows, each client's with its own table [k, outputs, columns].

        Those of a table that all clients share are kept until another is asked for.
        """
        shared = tables.stride(0) == 0
        if shared and self._last is not None and self._last[0].data_ptr() == tables.data_ptr():
            return self._last[1]
        scores, self.rows = scripted(score)(tables, self.rows, self.layout, shared, self.alone, self.copies)
        if self.copies:
            starts = self.layout.offset.tolist()
            self.layout, self.alone, self.copies = self.layout._replace(starts=starts), True, False
        self._last = (tables, scores) if shared else self._last
        return scores

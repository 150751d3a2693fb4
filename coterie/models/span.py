"""Local SGD of a generalised linear model in the span of a client's rows.

Gradients are combinations of rows, so the weights stay  w_t = a_t w_0 + b_t c + C_t X  where c is what they are pulled
towards. The scores of the rows at w_t follow from those at w_0 and c and from the inner products X X', and the steps
touch nothing as long as w: all rows are read twice, at the start and at the end, instead of a minibatch twice in
every step. In C a client's rows are still in the processor's cache when they are read again.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from coterie.data.rows import Rows
from coterie.models import ragged
from coterie.models.base import Model
from coterie.models.glm import Glm, Logistic, Softmax
from coterie.models.linear import Linear
from coterie.models.ragged import scripted
from coterie.models.unwritten import Unwritten
from coterie.native import span as native

FEWEST_PRODUCTS = 1 << 17  # rows times parameters of a client, below which calls cost more than arithmetic
LOSSES: dict[type[Model], int] = {Softmax: 0, Logistic: 1, Linear: 2}  # as in C


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


class Rates(NamedTuple):
    """A step is  w <- keeps w + pulled c - lr grad;  after all of them w_0 and c have these shares."""

    lr: float
    keeps: float
    pulled: float
    share: float
    centre_share: float


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
    rates = Rates(lr, keeps, pulled, share, centre_share)
    kind = Compiled if compiles(model, rows, tables, centres) else Plain
    descents = [
        kind(model, rows, own, tables[k], None if centres is None else centres[k], drawn[k], weight[k], rates)
        for own in parts
        for k in [own.clients]
    ]
    return Unwritten(tables, share, centres, centre_share, descents, rows)


def parts(rows: Rows, at: Tensor | None, count: int) -> list[Own]:
    """The clients `at` (None: everybody) in so many parts, or fewer, with about as many rows each."""
    if at is None:
        if ("parts", count) not in rows.notes:
            rows.notes["parts", count] = parts(rows, torch.arange(len(rows)), count)
        return rows.notes["parts", count]
    start, size = rows.start[at], rows.size[at]
    if count == 1:
        return [Own(at, slice(None), start, size)]
    until = size.cumsum(0)
    ends = torch.searchsorted(until, until[-1] * torch.arange(1, count + 1) // count).add_(1).tolist()
    cuts = [slice(*cut) for cut in itertools.pairwise(sorted({0, *ends}))]
    return [Own(at[cut], cut, start[cut], size[cut]) for cut in cuts]


@dataclass(eq=False)
class Own:
    """Where the rows of the clients `at` are, which are `clients` of a stack."""

    at: Tensor
    clients: slice
    start: Tensor
    size: Tensor

    @functools.cached_property
    def layout(self) -> ragged.Layout:
        return ragged.layout(self.start, self.size)

    @functools.cached_property
    def total(self) -> int:
        return int(self.size.sum())


def compiles(model: Glm, rows: Rows, *tables: Tensor | None) -> bool:
    """Whether C computes descents of these tables."""
    single = all(part.dtype == torch.float32 for part in (rows.x, *tables) if part is not None)
    labels = rows.y.dtype == torch.int64 or (rows.y.dtype == torch.float32 and not isinstance(model, Softmax))
    whole = rows.x.is_contiguous() and rows.y.is_contiguous() and model.columns >= native.LANES
    return native.available and type(model) in LOSSES and single and labels and whole


@dataclass(eq=False)
class Descent:
    """Descents of the clients of one part."""

    model: Glm
    rows: Rows
    own: Own
    tables: Tensor
    centres: Tensor | None
    drawn: Tensor
    weight: Tensor
    rates: Rates

    @property
    def clients(self) -> slice:
        return self.own.clients

    @property
    def size(self) -> Tensor:
        return self.own.size


class Plain(Descent):
    """With torch."""

    @functools.cached_property
    def taken(self) -> tuple[Tensor, Tensor]:
        """Shares [outputs, length] of the rows after all steps, and what is finite only if all numbers are."""
        layout, x = self.own.layout, self.rows.x
        scores = scripted(ragged.score)(self.tables, x, layout)
        middle = None if self.centres is None else scripted(ragged.score)(self.centres, x, layout)
        kernel = (self.rows.kernels(self.own.at), self.own.at * self.rows.largest)
        steps, pace = ragged.stepper(self.model._residuals), self.weight * -self.rates.lr
        keeps = (self.rates.keeps, self.rates.pulled)
        return steps(scores, middle, self.drawn, pace, self.rows.y, layout, *kernel, *keeps)

    @property
    def witness(self) -> Tensor:
        return self.taken[1]

    def ask(self, weights: Tensor | None, models: Tensor | None) -> None:
        self.weights, self.models = weights, models

    def compute(self) -> Tensor | None:
        shares, x, layout = self.taken[0], self.rows.x, self.own.layout
        if self.models is not None:
            *_, share, centre_share = self.rates
            tables = (self.tables, share, self.centres, centre_share)
            scripted(ragged.combine_rows)(self.models, *tables, shares, x, layout)
        return None if self.weights is None else scripted(ragged.add_rows)(shares, self.weights, x, layout)


class Compiled(Descent):
    """In C."""

    witness: float = 0.0

    @functools.cached_property
    def work(self) -> native.Work:
        """All but what is asked for; the tensors that it points to are those of this object."""
        model, rows, own = self.model, self.rows, self.own
        kernels = rows.kernels(own.at)
        self.tables = _dense(self.tables)
        self.centres = None if self.centres is None else _dense(self.centres)
        self.drawn = self.drawn.contiguous()
        even = not any(self.weight.stride())
        self.weight = self.weight if even else self.weight.to(torch.float32).contiguous()
        self.shares = torch.empty(model.outputs * own.total)
        places = (own.at, own.start, own.size)
        held = (*places, rows.x, rows.y, kernels, self.tables)
        centres = (None, 0) if self.centres is None else (self.centres.data_ptr(), self.centres.stride(0))
        return native.Work(
            len(own.at), len(rows), model.outputs, model.columns, rows.largest, kernels.shape[1],
            *self.drawn.shape[1:], LOSSES[type(model)], rows.y.dtype == torch.int64,
            *(tensor.data_ptr() for tensor in held), centres[0], self.tables.stride(0), centres[1],
            self.drawn.data_ptr(), self.weight.data_ptr(), not even, *self.rates, self.shares.data_ptr(),
        )  # fmt: skip

    def ask(self, weights: Tensor | None, models: Tensor | None) -> None:
        self.total = None if weights is None else torch.zeros(self.tables.shape[1:])
        self.asked = (weights, self.total, models)
        self.work.weights, self.work.total, self.work.models = map(_address, self.asked)

    def compute(self) -> Tensor | None:
        native.run(self.work)
        if self.work.drawn:
            self.witness, self.work.drawn = self.work.witness, None
        return self.total


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _dense(tables: Tensor) -> Tensor:
    """With the numbers of a table one after the other."""
    return tables if tables[0].is_contiguous() else tables.contiguous()

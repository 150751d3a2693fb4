"""Local SGD of a generalised linear model in the span of a client's rows.

Gradients are combinations of rows, so the weights stay  w_t = a_t w_0 + b_t c + C_t X  where c is what they are pulled
towards. The scores of the rows at w_t follow from those at w_0 and c and from the inner products X X', and the steps
touch nothing as long as w: all rows are read twice, at the start and at the end, instead of a minibatch twice in
every step. In C a client's rows are still in the processor's cache when they are read again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
from coterie.runtime.workers import side_by_side

FEWEST_PRODUCTS = 1 << 17  # rows times parameters of a client, below which calls cost more than arithmetic
THREAD_PRODUCTS = 1 << 21  # the same of all clients of a part, below which it is not worth a thread in C
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


class Minibatches(NamedTuple):
    """Minibatches of so many rows with these numbers, drawn with keys [k] or as rows and weights [k, steps, B]."""

    numbers: range
    batch: int
    keys: Callable[[], Tensor]
    drawn: Callable[[], tuple[Tensor, Tensor]]


def descend(
    model: Glm,
    rows: Rows,
    at: Tensor | None,
    w: Tensor,
    minibatches: Minibatches,
    lr: float,
    pull: float = 0.0,
    towards: Tensor | None = None,
    threads: int = 1,
) -> Unwritten:
    """`w` [k, d] of the clients `at` (None: all) after a step w <- w - lr (grad(w) + pull (w - towards)) per minibatch.

    Threads take parts of the clients with about as many rows each.
    """
    shape = (model.outputs, model.columns)
    tables, centres = w.unflatten(-1, shape), None
    if towards is not None and pull:
        centres = towards.unflatten(-1, shape)
    pulled = lr * pull if centres is not None else 0.0
    keeps, share, centre_share = 1 - pulled - lr * model.l2, 1.0, 0.0
    for _ in minibatches.numbers:
        share, centre_share = share * keeps, centre_share * keeps + pulled
    rates = Rates(lr, keeps, pulled, share, centre_share)
    work = (model, rows, at, tables, centres, minibatches, rates)
    if compiles(model, rows, tables, centres):
        enough = len(w) * len(rows.x) * model.d // (len(rows) * THREAD_PRODUCTS)
        descents: Compiled | Plain = Compiled(*work, max(1, min(threads, len(w), enough)))
    else:
        descents = Plain(*work, threads)
    return Unwritten(tables, share, centres, centre_share, descents, rows)


def compiles(model: Model, rows: Rows, *tables: Tensor | None) -> bool:
    """Whether C computes descents on these rows, from these tables."""
    single = all(part.dtype == torch.float32 for part in (rows.x, *tables) if part is not None)
    labels = rows.y.dtype == torch.int64 or (rows.y.dtype == torch.float32 and not isinstance(model, Softmax))
    places = rows.start.dtype == rows.size.dtype == torch.int64
    arrays = (rows.x, rows.y, rows.start, rows.size)
    whole = all(part.is_contiguous() for part in arrays) and rows.x.shape[1] >= native.FEWEST_COLUMNS
    return native.available and type(model) in LOSSES and single and labels and places and whole


@dataclass(eq=False)
class Descent:
    """Of all clients of a stack."""

    model: Glm
    rows: Rows
    at: Tensor | None
    tables: Tensor
    centres: Tensor | None
    minibatches: Minibatches
    rates: Rates
    threads: int

    @property
    def sizes(self) -> Tensor:
        return self.rows.size if self.at is None else self.rows.size[self.at]


class Plain(Descent):
    """With torch."""

    def compute(self, weights: Tensor | None, models: Tensor | None) -> Tensor | None:
        if not self._taken:
            self._drawn = self.minibatches.drawn()
        sums = side_by_side(
            lambda cut: self._part(cut, weights, models), ragged.cuts(self.sizes, self.threads)
        )
        return None if weights is None else torch.stack([part for part in sums if part is not None]).sum(0)

    @functools.cached_property
    def _taken(self) -> dict[int, tuple[ragged.Layout, Tensor, Tensor]]:
        """Of parts, by their first clients: where rows are, shares of rows after all steps, and a witness."""
        return {}

    @property
    def witness(self) -> Tensor:
        return torch.stack([witness for _, _, witness in self._taken.values()]).sum()

    def _part(self, k: slice, weights: Tensor | None, models: Tensor | None) -> Tensor | None:
        tables, x = self.tables[k], self.rows.x
        at = torch.arange(len(self.rows))[k] if self.at is None else self.at[k]
        centres = None if self.centres is None else self.centres[k]
        if k.start not in self._taken:
            layout = ragged.layout(self.rows.start[at], self.rows.size[at])
            scores = scripted(ragged.score)(tables, x, layout)
            middle = None if centres is None else scripted(ragged.score)(centres, x, layout)
            kernels = (self.rows.kernels(at), at * self.rows.largest)
            draws, keeps = (self._drawn[0][k], self._drawn[1][k] * -self.rates.lr), self.rates[1:3]
            steps = ragged.stepper(self.model._residuals)
            taken = steps(scores, middle, *draws, self.rows.y, layout, *kernels, *keeps)
            self._taken[k.start] = (layout, *taken)
        layout, shares, _ = self._taken[k.start]
        if models is not None:
            share, centre_share = self.rates[3:]
            before = (tables, share, centres, centre_share)
            scripted(ragged.combine_rows)(models[k], *before, shares, x, layout)
        return None if weights is None else scripted(ragged.add_rows)(shares, weights[k], x, layout)


class Compiled(Descent):
    """In C."""

    @functools.cached_property
    def work(self) -> native.Work:
        """All but what is asked for; the tensors that it points to are those of this object."""
        model, rows, numbers = self.model, self.rows, self.minibatches.numbers
        (kernels, made), clients = rows.inner_products(), len(self.tables)
        self.at = None if self.at is None else self.at.contiguous()
        self.tables = _dense(self.tables)
        self.centres = None if self.centres is None else _dense(self.centres)
        self.keys = self.minibatches.keys().contiguous()
        most = len(rows.x) if self.at is None else clients * rows.largest
        self.shares = torch.empty(model.outputs * most)
        self.witnesses = torch.empty(self.threads)
        held = (self.at, rows.start, rows.size, rows.x, rows.y, kernels, made, self.tables, self.centres)
        between = 0 if self.centres is None else self.centres.stride(0)
        return native.Work(
            self.threads, clients, len(rows), len(rows.x), model.outputs, model.columns,
            rows.largest, kernels.shape[1], len(numbers), self.minibatches.batch,
            LOSSES[type(model)], rows.y.dtype == torch.int64, model.reduction == "sum",
            *map(_address, held), self.tables.stride(0), between,
            self.keys.data_ptr(), numbers.start, numbers.step, *self.rates, self.shares.data_ptr(),
            witness=self.witnesses.data_ptr(),
        )  # fmt: skip

    @property
    def witness(self) -> Tensor:
        return self.witnesses.sum()

    def compute(self, weights: Tensor | None, models: Tensor | None) -> Tensor | None:
        work = self.work
        totals = None if weights is None else torch.zeros((self.threads, *self.tables.shape[1:]))
        asked = (None if weights is None else weights.float().contiguous(), totals, models)
        work.weights, work.totals, work.models = map(_address, asked)
        native.run(work)
        work.keys = None
        if totals is None:
            return None
        for part in range(1, self.threads):
            totals[0] += totals[part]
        return totals[0]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _dense(tables: Tensor) -> Tensor:
    """With the numbers of a table one after the other."""
    return tables if tables[0].is_contiguous() else tables.contiguous()

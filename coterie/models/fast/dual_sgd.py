"""Fast path: local SGD of a generalised linear model in the dual, where models are combinations of a client's rows.

Gradients are combinations of rows, so the weights stay  w_t = a_t w_0 + b_t c + C_t X  where c is the anchor or is
added to every gradient. The scores of the rows at w_t follow from those at w_0 and c and from the inner products X X',
and the steps touch nothing as long as w: all rows are read twice, at the start and at the end, instead of a minibatch
twice in every step. In C a client's rows are still in the processor's cache when they are read again.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from coterie._core.native import dual_sgd as native
from coterie._core.threads import side_by_side
from coterie.data.rows import Rows
from coterie.models.base import Model
from coterie.models.fast import ragged
from coterie.models.fast.lazy_models import LazyModels
from coterie.models.fast.ragged import scripted
from coterie.models.glm import Glm, Logistic, Softmax
from coterie.models.linear import Linear
from coterie.models.local_sgd import BatchDraws, SgdJob

FEWEST_PRODUCTS = 1 << 17  # rows times parameters of a client, below which calls cost more than arithmetic
THREAD_PRODUCTS = 1 << 21  # the same of all clients of a part, below which it is not worth a thread in C
VECTOR = 16  # numbers that a processor takes at a time
LOSSES: dict[type[Model], int] = {Softmax: 0, Logistic: 1, Linear: 2}  # as in C


def supports(job: SgdJob) -> bool:
    """Return True if as many rows are drawn as a client has, and their inner products are small enough."""
    if not pays(job.model, job.rows, job.draws.batch * len(job.draws.numbers)):
        return False
    if job.mask is None and job.importance is None:
        return True
    pulled = job.linear is not None or job.anchor is not None
    alone = job.mask is None or (not pulled and moving(job.model, job.mask) is not None)
    return alone and compiles(job.model, job.rows, job.x)


def in_parts(model: Model, rows: Rows) -> bool:
    """Return True if several threads compute parts of a stack, given enough steps."""
    return pays(model, rows, float("inf"))


def pays(model: Model, rows: Rows, drawn: float) -> TypeGuard[Glm]:
    """Return True if clients have at most `drawn` rows, and inner products take no more memory than rows."""
    if (
        type(model) not in LOSSES
        or not isinstance(model, Glm)
        or (model.l2 and model.intercept)
        or model.class_weights is not None
        or rows.augment is not None
    ):
        return False
    total, clients = rows.x.shape[0], len(rows)
    return (
        total <= drawn * clients
        and total * model.d >= FEWEST_PRODUCTS * clients
        and clients * rows.largest**2 <= total * model.columns
    )


def moving(model: Glm, mask: Tensor | None) -> int | None:
    """Return which columns a mask [d] leaves to the steps, as C says it, or None if it is none of these."""
    if mask is None:
        return native.ALL
    table = mask.view(model.outputs, model.columns)
    weights, last = table[:, :-1], table[:, -1]
    if not model.intercept or bool(weights.all()) == bool(last.all()):
        return None
    if bool(weights.all()):
        return None if bool(last.any()) else native.ALL_BUT_LAST
    return None if bool(weights.any()) else native.LAST


def run(job: SgdJob) -> LazyModels:
    """Return the models [k, d] after all steps; threads take parts of the clients with about as many rows each."""
    model, rows = job.model, job.rows
    assert isinstance(model, Glm)
    shape = (-1, model.outputs, model.columns)
    tables, anchors = job.x.view(shape), None
    if job.anchor is not None and job.prox:
        anchors = job.anchor.view(shape)
    pulled = job.lr * job.prox if anchors is not None else 0.0
    keeps, share, anchor_share = 1 - pulled - job.lr * model.l2, 1.0, 0.0
    if job.linear is not None:
        anchors, pulled = job.linear.view(shape), -job.lr
    for _ in job.draws.numbers:
        share, anchor_share = share * keeps, anchor_share * keeps + pulled
    rates = Rates(job.lr, keeps, pulled, share, anchor_share)
    work = (model, rows, job.at, tables, anchors, job.draws, rates, job.mask, job.importance)
    if compiles(model, rows, tables, anchors):
        clients = tables.shape[0]
        enough = clients * rows.x.shape[0] * model.d // (len(rows) * THREAD_PRODUCTS)
        descents: Compiled | Plain = Compiled(*work, max(1, min(job.threads, clients, enough)))
    else:
        descents = Plain(*work, job.threads)
    return LazyModels(tables, share, anchors, anchor_share, descents)


class Workspace:
    """Cache for the rows of a split: inner products of each client's rows, and the average asked for most recently."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._making = rows.x.dtype, threading.Lock()
        self.largest, self.clients = rows.largest, len(rows)
        self.usual: str | None = None  # "even" or "by rows"; "written" if models themselves were needed
        self._gram: tuple[Tensor, Tensor] | None = None

    def gram(self) -> tuple[Tensor, Tensor]:
        """Return inner products [n * largest, width] and which clients have theirs computed, [n].

        They are computed when a client is first asked for. `width` is `largest`, rounded up to whole vectors; the rest
        of a row is zero.
        """
        with self._making:
            if self._gram is None:
                width = -(-self.largest // VECTOR) * VECTOR
                products = torch.zeros(self.clients * self.largest, width, dtype=self._rows)
                self._gram = products, torch.zeros(self.clients, dtype=torch.bool)
            return self._gram

    def gram_of(self, rows: Rows, at: Tensor) -> Tensor:
        """Return the inner products, with those of the clients `at` computed."""
        products, made = self.gram()
        missing = at[~made[at]]
        for client in missing.tolist():
            x, first = rows.of(client)[0], client * self.largest
            torch.mm(x, x.mT, out=products[first : first + len(x), : len(x)])
        made[missing] = True
        return products


_workspaces: WeakKeyDictionary[Rows, Workspace] = WeakKeyDictionary()


def workspace(rows: Rows) -> Workspace:
    """Return the workspace of these rows."""
    found = _workspaces.get(rows)
    if found is None:
        found = _workspaces.setdefault(rows, Workspace(rows))
    return found


class Rates(NamedTuple):
    """Coefficients of a step w <- keeps w + pulled c - lr grad, and shares of w_0 and c after all steps."""

    lr: float
    keeps: float
    pulled: float
    share: float
    anchor_share: float


def compiles(model: Model, rows: Rows, *tables: Tensor | None) -> bool:
    """Return True if the C kernel supports this model, rows and dtype."""
    single = all(part.dtype == torch.float32 for part in (rows.x, *tables) if part is not None)
    labels = rows.y.dtype == torch.int64 or (rows.y.dtype == torch.float32 and not isinstance(model, Softmax))
    places = rows.start.dtype == rows.size.dtype == torch.int64
    arrays = (rows.x, rows.y, rows.start, rows.size)
    whole = all(part.is_contiguous() for part in arrays) and rows.x.shape[1] >= native.FEWEST_COLUMNS
    return native.available and type(model) in LOSSES and single and labels and places and whole


@dataclass(eq=False)
class DualDescent:
    """Local SGD in the dual for all clients of a stack."""

    model: Glm
    rows: Rows
    at: Tensor | None
    tables: Tensor
    anchors: Tensor | None
    draws: BatchDraws
    rates: Rates
    mask: Tensor | None
    importance: Tensor | None
    threads: int

    @property
    def sizes(self) -> Tensor:
        """Number of rows of each client, [k]."""
        return self.rows.size if self.at is None else self.rows.size[self.at]

    def usual_weights(self, dtype: torch.dtype) -> Tensor | None:
        """Return the weights [k, 1] of the last average asked for."""
        usual = workspace(self.rows).usual
        return None if usual in (None, "written") else self._weights(usual, dtype)

    @property
    def usually_written(self) -> bool:
        """Whether the models themselves were needed the last time."""
        return workspace(self.rows).usual == "written"

    def note_weights(self, weights: Tensor | None) -> None:
        """Remember the weights of an average, or that the models themselves were needed."""
        if weights is None:
            workspace(self.rows).usual = "written"
            return
        found = (
            kind for kind in ("even", "by rows") if torch.equal(self._weights(kind, weights.dtype), weights)
        )
        workspace(self.rows).usual = next(found, None)

    def _weights(self, kind: str | None, dtype: torch.dtype) -> Tensor:
        if kind == "even":
            return torch.ones(self.tables.shape[0], 1, dtype=dtype)
        return self.sizes.to(dtype).unsqueeze(-1)


class Plain(DualDescent):
    """Dual SGD with torch."""

    def compute(self, weights: Tensor | None, models: Tensor | None) -> Tensor | None:
        if not self._taken:
            self._drawn = self.draws.drawn()
        sums = side_by_side(
            lambda cut: self._part(cut, weights, models), ragged.cuts(self.sizes, self.threads)
        )
        return None if weights is None else torch.stack([part for part in sums if part is not None]).sum(0)

    @functools.cached_property
    def _taken(self) -> dict[int, tuple[ragged.Layout, Tensor, Tensor]]:
        """Return by the first client of each part: layout of rows, their shares after all steps, and a witness."""
        return {}

    @property
    def witness(self) -> Tensor:
        return torch.stack([witness for _, _, witness in self._taken.values()]).sum()

    def _part(self, k: slice, weights: Tensor | None, models: Tensor | None) -> Tensor | None:
        tables, x = self.tables[k], self.rows.x
        at = torch.arange(len(self.rows))[k] if self.at is None else self.at[k]
        anchors = None if self.anchors is None else self.anchors[k]
        if k.start not in self._taken:
            layout = ragged.layout(self.rows.start[at], self.rows.size[at])
            scores = scripted(ragged.score)(tables, x, layout)
            middle = None if anchors is None else scripted(ragged.score)(anchors, x, layout)
            kernels = (workspace(self.rows).gram_of(self.rows, at), at * self.rows.largest)
            draws, keeps = (self._drawn[0][k], self._drawn[1][k] * -self.rates.lr), self.rates[1:3]
            steps = ragged.stepper(self.model._residuals)
            taken = steps(scores, middle, *draws, self.rows.y, layout, *kernels, *keeps)
            self._taken[k.start] = (layout, *taken)
        layout, shares, _ = self._taken[k.start]
        if models is not None:
            share, anchor_share = self.rates[3:]
            before = (tables, share, anchors, anchor_share)
            scripted(ragged.combine_rows)(models[k], *before, shares, x, layout)
        return None if weights is None else scripted(ragged.add_rows)(shares, weights[k], x, layout)


class Compiled(DualDescent):
    """Dual SGD in C."""

    @functools.cached_property
    def work(self) -> native.Work:
        """Return the C struct without its outputs; the tensors it points to belong to this object."""
        model, rows, numbers = self.model, self.rows, self.draws.numbers
        (kernels, made), clients = workspace(rows).gram(), self.tables.shape[0]
        self.at = None if self.at is None else self.at.contiguous()
        self.tables = _dense(self.tables)
        self.anchors = None if self.anchors is None else _dense(self.anchors)
        self.keys = self.draws.keys().contiguous()
        total = rows.x.shape[0]
        most = total if self.at is None else clients * rows.largest
        self.shares = torch.empty(model.outputs * most)
        self.witnesses = torch.empty(self.threads)
        held = (self.at, rows.start, rows.size, rows.x, rows.y, kernels, made, self.tables, self.anchors)
        between = 0 if self.anchors is None else self.anchors.stride(0)
        if self.importance is not None:
            self.importance = self.importance.float().contiguous()
        apart = 0 if self.importance is None else self.importance.stride(0)
        return native.Work(
            self.threads, clients, len(rows), total, model.outputs, model.columns,
            rows.largest, kernels.shape[1], len(numbers), self.draws.batch,
            LOSSES[type(model)], rows.y.dtype == torch.int64, model.reduction == "sum",
            moving(model, self.mask) or native.ALL, *map(_address, held), self.tables.stride(0), between,
            _address(self.importance), apart, self.keys.data_ptr(), numbers.start, numbers.step, *self.rates,
            self.shares.data_ptr(),
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
    """Return tables of which each is contiguous."""
    return tables if tables[0].is_contiguous() else tables.contiguous()

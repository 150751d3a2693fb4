"""Models of a stack of clients in the span of their rows, as tensors of which sums and multiples stay in the span.

A model that a client reaches by gradients stays  a_1 w_1 + a_2 w_2 + ... + C X  where w_1, w_2, ... are models it began
with. So sums of models and gradients, and their multiples, are those of the short C and a. The scores that the next
gradient needs are sums too: of those of all rows at each w_j, taken once, and of C X X'. Models as long as w are
written when something else is done with them, at the end.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coterie._core import threads
from coterie._core.native import dual_sgd as native
from coterie.data.rows import Rows
from coterie.models.blocks import BLOCKS
from coterie.models.fast import ragged
from coterie.models.fast.dual_sgd import LOSSES, compiles, workspace
from coterie.models.fast.lazy_models import LazyModels, with_combined
from coterie.models.fast.ragged import scripted
from coterie.models.glm import Glm
from coterie.models.local_sgd import BatchDraws

aten = torch.ops.aten

Factor = float | Tensor
"""A number, or one for each client, [k, 1]."""


class RowSpan:
    """Rows of a stack of clients: arrays [outputs, length] have a number for each row of one client after the other."""

    def __init__(self, model: Glm, rows: Rows, at: Tensor | None, hands: int) -> None:
        self.model, self.rows, self.hands = model, rows, hands
        self.at = torch.arange(len(rows)) if at is None else at.contiguous()
        self.start, self.size = rows.start[self.at], rows.size[self.at]
        self.offset = self.size.cumsum(0) - self.size
        self.length, self.clients = int(self.size.sum()), len(self.at)
        self.compiled = compiles(model, rows)
        self.client = torch.repeat_interleave(self.size, output_size=self.length)
        self.place = torch.arange(self.length) - self.offset[self.client]  # of a row among its client's
        self._scores: dict[int, tuple[Tensor, Tensor]] = {}  # by identity of the models, which are held
        self._expanded: dict[int, tuple[Tensor, Tensor]] = {}
        self._waiting: list[Tensor] = []
        self._layout: ragged.Layout | None = None

    @property
    def order(self) -> Tensor:
        """Which of all rows each row is, [length]."""
        return self.start[self.client] + self.place

    @property
    def layout(self) -> ragged.Layout:
        """Where the rows are, for torch."""
        if self._layout is None:
            self._layout = ragged.layout(self.start, self.size)
        return self._layout

    def tables(self, x: Tensor) -> Tensor:
        """Return models [k, d] as [k, outputs, columns], of which each is contiguous."""
        tables = x.view(-1, self.model.outputs, self.model.columns)
        return tables if tables[0].is_contiguous() else tables.contiguous()

    def scores(self, x: Tensor) -> Tensor:
        """Return the scores [outputs, length] of all rows at models x [k, d].

        They are computed once, together with those of other models that wait for it, so that rows are read once.
        """
        if id(x) not in self._scores:
            waiting, self._waiting = [one for one in self._waiting if one is not x] + [x], []
            found = self.scores_each(waiting)
            self._scores |= {id(one): (one, part) for one, part in zip(waiting, found, strict=True)}
        return self._scores[id(x)][1]

    def scores_each(self, models: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the scores [outputs, length] at each of several sets of models [k, d]; rows are read once."""
        tables = [self.tables(one) for one in models]
        if not self.compiled:
            return tuple(scripted(ragged.score)(one, self.rows.x, self.layout) for one in tables)
        found = torch.empty(len(models), self.model.outputs, self.length)
        self._compute(tables, scores=found)
        return found.unbind(0)

    def await_scores(self, x: Tensor) -> None:
        """Let models x [k, d] be scored together with the next."""
        if id(x) not in self._scores and all(one is not x for one in self._waiting):
            self._waiting.append(x)

    def known_sum(self, x: Tensor) -> Tensor:
        """Return a number that is finite only if the models x are: the sum of their scores, if these are known."""
        known = self._scores.get(id(x))
        return known[1].sum() if known is not None else (x[0] if x.stride(0) == 0 else x).sum()

    def slopes(self, scores: Tensor, draws: BatchDraws) -> Tensor:
        """Return the gradient of a minibatch where rows have these scores: shares of the rows, and their scores.

        They are [2, outputs, length]: the gradient is the first times X, and its scores are the second.
        """
        if self.compiled:
            found, keys = torch.empty(2, *scores.shape), draws.keys().contiguous()
            numbers = {"number": draws.numbers.start, "batch": draws.batch}
            self._compute(numbers=numbers, scores=scores, keys=keys, shares=found[0], moved=found[1])
            return found
        drawn, weight = (part[:, 0] for part in draws.drawn()[:2])
        inside = drawn - self.start.unsqueeze(-1)
        places = (inside + self.offset.unsqueeze(-1)).flatten()
        outputs, width = len(scores), drawn.shape[1]
        now = scores.index_select(1, places).view(outputs, -1, width).transpose(0, 1).contiguous()
        slopes = self.model._residuals(now, self.rows.y[drawn]) * weight.unsqueeze(1)
        shares = torch.zeros_like(scores)
        shares.index_add_(1, places, slopes.transpose(0, 1).reshape(outputs, -1))
        kernels = workspace(self.rows).gram_of(self.rows, self.at)
        near = (inside + self.at.unsqueeze(-1) * self.rows.largest).flatten()
        changed = slopes @ kernels.index_select(0, near).view(len(drawn), width, -1)
        return torch.stack([shares, self.flat(changed)])

    def block_sums(self, x: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients [k, d] of all rows at x, and inner products [k, B, B] of those of the rows of each block."""
        if self.compiled:
            sums = torch.empty(self.clients, BLOCKS, BLOCKS)
            models = torch.empty(self.clients, self.model.d)
            self._compute([self.tables(x)], {"blocks": BLOCKS}, block=block, sums=sums, models=models)
            return models, sums
        slopes = self.model._residuals(self.scores(x).clone(), self.rows.y[self.order])
        if self.model.reduction == "mean":
            slopes = slopes / self.size[self.client]
        kernels = workspace(self.rows).gram_of(self.rows, self.at)
        kernels = kernels.view(len(self.rows), self.rows.largest, -1)[self.at, :, : self.rows.largest]
        own = torch.nn.functional.one_hot(block, BLOCKS).t().to(slopes.dtype)
        padded, own = (self.padded(part, self.rows.largest) for part in (slopes, own))
        return self.written(None, slopes), own.mT @ ((padded @ padded.mT) * kernels) @ own

    def flat(self, padded: Tensor) -> Tensor:
        """Return [k, outputs, width], with a client's rows first, as [outputs, length]."""
        return padded[self.client, :, self.place].t()

    def padded(self, flat: Tensor, width: int) -> Tensor:
        """Return [outputs, length] as [k, width, outputs], with zeros after a client's rows."""
        result = flat.new_zeros(self.clients, width, len(flat))
        result[self.client, self.place] = flat.t()
        return result

    def written(self, base: Tensor | None, shares: Tensor) -> Tensor:
        """Return models [k, d]: base [k, d], or zeros, plus shares [outputs, length] times X."""
        shape = (self.clients, self.model.outputs, self.model.columns)
        result = torch.empty(shape, dtype=shares.dtype)
        tables = None if base is None else self.tables(base)
        if self.compiled:
            self._compute([] if tables is None else [tables], shares=shares, models=result)
        else:
            tables = result.zero_() if tables is None else tables
            scripted(ragged.combine_rows)(result, tables, 1.0, None, 0.0, shares, self.rows.x, self.layout)
        return result.flatten(1)

    def total(self, shares: Tensor, weights: Tensor) -> Tensor:
        """Return the sum [outputs, columns] of weights[k] shares_k X_k."""
        if not self.compiled:
            found: Tensor = scripted(ragged.add_rows)(shares, weights, self.rows.x, self.layout)
            return found
        result = torch.zeros(self.model.outputs, self.model.columns)
        self._compute(shares=shares, weights=weights.float().contiguous(), totals=result)
        return result

    def inside(self, one: Any) -> SpanModels | None:
        """Return models [k, d] or [d] in this span, or None if these are not."""
        if isinstance(one, SpanModels):
            return one if one.span is self else None
        shape = (self.clients, self.model.d)
        models = isinstance(one, Tensor) and one.shape in (shape, shape[1:])
        if not models or one.dtype != self.rows.x.dtype:
            return None
        if one.dim() == 1:
            one = self._expanded.setdefault(id(one), (one, one.expand(shape)))[1]
        return SpanModels(self, ((one, 1.0),), None)

    def factor(self, value: Any) -> Factor | None:
        """Return a number, or numbers [k, 1], as a factor, or None if it is neither."""
        if not isinstance(value, Tensor):
            return float(value)
        if value.dim() == 0:
            return float(value)
        return value if value.shape == (self.clients, 1) and type(value) is Tensor else None

    def by_rows(self, factor: Factor) -> Factor:
        """Return a factor for each row, [length], if there is one for each client."""
        return factor.flatten().index_select(0, self.client) if isinstance(factor, Tensor) else factor

    @functools.cached_property
    def _work(self) -> native.SpanWork:
        """Return the C struct without what an operation takes and gives."""
        model, rows, (kernels, made) = self.model, self.rows, workspace(self.rows).gram()
        held = (self.at, rows.start, rows.size, self.offset, rows.x, rows.y, kernels, made)
        return native.SpanWork(
            *(0, self.clients, len(rows), len(rows.x), model.outputs, model.columns, rows.largest),
            *(kernels.shape[1], self.length, 0, LOSSES[type(model)], rows.y.dtype == torch.int64),
            *(tensor.data_ptr() for tensor in held),
            summed=model.reduction == "sum",
        )

    def _compute(
        self, tables: Sequence[Tensor] = (), numbers: Mapping[str, int] | None = None, **given: Tensor
    ) -> list[None]:
        """Run one operation of the C kernel; if it is long, in several threads."""
        addresses = (ctypes.c_void_p * len(tables))(*(table.data_ptr() for table in tables))
        steps = (ctypes.c_int64 * len(tables))(*(table.stride(0) for table in tables))
        numbers = {"count": len(tables)} | dict(numbers or {})
        numbers |= {name: tensor.data_ptr() for name, tensor in given.items()}

        def part(k: slice) -> None:
            work = native.SpanWork.from_buffer_copy(self._work)
            work.first, work.last = k.start, k.stop
            work.tables, work.steps = ctypes.addressof(addresses), ctypes.addressof(steps)
            for name, number in numbers.items():
                setattr(work, name, number)
            native.run_span(work)

        products = 0 if "keys" in given or "totals" in given else self.length * self.model.d
        return threads.shared_out(part, self.clients, products)


class SpanModels(LazyModels):
    """Models, or gradients,  a_1 w_1 + a_2 w_2 + ... + C X,  [k, d], whose sums and multiples are of the same form."""

    span: RowSpan
    bases: tuple[tuple[Tensor, Factor], ...]
    pair: Tensor | None

    @staticmethod
    def __new__(
        cls, span: RowSpan, bases: tuple[tuple[Tensor, Factor], ...], pair: Tensor | None
    ) -> SpanModels:
        """Make a tensor of the right shape that has no memory; `pair` [2, outputs, length] are C and C X X'."""
        shape = (span.clients, span.model.d)
        made: SpanModels = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=span.rows.x.dtype)
        made.span, made.bases, made.pair, made._written = span, bases, pair, None
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Stay in the span where sums and multiples are taken; write the models out for any other operation."""
        rule = LINEAR.get(func)
        found = None if rule is None else _combined(rule(*args, **(kwargs or {})))
        if found is not None:
            return found
        if func._schema.is_mutable and isinstance(args[0], cls):  # from here on it is this tensor
            args[0].bases, args[0].pair, args[0]._written = ((args[0].written().clone(), 1.0),), None, None
        return super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def scores(self) -> Tensor:
        """Scores of all rows, [outputs, length]."""
        total = None if self.pair is None else self.pair[1]
        if total is None and not self.bases:
            return torch.zeros(self.span.model.outputs, self.span.length, dtype=self.dtype)
        for base, _ in self.bases:
            self.span.await_scores(base)
        for base, factor in self.bases:
            total = _added(total, self.span.scores(base), self.span.by_rows(factor))
        assert total is not None
        return total

    def gradient(self, draws: BatchDraws) -> Tensor:
        """Return the gradients at these models on a minibatch."""
        slopes = SpanModels(self.span, (), self.span.slopes(self.scores, draws))
        l2 = self.span.model.l2
        return slopes + l2 * self if l2 else slopes

    def span_product(self, other: Tensor) -> Tensor | None:
        """Return the inner products [k, 1] of gradients with models, or None if these have a part outside the span."""
        known = self.span.inside(other)
        if known is None or self.pair is None or self.bases:
            return None
        products = (self.pair[0] * known.scores).sum(0)
        return products.new_zeros(len(self)).index_add_(0, self.span.client, products).unsqueeze(-1)

    def witness(self) -> Tensor:
        """Return a number that is finite only if all models are."""
        total = torch.zeros(()) if self.pair is None else self.pair.sum()
        for base, _ in self.bases:
            total = total + self.span.known_sum(base)
        return total

    def written(self) -> Tensor:
        """Return the models [k, d]."""
        if self._written is None:
            base: Tensor | None = None
            for table, factor in self.bases:
                base = _added(base, table, factor)
            if self.pair is None:
                self._written = torch.zeros(self.shape, dtype=self.dtype) if base is None else base
            else:
                self._written = self.span.written(base, self.pair[0])
        return self._written

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum [1, d] of the models with these weights [k, 1]."""
        if self._written is not None:
            return weights.t() @ self._written
        model = self.span.model
        total = torch.zeros(model.outputs, model.columns, dtype=self.dtype)
        if self.pair is not None:
            total = self.span.total(self.pair[0], weights.flatten())
        for table, factor in self.bases:
            number, share = (factor, weights) if isinstance(factor, float) else (1.0, weights * factor)
            total = with_combined(total, self.span.tables(table), share, number)
        return total.flatten().unsqueeze(0)

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what this is without computing it."""
        return f"SpanModels({self.shape[0]} models of {self.shape[1]} parameters)"


Terms = list[tuple[Any, Any]]
"""Tensors, of which some are models in a span, and their factors."""


def _product(a: Any, b: Any) -> Terms:
    return [(a, b)] if isinstance(a, SpanModels) else [(b, a)]


LINEAR: dict[Any, Callable[..., Terms]] = {
    aten.add.Tensor: lambda a, b, alpha=1: [(a, 1.0), (b, alpha)],
    aten.sub.Tensor: lambda a, b, alpha=1: [(a, 1.0), (b, -alpha)],
    aten.neg.default: lambda a: [(a, -1.0)],
    aten.mul.Tensor: _product,
    aten.div.Tensor: lambda a, b: [(a, 1.0 / b)],
    aten.lerp.Scalar: lambda a, b, weight: [(a, 1 - weight), (b, weight)],
    aten.lerp.Tensor: lambda a, b, weight: [(a, 1 - weight), (b, weight)],
    aten.addcmul.default: lambda a, b, c, value=1: [
        (a, 1.0),
        *((one, value * factor) for one, factor in _product(b, c)),
    ],
}


def _combined(terms: Terms) -> SpanModels | None:
    """Return the sum of tensors times factors, or None if it is not in a span."""
    span = next((one.span for one, _ in terms if isinstance(one, SpanModels)), None)
    if span is None:
        return None
    bases, pair = dict[int, tuple[Tensor, Factor]](), None
    for one, factor in terms:
        share = span.factor(factor)
        inside = None if share is None else span.inside(one)
        if inside is None or share is None:
            return None
        for table, part in inside.bases:
            before = bases.get(id(table), (table, 0.0))[1]
            bases[id(table)] = table, before + part * share
        if inside.pair is not None:
            pair = _added(pair, inside.pair, span.by_rows(share))
    return SpanModels(span, tuple(base for base in bases.values() if not _is(base[1], 0.0)), pair)


def _is(factor: Factor, number: float) -> bool:
    return isinstance(factor, float) and factor == number


def _added(total: Tensor | None, value: Tensor, factor: Factor) -> Tensor:
    """Return the total plus a factor times the value."""
    if total is None:
        return value if _is(factor, 1.0) else value * factor
    if isinstance(factor, Tensor):
        return torch.addcmul(total, value, factor)
    return torch.add(total, value, alpha=factor)

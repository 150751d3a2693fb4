"""Fast path: gradients of generalised linear models one by one in the span of a client's rows, their noise, and losses.

Local SGD has a path of its own, `dual-sgd`. This one is for methods that do something else between two gradients; see
coterie/models/fast/span_models.py for how.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.data.rows import Rows
from coterie.models.base import Model
from coterie.models.blocks import BLOCKS, dealt, spread_of
from coterie.models.fast.dual_sgd import LOSSES, compiles, pays
from coterie.models.fast.span_models import RowSpan, SpanModels
from coterie.models.glm import Glm
from coterie.models.metrics import ScoredRows

LEAST = 1e-3  # of a squared gradient: smaller noise is computed from gradients


def supports(model: Model, rows: Rows, models: Sequence[Tensor], drawn: int) -> bool:
    """Return True if so many rows are drawn that working in their span pays, and models are [k, d]."""
    fits = all(x.dim() == 2 and x.device.type == "cpu" and x.dtype == rows.x.dtype for x in models)
    return fits and rows.smallest > 0 and pays(model, rows, drawn)


def run(
    model: Glm, rows: Rows, at: Tensor | None, models: Sequence[Tensor], hands: int
) -> tuple[SpanModels, ...]:
    """Return models [k, d] of the clients `at` in the span of their rows; `hands` threads may compute."""
    span = RowSpan(model, rows, at, hands)
    for x in models:
        span.await_scores(x)
    return tuple(SpanModels(span, ((x, 1.0),), None) for x in models)


def supports_noise(model: Model, rows: Rows, x: Tensor, most: int) -> bool:
    """Return True if all rows of every client are used, and none has fewer than there are blocks."""
    return BLOCKS <= rows.smallest and rows.largest <= most and supports(model, rows, [x], len(rows.x))


def noise(model: Glm, rows: Rows, at: Tensor | None, x: Tensor, hands: int) -> Tensor | None:
    """Return what `mean_and_noise` finds of all rows at x [k, d], side by side; None if rounding would show in it.

    Errors of blocks are sums of rows, so their products follow from those of rows, which are known. Where blocks nearly
    agree, these products would cancel.
    """
    span = RowSpan(model, rows, at, hands)
    block = dealt(span.place, span.size, span.client)
    mean, sums = span.block_sums(x, block)
    inside = torch.zeros(span.clients, BLOCKS, dtype=torch.float64)
    inside.index_put_((span.client, block), torch.ones((), dtype=torch.float64), accumulate=True)
    centre = torch.eye(BLOCKS) - (inside / span.size.unsqueeze(-1)).unsqueeze(-1)
    products = (centre @ sums.double() @ centre.mT).to(x.dtype)
    length = mean.square().sum(-1, keepdim=True)
    if bool((products.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) < LEAST * length).any()):
        return None
    if model.l2:
        mean = mean.add(x, alpha=model.l2)
    return torch.cat([mean, *spread_of(products, torch.full_like(length, BLOCKS), length, model.d)], -1)


def supports_errors(model: Model, rows: Rows, models: Tensor) -> bool:
    """Return True if the C kernel scores these models [k, m, d] of linear predictors, which needs no padded rows."""
    many = models.dim() == 3 and models.device.type == "cpu" and rows.smallest > 0
    return many and type(model) in LOSSES and compiles(model, rows, models)


def errors(model: Glm, rows: Rows, at: Tensor | None, models: Tensor, hands: int) -> Tensor:
    """Return the mean losses of all rows by several models [k, m, d], without the regulariser, [k, m]."""
    span = RowSpan(model, rows, at, hands)
    scores = torch.stack(span.scores_each(models.unbind(1)))
    seen = ScoredRows(model.task, scores.mT, rows.y[span.order].expand(len(scores), -1), torch.ones(()))
    sums = scores.new_zeros(len(scores), span.clients).index_add_(1, span.client, seen.row_loss)
    return (sums / span.size).t()

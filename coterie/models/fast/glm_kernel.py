"""Fast path: gradients of a stack of softmax regressions in C, coterie/_core/native/dual_sgd.h.

Minibatches are read where the rows are, without a copy of all of them. Models with one output are left to torch,
which multiplies them as fast.
"""

from __future__ import annotations

import ctypes
from typing import TypeGuard

import torch
from torch import Tensor

from coterie._core.native import dual_sgd as native
from coterie._core.native import library
from coterie.data.rows import Rows
from coterie.models.base import Model
from coterie.models.class_weights import weigh
from coterie.models.fast.dual_sgd import LOSSES
from coterie.models.glm import Glm, Softmax


def supports(model: Model, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> bool:
    """Return True if the C kernel supports this model, dtype and device, and beats torch."""
    return _suits(model, w) and x.dtype == weight.dtype == torch.float32 and y.dtype == torch.int64


def run(model: Glm, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return gradients [k, d] of a stack w [k, d] on rows x [k, B, columns], y and weight [k, B]."""
    return _computed(model, w, x.contiguous(), y.contiguous(), None, weigh(weight, y, model.class_weights))


def supports_drawn(model: Model, w: Tensor, rows: Rows) -> bool:
    """Return True if the C kernel can read minibatches where these rows are."""
    plain = rows.augment is None and rows.x.is_contiguous() and rows.y.is_contiguous() and len(rows.x) > 0
    kinds = rows.x.dtype == torch.float32 and rows.y.dtype == torch.int64
    return _suits(model, w) and model.class_weights is None and plain and kinds


def run_drawn(model: Glm, w: Tensor, rows: Rows, drawn: Tensor, weight: Tensor) -> Tensor:
    """Return gradients [k, d] of a stack w [k, d] on the rows at `drawn` [k, B] with these weights [k, B]."""
    drawn = drawn.clamp(max=len(rows.x) - 1)  # a last client without rows begins after the end
    return _computed(model, w, rows.x, rows.y, drawn.contiguous(), weight.to(torch.float32))


def _suits(model: Model, w: Tensor) -> TypeGuard[Softmax]:
    return (
        native.available
        and type(model) is Softmax
        and w.dim() == 2
        and w.dtype == torch.float32
        and w.device.type == "cpu"
        and model.columns >= native.FEWEST_COLUMNS
    )


def _computed(model: Glm, w: Tensor, x: Tensor, y: Tensor, drawn: Tensor | None, weight: Tensor) -> Tensor:
    tables, weight = w if w[0].is_contiguous() else w.contiguous(), weight.contiguous()
    result = torch.empty(w.shape)
    work = native.GradientWork(
        *(len(w), weight.shape[1], model.outputs, model.columns, LOSSES[type(model)], True),
        *(tables.data_ptr(), tables.stride(0), x.data_ptr(), y.data_ptr()),
        *(None if drawn is None else drawn.data_ptr(), len(x)),
        *(weight.data_ptr(), result.data_ptr()),
    )
    assert library is not None
    native.check(library.coterie_glm_gradient(ctypes.byref(work), native.lanes))
    if model.l2:
        table, given = (one.view(len(w), model.outputs, model.columns) for one in (result, tables))
        penalised = model.columns - model.intercept
        table[..., :penalised].add_(given[..., :penalised], alpha=model.l2)
    return result

"""Fast path: gradients of a stack of linear, logistic or softmax regressions in C, coterie/_core/native/dual_sgd.h."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie._core.native import dual_sgd as native
from coterie.models.base import Model
from coterie.models.class_weights import weigh
from coterie.models.fast.dual_sgd import LOSSES
from coterie.models.glm import Glm, Softmax

FEWEST_OUTPUTS = 2  # below which torch multiplies as fast


def supports(model: Model, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> bool:
    """Return True if the C kernel supports this model, dtype and device, and beats torch."""
    if not isinstance(model, Softmax) or type(model) not in LOSSES or model.outputs < FEWEST_OUTPUTS:
        return False
    single = all(part.dtype == torch.float32 and part.device.type == "cpu" for part in (w, x, weight))
    return (
        native.available
        and single
        and w.dim() == 2
        and x.shape[-1] >= native.FEWEST_COLUMNS
        and y.dtype == torch.int64
    )


def run(model: Glm, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return gradients [k, d] of a stack w [k, d] on rows x [k, B, columns], y and weight [k, B]."""
    weight = weigh(weight, y, model.class_weights).contiguous()
    tables, x, y = w if w[0].is_contiguous() else w.contiguous(), x.contiguous(), y.contiguous()
    result = torch.empty(w.shape)
    native.gradients(
        native.GradientWork(
            *(len(w), weight.shape[1], model.outputs, model.columns, LOSSES[type(model)], True),
            *(tables.data_ptr(), tables.stride(0)),
            *(part.data_ptr() for part in (x, y, weight, result)),
        )
    )
    if model.l2:
        table, given = (one.view(len(w), model.outputs, model.columns) for one in (result, tables))
        penalised = model.columns - model.intercept
        table[..., :penalised].add_(given[..., :penalised], alpha=model.l2)
    return result

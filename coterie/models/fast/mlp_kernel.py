"""Fast path: gradients of a stack of chains of linear layers and activations (MLPs) in C, coterie/_core/native/mlp.h.

Parameters, rows and derivatives of a client stay in the processor's nearest cache until its gradient is written. The
clients of the stack are divided among the threads.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from coterie._core import native
from coterie._core.errors import DataError, SettingError
from coterie._core.threads import shared_out
from coterie.models.flat_module import FlatModule

if TYPE_CHECKING:
    from coterie.models.network import Network

KINDS = (nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid)  # in the order of `enum kind`
TASKS = ("multiclass", "binary", "regression")  # in the order of `enum task`


class _ClientStack(ctypes.Structure):
    """The C struct `stack` of coterie/_core/native/mlp_work.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("result", "w", "x", "weight", "y", "layer")),
        *((name, ctypes.c_int64) for name in ("layers", "task", "rows", "result_step")),
        *((name, ctypes.c_int64) for name in ("w_step", "x_client", "x_row", "y_client", "weight_client")),
    )


def supports(model: Network, w: Tensor, *rows: Tensor) -> bool:
    """Return True if the C kernel supports this model, dtype and device."""
    plain = isinstance(model.criterion, str) and model.precision == "full" and not model.compiled
    if not (plain and not model.tokens and native.takes(w)):
        return False
    layers = model.flat_module.layers
    return layers is not None and all(type(layer) in (*KINDS, nn.Identity) for layer in layers)


def run(model: Network, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return gradients [k, d] of a stack w [k, d] on rows x [k, B, ...], y and weight [k, B]."""
    assert native.library is not None
    flat_module, task = model.flat_module, model.task
    compute, layers = native.library.coterie_mlp, _layers(flat_module, math.prod(x.shape[2:]))
    w, x, weight = (
        _in_rows(w, torch.float32),
        _in_rows(x.flatten(2), torch.float32),
        _in_rows(weight, torch.float32),
    )
    y = _in_rows(y, torch.int64 if task == "multiclass" else torch.float32)
    result = torch.empty(w.shape)
    stack = _ClientStack(
        *(part.data_ptr() for part in (result, w, x, weight, y)),
        *(ctypes.addressof(layers), len(layers) // 4, TASKS.index(task), y.shape[1]),
        *(result.stride(0), w.stride(0), *x.stride()[:2], y.stride(0), weight.stride(0)),
    )

    def part(k: slice) -> None:
        problem = compute(ctypes.byref(stack), ctypes.c_int64(k.start), ctypes.c_int64(k.stop))
        if problem == 1:
            raise DataError(
                f"A label is outside 0..{layers[-2] - 1}, the classes that the module has outputs for."
            )
        if problem:
            raise MemoryError(f"no room for a client of {flat_module.d} parameters")

    shared_out(part, w.shape[0], weight.numel() * flat_module.d)
    return result


@functools.lru_cache(maxsize=64)
def _layers(flat_module: FlatModule, width: int) -> ctypes.Array[ctypes.c_int64]:
    """Return kind, inputs, outputs and presence of a bias for every layer; the first has so many inputs."""
    numbers: list[int] = []
    for layer in flat_module.layers or []:
        if isinstance(layer, nn.Identity):
            continue
        inputs = width
        if isinstance(layer, nn.Linear):
            if layer.in_features != inputs:
                raise SettingError(f"A layer takes {layer.in_features} numbers and is given {inputs}.")
            width = layer.out_features
        numbers += [KINDS.index(type(layer)), inputs, width, getattr(layer, "bias", None) is not None]
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _in_rows(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in this dtype with a contiguous last axis; the first may have any stride."""
    values = values.to(dtype)
    return values if values.stride(-1) == 1 or values.shape[-1] == 1 else values.contiguous()

"""Gradients of a stack of chains of linear layers and activations (MLPs), computed in C: coterie/native/chain.h.

Parameters, rows and slopes of a client stay in the processor's nearest cache until its gradient is written. The stack
is shared out to the threads there are.
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch
from torch import Tensor, nn

from coterie import native
from coterie.errors import DataError, SettingError
from coterie.models.skeleton import Skeleton
from coterie.runtime.workers import shared_out

KINDS = (nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid)  # in the order of `enum kind`
TASKS = ("multiclass", "binary", "regression")  # in the order of `enum task`


class _Stack(ctypes.Structure):
    """`struct stack` of coterie/native/chain_work.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("result", "w", "x", "weight", "y", "layer")),
        *((name, ctypes.c_int64) for name in ("layers", "task", "rows", "result_step")),
        *((name, ctypes.c_int64) for name in ("w_step", "x_client", "x_row", "y_client", "weight_client")),
    )


def known(skeleton: Skeleton) -> bool:
    """Whether the module is such a chain."""
    layers = skeleton.layers
    return layers is not None and all(type(layer) in (*KINDS, nn.Identity) for layer in layers)


def gradients(skeleton: Skeleton, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, task: str) -> Tensor:
    """[k, d] for w [k, d] and rows x [k, B, ...], y and weight [k, B], of the losses of one of `TASKS`."""
    assert native.library is not None
    compute, layers = native.library.coterie_chain, _layers(skeleton, math.prod(x.shape[2:]))
    w, x, weight = (
        _in_rows(w, torch.float32),
        _in_rows(x.flatten(2), torch.float32),
        _in_rows(weight, torch.float32),
    )
    y = _in_rows(y, torch.int64 if task == "multiclass" else torch.float32)
    result = torch.empty(w.shape)
    stack = _Stack(
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
            raise MemoryError(f"no room for a client of {skeleton.d} parameters")

    shared_out(part, w.shape[0], weight.numel() * skeleton.d)
    return result


@functools.lru_cache(maxsize=64)
def _layers(skeleton: Skeleton, width: int) -> ctypes.Array[ctypes.c_int64]:
    """Kind, inputs, outputs, and whether there is a bias, of every layer; the first has so many inputs."""
    numbers: list[int] = []
    for layer in skeleton.layers or []:
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
    """The same with this dtype and with its last axis without gaps; the first may have any stride."""
    values = values.to(dtype)
    return values if values.stride(-1) == 1 or values.shape[-1] == 1 else values.contiguous()

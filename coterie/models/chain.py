"""Gradients of a stack of chains of linear layers and activations (MLPs), written out: no graph is built.

Values are [k, B, width], in memory with the longer of the two last axes at the end: products are fastest so. The
stack is shared out to the threads there are, which run without Python's lock where torch can script a function.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from coterie.models.ragged import scripted
from coterie.models.skeleton import Skeleton
from coterie.runtime.workers import shared_out

LAYERS = (nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Identity)  # those that `_write` knows by their names


def known(skeleton: Skeleton) -> bool:
    """Whether the module is such a chain."""
    layers = skeleton.layers
    return layers is not None and all(type(layer) in LAYERS for layer in layers)


def gradients(skeleton: Skeleton, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, task: str) -> Tensor:
    """[k, d] for w [k, d] and rows x [k, B, ...], y and weight [k, B]; tasks as in `residuals`."""
    assert skeleton.layers is not None
    kinds = [type(layer).__name__ for layer in skeleton.layers]
    linear = [layer for layer in skeleton.layers if isinstance(layer, nn.Linear)]
    shapes = [[layer.out_features, layer.in_features] for layer in linear]
    biased = [layer.bias is not None for layer in linear]
    result, rows, write = torch.empty(w.shape, dtype=w.dtype, device=w.device), x.flatten(2), _ready()

    def compute(k: slice) -> None:
        write(result[k], w[k], rows[k], y[k], weight[k], kinds, shapes, biased, task)

    shared_out(compute, len(w), weight.numel() * skeleton.d)
    return result


def residuals(scores: Tensor, y: Tensor, weight: Tensor, task: str, axis: int) -> Tensor:
    """Derivatives of the weighted losses in the outputs `scores`, which are on this axis, for labels without it.

    The losses are those of "multiclass", "binary" and "regression".
    """
    y, weight = y.unsqueeze(axis), weight.unsqueeze(axis)
    if task == "multiclass":
        gap = torch.softmax(scores, axis)
        one = torch.full([], -1.0, dtype=gap.dtype, device=gap.device)
        gap.scatter_add_(axis, y.long(), one.expand(y.shape))
    elif task == "binary":
        gap = torch.sigmoid(scores) - y
    else:
        gap = scores - y
    return gap.mul_(weight)


@functools.cache
def _ready() -> Callable[..., Tensor]:
    """`_write`, scripted, after the two calls in which torch prepares it: ways are compared by their time."""
    write, one = scripted(_write), torch.ones(1, 1)
    for _ in range(2):
        write(one.clone(), one, one.unsqueeze(0), one, one, ["Linear"], [[1, 1]], [False], "regression")
    return write


def _write(
    result: Tensor,
    w: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    kinds: list[str],
    shapes: list[list[int]],
    biased: list[bool],
    task: str,
) -> Tensor:
    """result [k, d] <- gradients; `shapes` [outputs, inputs] and `biased` are those of the linear layers."""
    values, matrices, at = [x.to(w.dtype)], [w], 0
    for place in range(len(kinds)):
        here, kind = values[-1], kinds[place]
        if kind != "Linear" and (place == 0 or kinds[place - 1] != "Linear"):
            here = here.clone()  # others are written over what only they look at
        if kind == "Linear":
            layer = len(matrices) - 1
            outputs, width = shapes[layer]
            matrix = w.narrow(1, at, outputs * width).unflatten(1, (outputs, width))
            at += outputs * width
            matrices.append(matrix)
            if biased[layer]:
                here = _product(here, matrix.mT, w.narrow(1, at, outputs))
                at += outputs
            else:
                here = _product(here, matrix.mT, None)
        elif kind == "ReLU":
            here.relu_()
        elif kind == "Tanh":
            here.tanh_()
        elif kind == "Sigmoid":
            here.sigmoid_()
        values.append(here)
    pieces: list[Tensor] = []
    slope = residuals(values[-1].mT, y, weight, task, 1).mT
    for place in range(len(kinds) - 1, -1, -1):
        kind = kinds[place]
        if kind == "Linear":
            matrix, layer = matrices.pop(), len(matrices) - 1
            if biased[layer]:
                pieces.append(slope.sum(1))
            pieces.append(torch.bmm(slope.mT, values[place]).flatten(1))
            if layer == 0:
                break
            slope = _product(slope, matrix, None)
        elif kind == "ReLU":
            torch.ops.aten.threshold_backward(slope, values[place + 1], 0, grad_input=slope)
        elif kind == "Tanh":
            torch.ops.aten.tanh_backward(slope, values[place + 1], grad_input=slope)
        elif kind == "Sigmoid":
            torch.ops.aten.sigmoid_backward(slope, values[place + 1], grad_input=slope)
    torch.cat(pieces[::-1], 1, out=result)
    return result


def _product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """left [k, B, n] times right [k, n, width], plus bias [k, width], with the longer axis last in memory."""
    if right.size(2) >= left.size(1):
        if bias is None:
            return torch.bmm(left, right)
        return torch.baddbmm(bias.unsqueeze(1), left, right)
    left, right = left.mT, right.mT
    if bias is None:
        return torch.bmm(right, left).mT
    return torch.baddbmm(bias.unsqueeze(2), right, left).mT

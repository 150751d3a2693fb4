"""Gradients of a stack of chains of linear layers and activations (MLPs), written out: no graph is built.

Values are [k, B, width], in memory with the longer of the two last axes at the end: products are fastest so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from coterie.models.skeleton import Skeleton

Slope = Callable[[Tensor, Tensor], Tensor]
"""(derivative in the outputs, outputs) -> derivative in the inputs; may overwrite the first."""

SLOPES: dict[type[nn.Module], Slope] = {
    nn.ReLU: lambda slope, output: torch.ops.aten.threshold_backward(slope, output, 0),
    nn.Tanh: lambda slope, output: torch.ops.aten.tanh_backward(slope, output),
    nn.Sigmoid: lambda slope, output: torch.ops.aten.sigmoid_backward(slope, output),
    nn.Identity: lambda slope, output: slope,
}


def known(skeleton: Skeleton) -> bool:
    """Whether the module is a chain whose activations' slopes follow from their outputs."""
    layers = skeleton.layers
    return layers is not None and all(type(layer) in (nn.Linear, *SLOPES) for layer in layers)


def gradients(skeleton: Skeleton, w: Tensor, x: Tensor, residuals: Callable[[Tensor], Tensor]) -> Tensor:
    """[k, d] for w [k, d] and x [k, B, ...]; `residuals` turns outputs [k, outputs, B] into derivatives of the loss."""
    assert skeleton.layers is not None
    parts = [
        part.unflatten(-1, shape)
        for part, shape in zip(w.split(skeleton.sizes, -1), skeleton.shapes, strict=True)
    ]
    values, at = [x.to(w.dtype).flatten(2)], 0
    for layer in skeleton.layers:
        if not isinstance(layer, nn.Linear):
            values.append(layer(values[-1]))
            continue
        bias = None if layer.bias is None else parts[at + 1]
        values.append(_product(values[-1], parts[at].mT, bias))
        at += 1 if bias is None else 2
    slope = residuals(values.pop().mT).mT
    pieces: list[Tensor] = []
    for place in reversed(range(len(skeleton.layers))):
        layer, inputs = skeleton.layers[place], values[place]
        if not isinstance(layer, nn.Linear):
            outputs = values[place + 1] if place + 1 < len(values) else layer(inputs)
            slope = SLOPES[type(layer)](slope, outputs)
            continue
        if layer.bias is not None:
            pieces.append(slope.sum(-2))
        at -= 1 if layer.bias is None else 2
        pieces.append(torch.bmm(slope.mT, inputs).flatten(-2))
        if at:
            slope = _product(slope, parts[at])
    return torch.cat(pieces[::-1], -1)


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left [k, B, n] times right [k, n, width], plus bias [k, width], with the longer axis last in memory."""
    if right.shape[-1] >= left.shape[-2]:
        return torch.bmm(left, right) if bias is None else torch.baddbmm(bias.unsqueeze(-2), left, right)
    left, right = left.mT, right.mT
    return (torch.bmm(right, left) if bias is None else torch.baddbmm(bias.unsqueeze(-1), right, left)).mT

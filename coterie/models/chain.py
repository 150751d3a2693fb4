"""Gradients of a stack of chains of linear layers and activations (MLPs), written out: no graph is built.

Rows are the last axis inside, [k, width, B]: with that layout all products run at full speed.
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
    values, at = [x.to(w.dtype).flatten(2).mT], 0
    for layer in skeleton.layers:
        if not isinstance(layer, nn.Linear):
            values.append(layer(values[-1]))
        elif layer.bias is None:
            values.append(parts[at] @ values[-1])
            at += 1
        else:
            values.append(torch.baddbmm(parts[at + 1].unsqueeze(-1), parts[at], values[-1]))
            at += 2
    slope = residuals(values.pop())
    pieces: list[Tensor] = []
    for place in reversed(range(len(skeleton.layers))):
        layer, inputs = skeleton.layers[place], values[place]
        if not isinstance(layer, nn.Linear):
            outputs = values[place + 1] if place + 1 < len(values) else layer(inputs)
            slope = SLOPES[type(layer)](slope, outputs)
            continue
        if layer.bias is not None:
            pieces.append(slope.sum(-1))
        at -= 2 if layer.bias is not None else 1
        pieces.append((slope @ inputs.mT).flatten(-2))
        if at:
            slope = parts[at].mT @ slope
    return torch.cat(pieces[::-1], -1)

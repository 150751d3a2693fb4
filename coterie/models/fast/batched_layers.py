"""Fast path: gradients of a stack of chains of linear layers (MLPs) as products of stacks of matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from coterie.models.compiling import Gradient, compiled, computing_in

if TYPE_CHECKING:
    from coterie.models.network import Network


def supports(model: Network, w: Tensor, *rows: Tensor) -> bool:
    """Return True if the module is a chain of nn.Linear and activations with one of the library's losses."""
    return isinstance(model.criterion, str) and not model.tokens and model.flat_module.layers is not None


def run(model: Network, w: Tensor, *rows: Tensor) -> Tensor:
    """Return gradients [k, d] of a stack."""
    if model not in _totals:
        own = _total(model)
        _totals[model] = compiled(own, _total(model.exact)) if model.compiled else own
    with torch.enable_grad():
        leaf = w.detach().contiguous().requires_grad_()
        return torch.autograd.grad(_totals[model](leaf, *rows), leaf)[0]


_totals: WeakKeyDictionary[Network, Gradient] = WeakKeyDictionary()


def supports_features(model: Network, w: Tensor) -> bool:
    """Return True if the module is a chain of nn.Linear and activations that ends with a linear layer."""
    layers = model.flat_module.layers
    return layers is not None and model.stacked is not False and isinstance(layers[-1], nn.Linear)


def features(model: Network, w: Tensor, x: Tensor) -> Tensor:
    """Return what reaches the last layer, [k, B, width], for a stack of clients."""
    layers = model.flat_module.layers
    assert layers is not None
    return outputs(model, w, x, len(layers) - 1)


def outputs(model: Network, w: Tensor, x: Tensor, layers: int | None = None) -> Tensor:
    """Return outputs [k, B, outputs] of the first `layers` for a stack of clients, w [k, d] and x [k, B, ...].

    Inside, rows are the last axis: with that layout all products of a gradient run at full speed.
    """
    flat_module = model.flat_module
    assert flat_module.layers is not None
    parts = iter(zip(w.split(flat_module.sizes, -1), flat_module.shapes, strict=True))
    values = x.to(w.dtype).flatten(2).mT
    for layer in flat_module.layers[:layers]:
        if not isinstance(layer, nn.Linear):
            values = layer(values)
            continue
        weight, shape = next(parts)
        matrix = weight.unflatten(-1, shape)
        if layer.bias is None:
            values = matrix @ values
        else:
            values = torch.baddbmm(next(parts)[0].unsqueeze(-1), matrix, values)
    return values.mT


def _total(model: Network) -> Gradient:
    """Return the sum of a stack's objectives; row k of its gradient is that of client k."""

    def total(w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        with computing_in(model.precision, w.device):
            scores = outputs(model, w, x)
        losses = model.losses(scores.to(w.dtype).flatten(0, 1), y.flatten())
        return (losses.view(weight.shape) * weight).sum()

    return total

"""Batch normalisation whose statistics ignore padding and are part of the parameter vector.

A layer of `torch.nn` updates its running statistics as a side effect, which a function of one flat vector cannot do.
Here they are entries of that vector: they get no gradient, and `buffers` says where they come from:

- "personal": every client measures them on its own training rows whenever its model is scored or deployed;
- "averaged": `client.sgd` moves them with the layer's momentum, and they are averaged with the parameters;
- "shared": they stay as the module had them, and the layers use them in training too.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

POLICIES = ("personal", "averaged", "shared")


class MaskedBatchNorm(nn.Module):
    """Batch normalisation over the rows that have weight, or with running statistics in evaluation.

    `row_weight` [B] is set for a call in training; it is empty in evaluation.
    """

    running_mean: Tensor
    running_var: Tensor
    row_weight: Tensor

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        self.channels, self.eps = layer.num_features, layer.eps
        self.momentum = 0.1 if layer.momentum is None else layer.momentum
        self.weight, self.bias = layer.weight, layer.bias
        mean = torch.zeros(self.channels) if layer.running_mean is None else layer.running_mean.clone()
        var = torch.ones(self.channels) if layer.running_var is None else layer.running_var.clone()
        self.register_buffer("running_mean", mean)
        self.register_buffer("running_var", var)
        self.register_buffer("row_weight", torch.empty(0))
        self.seen: Tensor | None = None  # mean and unbiased variance of the last rows, [2, channels]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows x [B, channels, ...]."""
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        if self.row_weight.numel() == 0:
            mean, var = self.running_mean, self.running_var
        else:
            mean, var = self._measured(x)
        scaled = (x - mean.view(shape)) * torch.rsqrt(var.view(shape) + self.eps)
        if self.weight is None:
            return scaled
        return scaled * self.weight.view(shape) + self.bias.view(shape)

    def _measured(self, x: Tensor) -> tuple[Tensor, Tensor]:
        here = (self.row_weight > 0).to(x.dtype).view(-1, *(1 for _ in x.shape[1:]))
        axes = (0, *range(2, x.dim()))
        count = here.sum() * x[0, 0].numel()
        mean = (x * here).sum(axes) / count.clamp(min=1)
        gap = (x - mean.view(1, -1, *(1 for _ in x.shape[2:]))) * here
        squares = gap.square().sum(axes)
        self.seen = torch.stack([mean, squares / (count - 1).clamp(min=1)])
        return mean, squares / count.clamp(min=1)


def masked(module: nn.Module) -> nn.Module:
    """Return a copy whose batch normalisation layers are `MaskedBatchNorm`."""
    result = copy.deepcopy(module)
    if isinstance(result, _BatchNorm):
        return MaskedBatchNorm(result)
    for parent in list(result.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, _BatchNorm):
                setattr(parent, name, MaskedBatchNorm(layer))
    return result


def has_batch_norm(module: nn.Module) -> bool:
    """Return True if a module has a batch normalisation layer."""
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())

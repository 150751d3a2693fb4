"""Low-rank adapters for the linear layers of any module, whose own weights stay as they are."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie._core.errors import SettingError


class LowRank(nn.Module):
    """Linear layer W x + b with frozen W and b, plus the adapter (alpha / rank) B A x, which is trained."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        options = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        self.bias = (
            None if layer.bias is None else nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        )
        self.scale = alpha / rank
        bound = layer.in_features**-0.5
        self.lora_A = nn.Parameter(torch.empty(rank, layer.in_features, **options).uniform_(-bound, bound))
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank, **options))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for rows x [B, in]."""
        adapted = functional.linear(functional.linear(x, self.lora_A), self.lora_B)
        return functional.linear(x, self.weight, self.bias) + self.scale * adapted


def low_rank(module: nn.Module, rank: int = 4, alpha: float | None = None) -> nn.Module:
    """Return a copy of a module whose linear layers are frozen and have low-rank adapters (LoRA).

    Parameters
    ----------
    module
        Usually a pretrained one. Parameters of other layers are frozen too.
    rank
        Rank of the adapters.
    alpha
        The adapter's output is multiplied by alpha / rank; by default 1.

    Returns
    -------
    nn.Module
        Its trained parameters are `lora_A` [rank, in] and `lora_B` [out, rank] of each linear layer. The second is
        zero, so the copy starts as the module (Hu et al., ICLR 2022, arXiv:2106.09685).

    Examples
    --------
    >>> import torch, coterie
    >>> from torch import nn
    >>> pretrained = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> model = coterie.models.network(coterie.models.low_rank(pretrained, rank=1))
    >>> model = model.fit_to(torch.randn(10, 3), torch.arange(10) % 2)
    >>> model.d, model.groups["lora_A"].sum().item()
    (13, 7)
    """
    if rank < 1 or int(rank) != rank:
        raise SettingError(f"rank={rank}: give a whole number, 1 or more.")
    copied = copy.deepcopy(module)
    for parameter in copied.parameters():
        parameter.requires_grad_(False)
    if isinstance(copied, nn.Linear):
        return LowRank(copied, rank, alpha or rank)
    found = 0
    for part in list(copied.modules()):
        for name, layer in part.named_children():
            if type(layer) is nn.Linear:
                setattr(part, name, LowRank(layer, rank, alpha or rank))
                found += 1
    if not found:
        raise SettingError(f"{type(module).__name__} has no nn.Linear that an adapter could be added to.")
    return copied

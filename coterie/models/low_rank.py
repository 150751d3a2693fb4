"""Low-rank adapters for the linear layers of any module, whose own weights stay as they are."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie._core.errors import SettingError
from coterie.models.base import Model


class LowRank(nn.Module):
    """Linear layer W x + b with frozen W and b, plus the adapter (alpha / rank) B A x, which is trained."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        self.bias = (
            None if layer.bias is None else nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        )
        self.scale = alpha / rank
        bound = layer.in_features**-0.5
        self.lora_A = nn.Parameter(self.weight.new_empty(rank, layer.in_features).uniform_(-bound, bound))
        self.lora_B = nn.Parameter(self.weight.new_zeros(layer.out_features, rank))

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


def rank_of(model: Model) -> int:
    """Return the rank of a model's low-rank adapters, 0 for a model without any."""
    return sum(1 for name in model.groups if name.startswith("rank "))


def component(model: Model) -> Tensor:
    """Return for each parameter of low-rank adapters to which of the adapters of rank one it belongs, [d]."""
    found = torch.full((model.d,), -1)
    for k in range(rank_of(model)):
        found[model.groups[f"rank {k}"]] = k
    return found


def product_norms(model: Model, w: Tensor) -> Tensor:
    """Return the lengths of all products B A of the adapters w [..., d] together, [..., 1], without forming them."""
    groups, total = model.groups, torch.zeros_like(w[..., :1])
    rank = rank_of(model)
    for a, b in zip(groups.slices["lora_A"], groups.slices["lora_B"], strict=True):
        first, second = w[..., a].unflatten(-1, (rank, -1)), w[..., b].unflatten(-1, (-1, rank))
        total += ((first @ first.mT) * (second.mT @ second)).sum((-2, -1)).unsqueeze(-1)
    return total.clamp(min=0).sqrt()

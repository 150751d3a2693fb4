"""The loss of every token from hidden states, without the logits of the whole batch ever being there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _TokenLoss(torch.autograd.Function):
    """-log softmax(hidden weight')[target] piece by piece; the gradient in `hidden` is made on the way."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, piece: int) -> Tensor:
        losses = torch.empty(len(hidden), dtype=_sum_type(hidden.dtype), device=hidden.device)
        wanted = ctx.needs_input_grad[0]
        slopes = torch.empty_like(hidden) if wanted else None
        for first in range(0, len(hidden), piece):
            rows = slice(first, first + piece)
            logits = (hidden[rows] @ weight.t()).to(losses.dtype)
            place = targets[rows].unsqueeze(1)
            total = logits.logsumexp(1, keepdim=True)
            losses[rows] = (total - logits.gather(1, place)).squeeze(1)
            if slopes is not None:
                share = logits.sub_(total).exp_()
                share.scatter_add_(1, place, torch.full_like(total, -1.0))
                slopes[rows] = share.to(hidden.dtype) @ weight
        if slopes is not None:
            ctx.save_for_backward(slopes)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * given.unsqueeze(1).to(slopes.dtype), None, None, None


def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor, piece: int = 4096) -> Tensor:
    """Losses [tokens] of hidden states [tokens, width] under a frozen head `weight` [vocabulary, width].

    At most `piece` rows of logits exist at a time. Sums are in float32, or in float64 where the states are.
    """
    return _TokenLoss.apply(hidden, weight, targets, piece)


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32

"""Loss of every token from hidden states, without the logits of the whole batch in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Piece = Callable[..., tuple[Tensor, Tensor]]


def _in_place(hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the losses of some tokens, and softmax minus one-hot, which is their gradient in the logits."""
    logits = (hidden @ weight.t()).to(dtype)
    place = targets.unsqueeze(1)
    total = logits.logsumexp(1, keepdim=True)
    losses = (total - logits.gather(1, place)).squeeze(1)
    share = logits.sub_(total).exp_()
    share.scatter_add_(1, place, torch.full_like(total, -1.0))
    return losses, share.to(hidden.dtype)


def _by_element(hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the same, in a form that a compiler fuses into two passes over the logits."""
    logits = (hidden @ weight.t()).to(dtype)
    place = targets.unsqueeze(1)
    total = logits.logsumexp(1, keepdim=True)
    losses = (total - logits.gather(1, place)).squeeze(1)
    here = torch.arange(weight.shape[0], device=weight.device) == place
    return losses, ((logits - total).exp() - here.to(dtype)).to(hidden.dtype)


@functools.cache
def _fused() -> Piece:
    return torch.compile(_by_element, dynamic=False)


class _TokenLoss(torch.autograd.Function):
    """Loss -log softmax(hidden weight')[target], piece by piece, with its gradient in `hidden`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, piece: int, compiled: bool
    ) -> Tensor:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        losses = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        grads = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        size = -(-len(hidden) // -(-len(hidden) // piece))
        for first in range(0, len(hidden), size):
            rows = slice(first, first + size)
            if grads is None:
                logits = (hidden[rows] @ weight.t()).to(dtype)
                chosen = logits.gather(1, targets[rows].unsqueeze(1)).squeeze(1)
                losses[rows] = logits.logsumexp(1) - chosen
                continue
            compute = _fused() if compiled else _in_place
            losses[rows], share = compute(hidden[rows], weight, targets[rows], dtype)
            grads[rows] = share @ weight
        if grads is not None:
            ctx.save_for_backward(grads)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grads,) = ctx.saved_tensors
        return grads * given.unsqueeze(1).to(grads.dtype), None, None, None, None


def token_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, piece: int = 4096, compiled: bool = False
) -> Tensor:
    """Return the losses [tokens] of hidden states [tokens, width] under a frozen head `weight` [vocabulary, width].

    At most `piece` rows of logits exist at a time. Sums are float32, or float64 if the states are.
    """
    losses: Tensor = _TokenLoss.apply(hidden, weight, targets, piece, compiled)  # type: ignore[no-untyped-call]
    return losses

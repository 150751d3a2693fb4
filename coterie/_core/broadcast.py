"""Stacks [n, ...] whose rows are all equal, such as FedAvg's model: one row in memory, broadcast to n clients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_broadcast(stack: Tensor) -> bool:
    """Return True if the stack holds one row in memory that is repeated."""
    return stack.dim() > 0 and len(stack) > 1 and stack.stride(0) == 0


def index(stack: Tensor, at: Tensor) -> Tensor:
    """Return the rows at the positions `at` [k], still broadcast if the stack is."""
    return stack[0].expand(len(at), *stack.shape[1:]) if is_broadcast(stack) else stack[at]


def compact(stack: Tensor) -> Tensor:
    """Return the stack contiguous in memory, or one copied row broadcast to all if its rows are equal."""
    return stack[0].clone().expand_as(stack) if is_broadcast(stack) else stack.contiguous()


def to(stack: Tensor, device: torch.device | str) -> Tensor:
    """Move a stack to a device, copying one row only if its rows are equal."""
    return stack[0].to(device).expand_as(stack) if is_broadcast(stack) else stack.to(device)


def cat(stacks: Sequence[Tensor]) -> Tensor:
    """Concatenate stacks; those that repeat the same row stay one row."""
    first = stacks[0]
    if all(part.stride(0) == 0 and part.data_ptr() == first.data_ptr() for part in stacks):
        return first[0].expand(sum(map(len, stacks)), *first.shape[1:])
    return torch.cat(list(stacks))

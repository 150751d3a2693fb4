"""Stacks [n, ...] whose rows are all the same, such as the model of FedAvg: held once for any number of clients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_shared(stack: Tensor) -> bool:
    return stack.dim() > 0 and len(stack) > 1 and stack.stride(0) == 0


def picked(stack: Tensor, at: Tensor) -> Tensor:
    """The rows at these positions [k]."""
    return stack[0].expand(len(at), *stack.shape[1:]) if is_shared(stack) else stack[at]


def kept(stack: Tensor) -> Tensor:
    """The stack in memory of its own, or its one row."""
    return stack[0].clone().expand_as(stack) if is_shared(stack) else stack.contiguous()


def moved(stack: Tensor, device: torch.device | str) -> Tensor:
    return stack[0].to(device).expand_as(stack) if is_shared(stack) else stack.to(device)


def joined(stacks: Sequence[Tensor]) -> Tensor:
    """Stacks one after the other."""
    first = stacks[0]
    if all(part.stride(0) == 0 and part.data_ptr() == first.data_ptr() for part in stacks):
        return first[0].expand(sum(map(len, stacks)), *first.shape[1:])
    return torch.cat(list(stacks))

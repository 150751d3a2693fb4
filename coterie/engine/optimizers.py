"""Optimisers of local steps: what they remember stays with the client, between rounds too."""

from __future__ import annotations

import torch
from torch import Tensor

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
HEAVY, FIRST, SECOND, TINY, DECAY = 0.9, 0.9, 0.999, 1e-8, 0.01
SLOTS = {"momentum": 1, "adam": 2, "adamw": 2}


def memory_like(name: str, x: Tensor) -> Tensor:
    """Return the empty memory of an optimiser of x [..., d]: running means one after the other, and a count.

    Examples
    --------
    >>> import torch
    >>> from coterie.engine.optimizers import memory_like
    >>> memory_like("adam", torch.zeros(3, 5)).shape
    torch.Size([3, 11])
    """
    return x.new_zeros(*x.shape[:-1], SLOTS[name] * x.shape[-1] + 1)


def step(name: str, x: Tensor, grad: Tensor, lr: float, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Take one step of an optimiser.

    momentum: m <- 0.9 m + g, x <- x - lr m (Polyak 1964). adam: Kingma, Ba (2015) with beta = 0.9, 0.999 and epsilon =
    1e-8. adamw: the same and x <- x - 0.01 lr x (Loshchilov, Hutter 2019). These are torch.optim's.

    Parameters
    ----------
    name
        "momentum", "adam" or "adamw".
    x
        Parameters, [..., d].
    grad
        Gradient there, [..., d].
    lr
        Step size.
    memory
        What the optimiser remembers, from `memory_like` or an earlier step.

    Returns
    -------
    tuple of Tensor
        Parameters and memory after the step.

    Examples
    --------
    >>> import torch
    >>> from coterie.engine.optimizers import memory_like, step
    >>> x = torch.ones(1)
    >>> x, memory = step("adam", x, 5 * x, 0.1, memory_like("adam", x))
    >>> round(x.item(), 4)
    0.9
    """
    d = x.shape[-1]
    count = memory[..., -1:] + 1
    if name == "momentum":
        mean = HEAVY * memory[..., :d] + grad
        return x - lr * mean, torch.cat([mean, count], -1)
    mean = torch.lerp(grad, memory[..., :d], FIRST)
    square = torch.lerp(grad.square(), memory[..., d : 2 * d], SECOND)
    size = (square / (1 - SECOND**count)).sqrt() + TINY
    start = x * (1 - DECAY * lr) if name == "adamw" else x
    return start - lr * (mean / (1 - FIRST**count)) / size, torch.cat([mean, square, count], -1)

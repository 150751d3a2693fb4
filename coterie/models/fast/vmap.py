"""Fast path: gradients of a stack of any module with torch.func.vmap, best for many small models."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import grad, vmap

from coterie.models.compiling import Gradient, compiled
from coterie.models.mapping import mapped

if TYPE_CHECKING:
    from coterie.models.network import Network


def supports(model: Network, w: Tensor, *rows: Tensor) -> bool:
    """Return True; a module that cannot be mapped raises an error when it is tried."""
    return True


def run(model: Network, w: Tensor, *rows: Tensor) -> Tensor:
    """Return gradients [k, d] of a stack."""
    if not model.compiled:
        return mapped(functools.partial(grad(model.objective), unrolled=True), w, *rows)
    if model not in _compiled:
        _compiled[model] = compiled(_total(model), _total(model.exact))
    with torch.enable_grad():
        leaf = w.detach().contiguous().requires_grad_()
        return torch.autograd.grad(_compiled[model](leaf, *rows), leaf)[0]


_compiled: WeakKeyDictionary[Network, Gradient] = WeakKeyDictionary()


def _total(model: Network) -> Gradient:
    """Return the sum of a stack's objectives; row k of its gradient is that of client k."""
    objective = functools.partial(model.objective, unrolled=True)

    def total(w: Tensor, *rows: Tensor) -> Tensor:
        return vmap(objective)(w, *rows).sum()

    return total

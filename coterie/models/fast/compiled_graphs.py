"""Fast path: gradients of a stack on a GPU as replays of CUDA graphs of compiled code.

Compiling takes from seconds to a minute, so `GradientBackends` tries this path only with shapes whose training has
lasted for a while already, and takes it if it is measured as the fastest. The compiler keeps its code in a cache on
disk, from which later runs take it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import Tensor

from coterie.models.fast import cuda_graphs

if TYPE_CHECKING:
    from coterie.models.network import Network


def supports(model: Network, w: Tensor, *rows: Tensor) -> bool:
    """Return True on a GPU, if the model is not compiled anyway and rows of this shape may get graphs."""
    return w.is_cuda and not model.compiled and cuda_graphs.supports(_compiled(model), w, *rows)


def run(model: Network, w: Tensor, *rows: Tensor) -> Tensor:
    """Return gradients [k, d] of a stack."""
    return cuda_graphs.run(_compiled(model), w, *rows)


_twins: WeakKeyDictionary[Network, Network] = WeakKeyDictionary()


def _compiled(model: Network) -> Network:
    """Return the same network with compiled gradients."""
    if model not in _twins:
        _twins[model] = replace(model, compiled=True, decisions={})
    return _twins[model]

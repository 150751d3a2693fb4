"""Job description of local SGD of a stack of clients, for the fast paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from coterie.data.rows import Rows
from coterie.models.base import Model


class BatchDraws(NamedTuple):
    """Minibatches of `batch` rows with these step numbers.

    `keys()` gives the hash keys [k] they are drawn with, `drawn()` rows and weights [k, steps, batch] and keys [k,
    steps].
    """

    numbers: range
    batch: int
    keys: Callable[[], Tensor]
    drawn: Callable[[], tuple[Tensor, Tensor, Tensor]]


class SgdJob(NamedTuple):
    """Steps x <- x - lr (grad(x) + prox (x - anchor) + linear), one per minibatch, for the clients `at` (None: all).

    `x`, `anchor` and `linear` are [k, d], and one of the last two is None; `threads` may compute parts of the stack.
    """

    model: Model
    rows: Rows
    at: Tensor | None
    x: Tensor
    lr: float
    prox: float
    anchor: Tensor | None
    draws: BatchDraws
    threads: int = 1
    linear: Tensor | None = None

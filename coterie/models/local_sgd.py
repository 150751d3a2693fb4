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


class Centres(NamedTuple):
    """Pull of a row's features to the centre of its class: strength times |features - centre|^2 / 2, meant over rows.

    `points` [..., K, f] are among the features of the last layer, and `known` [..., K] is 1 for classes that have one;
    rows of the others are not pulled. Numbers are one class.
    """

    points: Tensor
    known: Tensor
    strength: float


class SgdJob(NamedTuple):
    """Steps x <- x - lr (grad(x) + prox (x - anchor) + linear), one per minibatch, for the clients `at` (None: all).

    `x`, `anchor` and `linear` are [k, d], and one of the last two is None; `threads` may compute parts of the stack.
    Parameters outside `mask` [d] stay. `importance` [k, rows] weighs the losses of a client's rows, in their order.
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
    mask: Tensor | None = None
    importance: Tensor | None = None

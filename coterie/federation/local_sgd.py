"""Local SGD of a stack of clients in the fastest way that its model allows; all of them give the same models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.federation import randomness
from coterie.models import span
from coterie.models.unwritten import Unwritten
from coterie.runtime.workers import workers

if TYPE_CHECKING:
    from coterie.data.rows import Batch
    from coterie.federation.client import Client


def descend(
    client: Client, x: Tensor, lr: float, numbers: range, pull: float, towards: Tensor | None
) -> Tensor | Unwritten:
    """A step x <- x - lr (grad(x) + pull (x - towards)) on each of the minibatches with these numbers."""
    shard, batch = client._shard, client._batch
    rows, model = shard.train, shard.model
    stacked = len(client.lead) == 1 and not shard.loop and x.device.type == "cpu"
    if stacked and 0 < batch < rows.largest and len(numbers):
        if span.pays(model, rows, batch * len(numbers)):
            minibatches = span.Minibatches(
                numbers, batch, lambda: client.keys, lambda: _drawn(client, numbers)[:2]
            )
            return span.descend(model, rows, client._at, x, minibatches, lr, pull, towards, client.threads)
        if model.takes_turns(x, (batch, *rows.x.shape[1:])):
            return _by_turns(client, x, lr, numbers, pull, towards)
    for k, number in enumerate(numbers):
        client._step = number - 1
        slope = client.grad(x)
        if towards is not None and pull:
            slope.add_((x - towards).mul_(pull))
        slope.mul_(lr)
        x = x.sub_(slope) if k else x - slope
    return x


def _by_turns(
    client: Client, x: Tensor, lr: float, numbers: Sequence[int], pull: float, towards: Tensor | None
) -> Tensor:
    """All steps of a client, then those of the next: as many clients side by side as torch has threads."""
    model, rows = client._shard.model, client._shard.train
    drawn, weight, keys = _drawn(client, numbers)
    ends = torch.empty(x.shape, dtype=x.dtype)

    def batches(k: int) -> Iterator[Batch]:
        for t in range(len(numbers)):
            yield rows.take(drawn[k, t], weight[k, t], keys[k, t])

    def train(k: int) -> None:
        ends[k] = model.descend(x[k], batches(k), lr, pull, None if towards is None else towards[k])

    threads = min(torch.get_num_threads(), len(x))
    for _ in workers(threads).map(train, range(len(x))) if threads > 1 else map(train, range(len(x))):
        pass
    return ends


def _drawn(client: Client, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and weights [k, steps, B] of these minibatches, and keys [k, steps] of their draws."""
    rows = client._shard.train
    known = None if client.minibatches is None else client.minibatches(numbers, client._batch)
    if known is not None:
        drawn, weight, keys = known
    else:
        keys = randomness.fold(client.keys.unsqueeze(-1), torch.as_tensor(numbers))
        drawn, weight = rows.draw(client._at, keys, client._batch)
    if client._shard.model.reduction == "sum":
        weight = weight * client._pick(rows.size).view(-1, 1, 1)
    return drawn, weight, keys

"""Fast path: local SGD of networks on a CPU, client after client, as many side by side as torch has threads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from coterie._core.threads import workers
from coterie.data.rows import Batch
from coterie.models.local_sgd import SgdJob


def supports(job: SgdJob) -> bool:
    """Return True if gradients of this stack are known to be computed client by client."""
    if job.mask is not None or job.importance is not None:
        return False
    return job.model.prefers_loop(job.x, (job.draws.batch, *job.rows.x.shape[1:]))


def run(job: SgdJob) -> Tensor:
    """Return the models [k, d] after all steps."""
    drawn, weight, keys = job.draws.drawn()
    ends = torch.empty(job.x.shape, dtype=job.x.dtype)

    def batches(k: int) -> Iterator[Batch]:
        for t in range(len(job.draws.numbers)):
            yield job.rows.take(drawn[k, t], weight[k, t], keys[k, t])

    def train(k: int) -> None:
        anchor = None if job.anchor is None else job.anchor[k]
        linear = None if job.linear is None else job.linear[k]
        ends[k] = job.model.sgd(job.x[k], batches(k), job.lr, job.prox, anchor, linear)

    threads = min(torch.get_num_threads(), len(ends))
    for _ in workers(threads).map(train, range(len(ends))) if threads > 1 else map(train, range(len(ends))):
        pass
    return ends

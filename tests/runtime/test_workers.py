"""Stacks computed side by side give what stacks computed one after the other give.

The bits are the same where the ends of vectors fall on the same places of the processor's registers.
"""

from __future__ import annotations

import os

import pytest
import torch

import coterie
from coterie import Federation, fit
from coterie.algorithms import make
from coterie.errors import CoterieError
from coterie.runtime import shard
from coterie.runtime.workers import workers


def federation(clients: int = 13, features: int = 8) -> Federation:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(3, 30, (clients,), generator=generator).tolist()
    xs = [torch.randn(n, features, generator=generator) for n in sizes]
    ys = [torch.randint(0, 3, (n,), generator=generator) for n in sizes]
    return Federation.from_arrays(xs, ys, model=coterie.models.softmax(intercept=True, classes=3))


@pytest.mark.parametrize("name", ["fedavg", "ditto", "pfedme", "ifca"])
@pytest.mark.usefixtures("two_threads")
def test_workers_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"clusters": 2} if name == "ifca" else {}
    algorithm = make(name, batch=5, participation=0.7, **settings)
    alone = fit(federation(), algorithm, 4, evaluate_every=2)
    monkeypatch.setattr(shard, "WORKERS_ELEMENTS", 1)
    side_by_side = fit(federation(), algorithm, 4, evaluate_every=2)
    assert side_by_side.fed.runtime.workers == 2
    assert alone.fed.runtime.workers == 1
    torch.testing.assert_close(side_by_side.personal, alone.personal, rtol=1e-6, atol=1e-7)
    again = fit(federation(), algorithm, 4, evaluate_every=2)
    assert side_by_side.state.equal(again.state)
    assert torch.equal(side_by_side.personal, again.personal)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_more_stacks_than_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = make("ditto", batch=5)
    alone = fit(federation(), algorithm, 3, evaluate_every=0)
    monkeypatch.setattr(shard, "WORKERS_ELEMENTS", 1)
    monkeypatch.setattr(shard, "CACHED_ELEMENTS", 1)
    side_by_side = fit(federation(), algorithm, 3, evaluate_every=0)
    assert side_by_side.fed.runtime.stack_size(5) == 1
    torch.testing.assert_close(side_by_side.personal, alone.personal, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_a_worker_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "WORKERS_ELEMENTS", 1)
    fed = federation().fresh()
    fed.runtime.threads(5)
    with pytest.raises(CoterieError, match="kept nothing"):
        fed.map(make("ditto", batch=5).train, x=fed.initial_model())


def test_small_work_and_full_batches_have_no_workers() -> None:
    fed = federation()
    assert fed.runtime.threads(5) == 1
    assert fed.runtime.workers == 1
    fed.runtime.threads(0)
    assert fed.runtime.workers == 1


@pytest.mark.usefixtures("two_threads")
def test_a_worker_is_alone_in_its_operations() -> None:
    workers.cache_clear()
    pool = workers(2)
    torch.set_num_threads(2)
    for _ in range(4):  # torch gives a thread its number of threads at its first operation
        assert pool.submit(torch.get_num_threads).result() == 1
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_makes_workers_of_its_own() -> None:
    workers(2)
    child = os.fork()
    if child == 0:
        os._exit(workers.cache_info().currsize)
    assert os.waitpid(child, 0)[1] == 0

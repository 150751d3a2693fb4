"""Stacks computed side by side give what stacks computed one after the other give.

The bits are the same where the ends of vectors fall on the same places of the processor's registers.
"""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

import coterie
from coterie import Federation, fit
from coterie._core import threads as threads
from coterie._core.errors import CoterieError
from coterie._core.threads import helped, shared_out, side_by_side, workers
from coterie.algorithms import make
from coterie.algorithms.cobo import PRINTED
from coterie.engine import local_runtime
from coterie.theory.deviance_search import lowest

LONG = 60.0  # seconds for another thread to come, however busy the machine is


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
    monkeypatch.setattr(local_runtime, "WORKERS_ELEMENTS", 1)
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
    monkeypatch.setattr(local_runtime, "WORKERS_ELEMENTS", 1)
    monkeypatch.setattr(local_runtime, "CACHED_ELEMENTS", 1)
    side_by_side = fit(federation(), algorithm, 3, evaluate_every=0)
    assert side_by_side.fed.runtime.stack_size(5) == 1
    torch.testing.assert_close(side_by_side.personal, alone.personal, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_a_worker_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_runtime, "WORKERS_ELEMENTS", 1)
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
    side_by_side(str, [1, 2])
    child = os.fork()
    if child == 0:
        os._exit(workers.cache_info().currsize + (side_by_side(str, [1, 2]) != ["1", "2"]))
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("two_threads")
def test_helpers_are_alone_in_their_operations_and_answer_in_order() -> None:
    together = threading.Barrier(3)  # nobody waits for a helper that has not begun

    def look(work: int) -> tuple[int, int]:
        together.wait()
        return work, torch.get_num_threads()

    assert side_by_side(look, [1, 2, 3]) == [(1, 2), (2, 1), (3, 1)]
    assert torch.get_num_threads() == 2


def test_what_a_helper_raises_is_raised_and_the_helper_goes_on() -> None:
    for _ in range(2):
        for fails in range(3):
            with pytest.raises(ZeroDivisionError):
                side_by_side(lambda work, fails=fails: 1 // (work - fails), [0, 1, 2])
    assert side_by_side(abs, [-1, -2, -3]) == [1, 2, 3]


def test_a_helper_may_need_helpers() -> None:
    assert side_by_side(lambda work: side_by_side(abs, [work, work - 1]), [-1, -2]) == [[1, 2], [2, 3]]


def test_helpers_end_with_the_thread_they_help() -> None:
    before = threading.active_count()
    owner = threading.Thread(target=side_by_side, args=(abs, [1, 2, 3]))
    owner.start()
    owner.join()
    ends = time.monotonic() + LONG
    while threading.active_count() > before and time.monotonic() < ends:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_work_is_shared_out_where_it_is_enough_and_there_are_hands() -> None:
    enough = threads.SHARED_PRODUCTS
    whole, halves = [slice(0, 5)], [slice(0, 2), slice(2, 5)]
    assert shared_out(lambda part: part, 5, enough) == whole
    with helped(2):
        assert shared_out(lambda part: part, 5, enough) == halves
        assert shared_out(lambda part: part, 5, enough - 1) == whole
        assert shared_out(lambda part: part, 1, enough) == [slice(0, 1)]
        inside = shared_out(lambda part: shared_out(lambda inner: inner, 5, enough), 2, enough)
    assert inside == [whole, whole], "a helper has no helpers"


@pytest.mark.usefixtures("two_threads")
def test_networks_and_mixtures_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(6, 5, generator=generator) for _ in range(9)]
    ys = [torch.randint(0, 3, (6,), generator=generator) for _ in range(9)]
    fed = Federation.from_arrays(xs, ys, model=coterie.models.mlp(hidden=(8,), stacked=True))
    algorithm = make("cobo", lr=0.1, rho=1.0, rate=4.0, gamma=0.01, **PRINTED)
    alone = fit(fed, algorithm, 5)
    monkeypatch.setattr(threads, "SHARED_PRODUCTS", 1)
    shared = fit(fed, algorithm, 5)
    torch.testing.assert_close(shared.personal, alone.personal, rtol=1e-5, atol=1e-6)
    assert shared.fed.ledger.entries == alone.fed.ledger.entries


def test_what_a_helper_has_not_begun_is_computed_by_who_asks() -> None:
    helper, me = threads.Helper(), threading.get_ident()

    def at_once() -> int:
        found, problem = helper.ask(lambda _: threading.get_ident(), None)()
        assert problem is None
        return found

    def once_begun() -> int:
        began = threading.Event()
        answer = helper.ask(lambda _: (threading.get_ident(), began.set())[0], None)
        assert began.wait(LONG)
        return answer()[0]

    other = once_begun()
    assert other != me
    held, end = threading.Event(), threading.Event()
    wait = helper.ask(lambda _: (held.set(), end.wait())[1], None)
    assert held.wait(LONG)
    assert at_once() == at_once() == me, "it has something else to do"
    end.set()
    assert wait() == [True, None]
    assert once_begun() == other
    assert {at_once() for _ in range(2000)} <= {me, other}


def test_a_busy_helper_takes_parts_when_it_is_done() -> None:
    end, taken, enough = threading.Event(), threading.Event(), threads.SHARED_PRODUCTS
    me = threading.get_ident()
    with helped(2):
        early = threads.begun(end.wait)
        assert threads.spare_hands() == 1

        def part(k: slice) -> int:
            if k.start == 0:
                end.set()
                assert taken.wait(LONG)
            if threading.get_ident() != me:
                taken.set()
            return threading.get_ident()

        who = shared_out(part, 8, enough)
        assert early() and threads.spare_hands() == 2
    assert len(who) == 4 and who[0] == me and set(who[1:]) != {me}


def test_a_helper_is_woken_elsewhere() -> None:
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one processor, or no way to choose one")
    helper, allowed, began = threads.Helper(), os.sched_getaffinity(0), threading.Event()
    here = next(iter(allowed))
    os.sched_setaffinity(0, {here})
    try:
        answer = helper.ask(lambda _: (os.sched_getaffinity(0), began.set())[0], None)
        assert began.wait(LONG)
        assert answer() == [allowed - {here}, None]
    finally:
        os.sched_setaffinity(0, allowed)


def test_searches_of_scipy_keep_to_one_thread_and_leave_the_rest_alone() -> None:
    blas = threads._scipy_blas()

    def counts() -> list[int]:
        return [library["num_threads"] for library in blas.info()]

    if not counts() or max(counts()) < 2:
        pytest.skip("SciPy's linear algebra has one thread anyway")
    before, torchs, seen = counts(), torch.get_num_threads(), []

    def deviance(x: torch.Tensor) -> torch.Tensor:
        seen.append((counts(), torch.get_num_threads()))
        return ((x - 1) ** 2).sum()

    lowest(deviance, torch.zeros(2, dtype=torch.float64), None, [(-9.0, 9.0)] * 2)
    assert seen and all(inside == ([1] * len(before), torchs) for inside in seen)
    assert counts() == before

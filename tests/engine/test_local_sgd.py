"""Networks trained client by client, side by side, give what steps of the whole stack give."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from coterie import Federation, fit, models
from coterie.algorithms import make
from coterie.models import fast
from coterie.models.base import Model
from coterie.models.fast import parallel_clients
from coterie.models.flat_module import FlatModule
from coterie.models.local_sgd import SgdJob


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients were trained by turns, call by call."""
    seen: list[int] = []

    def counted(job: SgdJob) -> Tensor:
        seen.append(len(job.x))
        return parallel_clients.run(job)

    path = fast.FastPath("parallel-clients", "sgd", parallel_clients.supports, counted)
    monkeypatch.setattr(fast, "enabled", lambda operation: (path,) if operation == "sgd" else ())
    return seen


def federation(model: Model, loop: bool = False) -> Federation:
    draw = torch.Generator().manual_seed(0)
    sizes = [3, 9, 5, 12, 4]
    xs = [torch.randn(n, 6, 6, generator=draw, dtype=torch.float64) for n in sizes]
    ys = [torch.randint(0, 3, (n,), generator=draw) for n in sizes]
    return Federation.from_arrays(xs, ys, model, loop=loop, seed=3)


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
@pytest.mark.parametrize("l2", [0.0, 0.1])
@pytest.mark.usefixtures("two_threads")
def test_by_turns_and_one_by_one(name: str, l2: float, turns: list[int]) -> None:
    model = models.cnn(channels=(2, 3), hidden=4, classes=3, stacked=False, l2=l2)
    method = make(name, batch=4, steps=3, participation=0.8)
    found = fit(federation(model), method, 3, evaluate_every=0)
    assert turns == [4] * 3 * (2 if name == "ditto" else 1)
    expected = fit(federation(model, loop=True), method, 3, evaluate_every=0)
    torch.testing.assert_close(found.personal, expected.personal, rtol=1e-10, atol=1e-12)


def test_the_whole_stack_where_that_is_set_and_all_rows_where_they_are_few(turns: list[int]) -> None:
    stacked = models.cnn(channels=(2,), hidden=4, classes=3, stacked=True)
    fit(federation(stacked), make("fedavg", batch=4), 2, evaluate_every=0)
    fit(federation(models.cnn(channels=(2,), hidden=4, classes=3, stacked=False)), make("fedavg", batch=0), 1)
    assert turns == []


def test_a_module_that_insists_on_its_order_of_memory() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 4, 3))
            self.last = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.body(x.unsqueeze(1)).view(len(x), -1))

    x, flat_module = torch.randn(5, 6, 6), FlatModule(Views())
    w = flat_module.start.float()
    found = [flat_module(w, x) for _ in range(2)]
    expected = flat_module.filled(w)(x)
    assert not flat_module._images, "weights with channels last were tried and are not tried again"
    assert all(torch.equal(one, expected) for one in found)


def test_threads_do_not_meet_in_one_module() -> None:
    """Many threads ask for outputs with parameters of their own at the same time."""
    flat_module = FlatModule(nn.Sequential(*(nn.Linear(40, 40) for _ in range(6))))
    x = torch.randn(64, 40)
    stack = torch.randn(60, flat_module.d, generator=torch.Generator().manual_seed(0))
    expected = [flat_module(w, x) for w in stack]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda w: flat_module(w, x), stack))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)

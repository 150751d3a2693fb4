"""Local SGD in C gives what torch gives, up to rounding, for every shape and kind of model, and notices bad numbers."""

from __future__ import annotations

import itertools
import platform
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie import Federation, fit, models
from coterie._core import randomness
from coterie._core.native import dual_sgd as native
from coterie._core.native import library
from coterie.algorithms import make
from coterie.data.rows import Rows
from coterie.models.base import Model
from coterie.models.fast import dual_sgd
from coterie.models.fast.lazy_models import LazyModels
from coterie.models.local_sgd import BatchDraws, SgdJob

SIZES = [3, 33, 1, 16, 7, 20]
MODELS = {
    "softmax": models.softmax(classes=10),
    "many": models.softmax(classes=23, l2=0.2),
    "two": models.softmax(classes=2),
    "logistic": models.logistic(l2=0.1),
    "linear": models.linear(),
    "sum": models.softmax(classes=3, reduction="sum"),
}

pytestmark = pytest.mark.skipif(not native.available, reason="the package was installed without a C compiler")


@pytest.fixture(params=[4] if platform.machine() in ("aarch64", "arm64") else [8, 16])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version for vectors so wide, where this processor has it."""
    assert library is not None
    if not library.coterie_dual_sgd_suits(request.param):
        pytest.skip(f"this processor has no vectors of {request.param} floats")
    monkeypatch.setattr(native, "lanes", request.param)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is worth a thread."""
    monkeypatch.setattr(dual_sgd, "THREAD_PRODUCTS", 1)


def problem(model: Model, columns: int, seed: int = 0) -> tuple[Any, Rows]:
    draw = torch.Generator().manual_seed(seed)
    size = torch.tensor(SIZES)
    x = torch.randn(int(size.sum()), columns, generator=draw)
    classes = model.outputs if model.task == "multiclass" else 2
    y = torch.randint(0, classes, (len(x),), generator=draw)
    rows = Rows(x, y if model.task != "regression" else x[:, 0] + y, size.cumsum(0) - size, size)
    return model.fit_to(rows.x, rows.y), rows


def descents(
    model: Any,
    rows: Rows,
    at: list[int],
    own: bool,
    pull: float,
    batch: int = 9,
    steps: int = 4,
    threads: int = 2,
) -> LazyModels:
    draw = torch.Generator().manual_seed(1)
    who = torch.tensor(at)
    w = torch.randn(len(at) if own else 1, model.d, generator=draw) / 4
    centre = torch.randn(1, model.d, generator=draw)
    drawn = minibatches(model, rows, who, steps, batch)
    anchor = centre.expand(len(at), -1) if pull else None
    return dual_sgd.run(SgdJob(model, rows, who, w.expand(len(at), -1), 0.1, pull, anchor, drawn, threads))


def mean(found: LazyModels, weights: Tensor) -> Tensor:
    return (weights.t() @ found)[0]


def minibatches(model: Any, rows: Rows, who: Tensor, steps: int, batch: int) -> BatchDraws:
    keys, numbers = randomness.key(5, torch.arange(len(who))), range(3, 3 + 2 * steps, 2)

    def draw() -> tuple[Tensor, Tensor, Tensor]:
        steps = randomness.fold(keys.unsqueeze(-1), torch.tensor(numbers))
        drawn, weight = rows.draw(who, steps, batch)
        return drawn, weight * rows.size[who].view(-1, 1, 1) if model.reduction == "sum" else weight, steps

    return BatchDraws(numbers, batch, lambda: keys, draw)


def both(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **options: Any) -> tuple[LazyModels, LazyModels]:
    compiled = descents(*arguments, **options)
    assert isinstance(compiled.descents, dual_sgd.Compiled)
    with monkeypatch.context() as patch:
        patch.setattr(native, "available", False)
        plain = descents(*arguments, **options)
    assert isinstance(plain.descents, dual_sgd.Plain)
    return compiled, plain


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("columns", [16, 31, 65, 130])
@pytest.mark.parametrize(("own", "pull"), [(False, 0.0), (True, 0.0), (False, 0.4), (True, 0.4)])
@pytest.mark.usefixtures("lanes")
def test_torch_gives_the_same(
    name: str, columns: int, own: bool, pull: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = problem(MODELS[name], columns)
    for at in ([0, 1, 2, 3, 4, 5], [5, 1, 1, 0], [2]):
        compiled, plain = both(monkeypatch, model, rows, at, own, pull)
        weights = torch.arange(1.0, len(at) + 1).unsqueeze(-1)
        close(mean(compiled, weights), mean(plain, weights))
        close(compiled.written(), plain.written())
        assert bool(torch.isfinite(compiled.witness()))


@pytest.mark.parametrize("batch", [1, 16, 17, 40])
@pytest.mark.usefixtures("lanes")
def test_batches_of_any_size(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = problem(models.softmax(classes=7), 50)
    close(*(part.written() for part in both(monkeypatch, model, rows, [1, 5, 3], True, 0.3, batch=batch)))


@pytest.mark.usefixtures("lanes")
def test_steps_that_forget_all_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """lr times pull is one: what was left of the start is nothing, and nothing is divided by it."""
    model, rows = problem(models.linear(), 50)
    close(*(part.written() for part in both(monkeypatch, model, rows, [1, 5, 3], True, 10.0)))


@pytest.mark.parametrize("first", ["sum", "mean", "tensor"])
def test_the_bits_do_not_depend_on_what_is_asked_first(first: str) -> None:
    """What was asked the last time is computed at once with what tells whether numbers are finite."""
    model, rows = problem(models.softmax(classes=7), 50)
    even, by_rows = torch.ones(6, 1), torch.tensor(SIZES, dtype=torch.float32).unsqueeze(-1)
    expected = descents(model, rows, list(range(6)), False, 0.0)
    models_ = expected.written()
    means = [mean(descents(model, rows, list(range(6)), False, 0.0), weights) for weights in (even, by_rows)]
    for before, asked in itertools.product((None, even, by_rows), repeat=2):
        dual_sgd.workspace(rows).usual = None
        if before is not None:
            mean(descents(model, rows, list(range(6)), False, 0.0), before)
        found = descents(model, rows, list(range(6)), False, 0.0)
        if first == "sum":
            assert bool(torch.isfinite(found.witness()))
            assert (found._sum is None) == (before is None)
        if first == "mean" and asked is not None:
            mean(found, asked)
        if first != "tensor":
            assert torch.equal(mean(found, even), means[0]) and torch.equal(mean(found, by_rows), means[1])
        assert torch.equal(found.written(), models_)
        close(mean(found, even), means[0])


def test_models_that_are_looked_at_are_not_taken_for_a_mean() -> None:
    model, rows = problem(models.softmax(classes=7), 50)
    mean(descents(model, rows, [0, 1], False, 0.0), torch.ones(2, 1))
    assert dual_sgd.workspace(rows).usual == "even"
    found = descents(model, rows, [0, 1], False, 0.0)
    found.witness()
    assert len(found.written()) == 2 and dual_sgd.workspace(rows).usual == "written"


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["x", "w", "centre", "y"])
@pytest.mark.usefixtures("lanes")
def test_bad_numbers_are_noticed(bad: float, where: str, steps: int) -> None:
    model, rows = problem(models.linear() if where == "y" else models.softmax(classes=7), 49)
    k = len(SIZES)
    w, centre = torch.zeros(k, model.d), torch.zeros(k, model.d)
    drawn = minibatches(model, rows, torch.arange(k), steps, 40)
    {"x": rows.x[40], "w": w[1], "centre": centre[1], "y": rows.y}[where][-1] = bad
    found = dual_sgd.run(SgdJob(model, rows, None, w, 0.1, 0.5, centre, drawn))
    assert isinstance(found.descents, dual_sgd.Compiled) and not bool(torch.isfinite(found.witness()))


def test_steps_are_taken_once() -> None:
    """What is asked for later follows from the shares of rows that were found first."""
    model, rows = problem(models.softmax(classes=7), 49)
    found, expected = (descents(model, rows, [4, 1], True, 0.4) for _ in range(2))
    assert bool(torch.isfinite(found.witness())) and isinstance(found.descents, dual_sgd.Compiled)
    found.descents.keys.zero_()
    assert torch.equal(found.written(), expected.written())


@pytest.mark.parametrize("wrong", ["label", "client", "start", "size"])
@pytest.mark.usefixtures("lanes")
def test_what_is_out_of_range_is_refused(wrong: str) -> None:
    model, rows = problem(models.softmax(classes=7), 50)
    who = torch.tensor([1, 5])
    drawn = minibatches(model, rows, who, 4, 9)
    if wrong == "label":
        rows.y[drawn.drawn()[0][1, 2, 3]] = 7
    elif wrong == "client":
        who[1] = 6
    else:
        {"start": rows.start, "size": rows.size}[wrong][5] += 1
    with pytest.raises(IndexError, match="out of range"):
        dual_sgd.run(SgdJob(model, rows, who, torch.zeros(2, model.d), 0.1, 0.0, None, drawn)).witness()


def test_other_numbers_are_left_to_torch() -> None:
    model, rows = problem(models.softmax(classes=7), 50)
    table = torch.zeros(2, 7, 50)
    assert dual_sgd.compiles(model, rows, table, None)
    assert not dual_sgd.compiles(model, rows, table.double(), None)
    assert not dual_sgd.compiles(*problem(models.softmax(classes=7), 15), table[..., :15])
    assert not dual_sgd.compiles(model, Rows(rows.x.double(), rows.y, rows.start, rows.size), table)
    assert not dual_sgd.compiles(model, Rows(rows.x, rows.y.int(), rows.start, rows.size), table)
    floats = Rows(rows.x, rows.y.float(), rows.start, rows.size)
    assert not dual_sgd.compiles(model, floats, table)
    assert dual_sgd.compiles(models.linear().fit_to(rows.x, floats.y), floats, table)


@pytest.mark.usefixtures("lanes")
def test_inner_products_are_those_of_torch() -> None:
    (model, rows), (_, again) = problem(models.linear(), 45), problem(models.linear(), 45)
    descents(model, rows, [5, 1, 1, 2], False, 0.0).witness()
    found, made = dual_sgd.workspace(rows).gram()
    assert made.nonzero().flatten().tolist() == [1, 2, 5]
    torch.testing.assert_close(
        found, dual_sgd.workspace(again).gram_of(again, torch.tensor([1, 2, 5])), rtol=1e-5, atol=1e-5
    )
    descents(model, rows, [0, 1, 2, 3, 4, 5], False, 0.0).witness()
    torch.testing.assert_close(
        found, dual_sgd.workspace(again).gram_of(again, torch.arange(6)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 50])
def test_any_number_of_threads(threads: int) -> None:
    model, rows = problem(models.softmax(classes=7), 50)
    everybody, weights = list(range(6)), torch.ones(6, 1)
    alone = descents(model, rows, everybody, True, 0.3, threads=1)
    found = descents(model, rows, everybody, True, 0.3, threads=threads)
    close(mean(found, weights), mean(alone, weights))
    assert torch.equal(found.written(), alone.written()), "a model is computed by one thread"


def trained(name: str, **options: Any) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 700, generator=draw) for n in (40, 20, 50, 60)]
    ys = [torch.randint(0, 10, (len(x),), generator=draw) for x in xs]
    fed = Federation.from_arrays(xs, ys, models.softmax(classes=10), seed=3)
    return fit(fed, make(name, batch=10, steps=6, **options), 6, evaluate_every=0).personal


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_training_is_the_same_without_c(
    name: str, participation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trained(name, participation=participation)
    assert torch.equal(found, trained(name, participation=participation)), "the same bits again"
    monkeypatch.setattr(native, "available", False)
    close(found, trained(name, participation=participation))

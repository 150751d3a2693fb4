"""Local SGD in C gives what torch gives, up to rounding, for every shape and kind of model, and notices bad numbers."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie import Federation, fit, models
from coterie.algorithms import make
from coterie.data.rows import Rows
from coterie.federation import randomness
from coterie.models import span
from coterie.models.base import Model
from coterie.models.unwritten import Unwritten
from coterie.native import PLAIN, library
from coterie.native import span as native

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
    if not library.coterie_span_suits(request.param):
        pytest.skip(f"this processor has no vectors of {request.param} floats")
    monkeypatch.setattr(native, "lanes", request.param)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is worth a thread."""
    monkeypatch.setattr(span, "THREAD_PRODUCTS", 1)


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
) -> Unwritten:
    draw = torch.Generator().manual_seed(1)
    who = torch.tensor(at)
    w = torch.randn(len(at) if own else 1, model.d, generator=draw) / 4
    centre = torch.randn(1, model.d, generator=draw)
    drawn = minibatches(model, rows, who, steps, batch)
    towards = centre.expand(len(at), -1) if pull else None
    return span.descend(model, rows, who, w.expand(len(at), -1), drawn, 0.1, pull, towards, threads)


def minibatches(model: Any, rows: Rows, who: Tensor, steps: int, batch: int) -> span.Minibatches:
    keys, numbers = randomness.key(5, torch.arange(len(who))), range(3, 3 + 2 * steps, 2)

    def draw() -> tuple[Tensor, Tensor]:
        drawn, weight = rows.draw(who, randomness.fold(keys.unsqueeze(-1), torch.tensor(numbers)), batch)
        return drawn, weight * rows.size[who].view(-1, 1, 1) if model.reduction == "sum" else weight

    return span.Minibatches(numbers, batch, lambda: keys, draw)


def both(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **options: Any) -> tuple[Unwritten, Unwritten]:
    compiled = descents(*arguments, **options)
    assert isinstance(compiled.descents, span.Compiled)
    with monkeypatch.context() as patch:
        patch.setattr(native, "available", False)
        plain = descents(*arguments, **options)
    assert isinstance(plain.descents, span.Plain)
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
        close(compiled.mean(weights), plain.mean(weights))
        close(compiled.tensor, plain.tensor)
        assert bool(torch.isfinite(compiled.sum()))


@pytest.mark.parametrize("batch", [1, 16, 17, 40])
@pytest.mark.usefixtures("lanes")
def test_batches_of_any_size(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = problem(models.softmax(classes=7), 50)
    close(*(part.tensor for part in both(monkeypatch, model, rows, [1, 5, 3], True, 0.3, batch=batch)))


@pytest.mark.usefixtures("lanes")
def test_steps_that_forget_all_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """lr times pull is one: what was left of the start is nothing, and nothing is divided by it."""
    model, rows = problem(models.linear(), 50)
    close(*(part.tensor for part in both(monkeypatch, model, rows, [1, 5, 3], True, 10.0)))


@pytest.mark.parametrize("first", ["sum", "mean", "tensor"])
def test_the_bits_do_not_depend_on_what_is_asked_first(first: str) -> None:
    """What was asked the last time is computed at once with what tells whether numbers are finite."""
    model, rows = problem(models.softmax(classes=7), 50)
    even, by_rows = torch.ones(6, 1), torch.tensor(SIZES, dtype=torch.float32).unsqueeze(-1)
    expected = descents(model, rows, list(range(6)), False, 0.0)
    models_, means = expected.tensor, [expected.mean(weights) for weights in (even, by_rows)]
    for before, asked in itertools.product((None, even, by_rows), repeat=2):
        rows.notes.pop("mean", None)
        if before is not None:
            descents(model, rows, list(range(6)), False, 0.0).mean(before)
        found = descents(model, rows, list(range(6)), False, 0.0)
        if first == "sum":
            assert bool(torch.isfinite(found.sum()))
            assert (found._sum is None) == (before is None)
        if first == "mean" and asked is not None:
            found.mean(asked)
        assert torch.equal(found.tensor, models_)
        assert torch.equal(found.mean(even), means[0]) and torch.equal(found.mean(by_rows), means[1])


def test_models_that_are_looked_at_are_not_taken_for_a_mean() -> None:
    model, rows = problem(models.softmax(classes=7), 50)
    descents(model, rows, [0, 1], False, 0.0).mean(torch.ones(2, 1))
    assert "mean" in rows.notes
    found = descents(model, rows, [0, 1], False, 0.0)
    found.sum()
    assert len(found.tensor) == 2 and "mean" not in rows.notes


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
    found = span.descend(model, rows, None, w, drawn, 0.1, 0.5, centre)
    assert isinstance(found.descents, span.Compiled) and not bool(torch.isfinite(found.sum()))


def test_steps_are_taken_once() -> None:
    """What is asked for later follows from the shares of rows that were found first."""
    model, rows = problem(models.softmax(classes=7), 49)
    found, expected = (descents(model, rows, [4, 1], True, 0.4) for _ in range(2))
    assert bool(torch.isfinite(found.sum())) and isinstance(found.descents, span.Compiled)
    found.descents.keys.zero_()
    assert torch.equal(found.tensor, expected.tensor)


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
        span.descend(model, rows, who, torch.zeros(2, model.d), drawn, 0.1).sum()


def test_other_numbers_are_left_to_torch() -> None:
    model, rows = problem(models.softmax(classes=7), 50)
    table = torch.zeros(2, 7, 50)
    assert span.compiles(model, rows, table, None)
    assert not span.compiles(model, rows, table.double(), None)
    assert not span.compiles(*problem(models.softmax(classes=7), 15), table[..., :15])
    assert not span.compiles(model, Rows(rows.x.double(), rows.y, rows.start, rows.size), table)
    assert not span.compiles(model, Rows(rows.x, rows.y.int(), rows.start, rows.size), table)
    floats = Rows(rows.x, rows.y.float(), rows.start, rows.size)
    assert not span.compiles(model, floats, table)
    assert span.compiles(models.linear().fit_to(rows.x, floats.y), floats, table)


@pytest.mark.usefixtures("lanes")
def test_inner_products_are_those_of_torch() -> None:
    (model, rows), (_, again) = problem(models.linear(), 45), problem(models.linear(), 45)
    descents(model, rows, [5, 1, 1, 2], False, 0.0).sum()
    found, made = rows.inner_products()
    assert made.nonzero().flatten().tolist() == [1, 2, 5]
    torch.testing.assert_close(found, again.kernels(torch.tensor([1, 2, 5])), rtol=1e-5, atol=1e-5)
    descents(model, rows, [0, 1, 2, 3, 4, 5], False, 0.0).sum()
    torch.testing.assert_close(found, again.kernels(None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 50])
def test_any_number_of_threads(threads: int) -> None:
    model, rows = problem(models.softmax(classes=7), 50)
    everybody, weights = list(range(6)), torch.ones(6, 1)
    alone = descents(model, rows, everybody, True, 0.3, threads=1)
    found = descents(model, rows, everybody, True, 0.3, threads=threads)
    close(found.mean(weights), alone.mean(weights))
    assert torch.equal(found.tensor, alone.tensor), "a model is computed by one thread"


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


def test_an_environment_variable_turns_it_off() -> None:
    program = "from coterie.native import library; from coterie.native.span import available; print(library, available)"
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {PLAIN: "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.split() == ["None", "False"]

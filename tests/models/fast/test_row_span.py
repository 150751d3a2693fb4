"""Sums of models and gradients in the span of rows are those of tensors, and so are noise and losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coterie import Federation, fit, models
from coterie._core import randomness
from coterie._core.native import dual_sgd as native
from coterie.algorithms import make
from coterie.data.rows import Rows
from coterie.models import blocks, dot
from coterie.models.fast import dual_sgd, row_span
from coterie.models.fast.span_models import RowSpan, SpanModels
from coterie.models.glm import Glm
from coterie.models.local_sgd import BatchDraws

SIZES = [22, 9, 25, 32, 17]
BATCH = 10  # one client has fewer rows
KINDS = {
    "softmax": lambda **more: models.softmax(classes=7, **more),
    "logistic": lambda **more: models.logistic(**more),
    "linear": lambda **more: models.linear(**more),
}
COMPILED = pytest.param(
    torch.float32,
    marks=pytest.mark.skipif(not native.available, reason="there is no C library for this processor"),
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dual_sgd, "FEWEST_PRODUCTS", 1)


def problem(kind: str, dtype: torch.dtype, **more: Any) -> tuple[Glm, Rows]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(sum(SIZES), 83, generator=draw, dtype=dtype)
    y = torch.randint(0, 7 if kind == "softmax" else 2, (len(x),), generator=draw)
    y = y.to(dtype) if kind == "linear" else y
    model = KINDS[kind](**more).fit_to(x, y)
    size = torch.tensor(SIZES)
    return model, Rows(model.prepare(x), y, size.cumsum(0) - size, size)


def minibatch(rows: Rows, at: Tensor | None, number: int = 3) -> BatchDraws:
    keys = torch.arange(5, 5 + (len(rows) if at is None else len(at)))
    numbers = range(number, number + 1)

    def drawn() -> tuple[Tensor, Tensor, Tensor]:
        folded = randomness.fold(keys.unsqueeze(-1), torch.as_tensor(numbers))
        return (*rows.draw(at, folded, BATCH), folded)

    return BatchDraws(numbers, BATCH, lambda: keys, drawn)


def plain_gradient(model: Glm, rows: Rows, w: Tensor, draws: BatchDraws) -> Tensor:
    drawn, weight = (part[:, 0] for part in draws.drawn()[:2])
    return model.grad(w.double(), rows.x[drawn].double(), rows.y[drawn], weight.double()).to(w.dtype)


def close(found: Tensor, expected: Tensor) -> None:
    rounding = 1e-13 if found.dtype == torch.float64 else 2e-6
    assert (found + 0 - expected).abs().max() <= rounding * expected.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, COMPILED])
@pytest.mark.parametrize("at", [None, torch.tensor([3, 0, 4])])
@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_sums_and_gradients_are_those_of_tensors(kind, dtype, at, l2) -> None:
    model, rows = problem(kind, dtype, l2=l2)
    count = len(rows) if at is None else len(at)
    x, v = torch.randn(model.d, dtype=dtype).expand(count, -1), torch.randn(count, model.d, dtype=dtype)
    alpha, first, second = torch.rand(count, 1, dtype=dtype), minibatch(rows, at), minibatch(rows, at, 8)
    assert row_span.supports(model, rows, [x, v], 10 * BATCH)

    def walk(w: Tensor, v: Tensor, grad: Any) -> list[Tensor]:
        u = torch.lerp(w, v, alpha)
        g, h = grad(w, first), grad(u, second)
        ends = [
            w.sub(g, alpha=0.1),
            torch.addcmul(v, alpha, h, value=-0.2),
            -(g - h) / 2,
            (w + 0.5 * u - v) * alpha,
        ]
        ends += [grad(ends[0] - 0.3 * h, second), torch.lerp(ends[0], x, 0.25)]
        return [*ends, dot(h, v - w)]

    found = walk(*row_span.run(model, rows, at, [x, v], 1), lambda w, draws: w.gradient(draws))
    expected = walk(x, v, lambda w, draws: plain_gradient(model, rows, w, draws))
    assert all(isinstance(one, SpanModels) for one in found[:-1])
    assert isinstance(found[-1], SpanModels) is False
    weights = torch.rand(1, count, dtype=dtype)
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        close(weights @ one, weights @ other)  # without writing the models
        close(one.written(), other)
        close(weights @ one, weights @ other)
        assert one.witness().isfinite()
    close(found[-1], expected[-1])


def test_an_operation_in_place_changes_the_model_and_what_is_made_of_it_later() -> None:
    model, rows = problem("softmax", torch.float64)
    x = torch.randn(len(rows), model.d, dtype=torch.float64)
    (w,) = row_span.run(model, rows, None, [x], 1)
    w = w - 0.1 * w.gradient(minibatch(rows, None))
    expected, before = w.written() * 2, x.clone()
    w.mul_(2.0)
    close(w - torch.zeros_like(x), expected)
    close(w.gradient(minibatch(rows, None)), plain_gradient(model, rows, expected, minibatch(rows, None)))
    assert torch.equal(x, before)


def test_not_finite_numbers_are_seen_before_models_are_written() -> None:
    model, rows = problem("softmax", torch.float64)
    x = torch.zeros(len(rows), model.d, dtype=torch.float64)
    x[2, 5] = torch.nan
    (w,) = row_span.run(model, rows, None, [x], 1)
    assert not w.witness().isfinite()
    assert not w.gradient(minibatch(rows, None)).witness().isfinite()


def test_models_of_two_spans_become_tensors() -> None:
    model, rows = problem("softmax", torch.float64)
    x = torch.randn(len(rows), model.d, dtype=torch.float64)
    ((one,), (other,)) = (row_span.run(model, rows, None, [x], 1) for _ in range(2))
    assert not isinstance(one + other, SpanModels)
    close(one + other, 2 * x)
    close(one * other, x * x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, COMPILED])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("at", [None, torch.tensor([3, 0])])
def test_noise_is_that_of_gradients_of_blocks(kind, dtype, reduction, at) -> None:
    model, rows = problem(kind, dtype, l2=0.2, reduction=reduction)
    x = 0.1 * torch.randn(len(rows) if at is None else len(at), model.d, dtype=dtype)
    assert row_span.supports_noise(model, rows, x, most=512)
    assert not row_span.supports_noise(model, rows, x, most=30)
    found = row_span.noise(model, rows, at, x, 1)
    for k, client in enumerate(range(len(rows)) if at is None else at.tolist()):
        inputs, targets = (part.unsqueeze(0) for part in rows.of(client))
        weight = torch.full(
            targets.shape, 1.0 if reduction == "sum" else 1 / targets.numel(), dtype=torch.float64
        )
        few = blocks.drawn_rows(inputs.double(), targets, weight, 512)
        expected = torch.cat(blocks.mean_and_noise(model.grad, x[k : k + 1].double(), *few), -1)
        rounding = 1e-11 if dtype == torch.float64 else 1e-3
        torch.testing.assert_close(found[k].double(), expected[0], rtol=rounding, atol=1e-5)


def test_blocks_that_agree_are_left_to_their_gradients() -> None:
    model, rows = problem("softmax", torch.float64)
    same = Rows(
        rows.x[:1].expand(len(rows.x), -1).contiguous(), torch.zeros_like(rows.y), rows.start, rows.size
    )
    assert row_span.noise(model, same, None, torch.zeros(len(rows), model.d, dtype=torch.float64), 1) is None


@pytest.mark.skipif(not native.available, reason="there is no C library for this processor")
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_mean_losses(kind) -> None:
    model, rows = problem(kind, torch.float32)
    at, many = torch.tensor([4, 1, 2]), torch.randn(3, 6, model.d)
    assert row_span.supports_errors(model, rows, many)
    found = row_span.errors(model, rows, at, many, 1)
    for k, client in enumerate(at.tolist()):
        x, y = rows.of(client)
        weight = torch.full((1, len(y)), 1 / len(y), dtype=torch.float64)
        for j in range(6):
            expected = model.loss(
                many[k : k + 1, j].double(), x.double().unsqueeze(0), y.unsqueeze(0), weight
            )
            torch.testing.assert_close(found[k, j].double(), expected.squeeze(), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not native.available, reason="there is no C library for this processor")
def test_a_label_that_is_no_class_is_an_error() -> None:
    model, rows = problem("softmax", torch.float32)
    rows.y[3] = 9
    (w,) = row_span.run(model, rows, None, [torch.zeros(len(rows), model.d)], 1)
    with pytest.raises(IndexError, match="out of range"):
        for number in range(20):
            w.gradient(minibatch(rows, None, number))


@pytest.mark.skipif(not native.available, reason="there is no C library for this processor")
@pytest.mark.parametrize("lanes", [8, 16])
def test_every_width_of_vectors_gives_the_same(lanes, monkeypatch) -> None:
    if not native.library.coterie_dual_sgd_suits(lanes):
        pytest.skip("this processor has no such vectors")
    model, rows = problem("softmax", torch.float32)
    x = 0.1 * torch.randn(len(rows), model.d)
    monkeypatch.setattr(native, "lanes", lanes)
    span = RowSpan(model, rows, None, 1)
    (w,) = row_span.run(model, rows, None, [x], 1)
    close(w.gradient(minibatch(rows, None)), plain_gradient(model, rows, x, minibatch(rows, None)))
    close(span.scores(x), torch.cat([x[k].view(7, -1) @ rows.of(k)[0].t() for k in range(len(rows))], 1))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("apfl", {}),
        ("cobo", {}),
        ("fedrod", {}),
        ("fomaml", {"steps": 5}),
        ("hierarchical", {"solver": "gradient"}),
        ("maml-fl", {"steps": 5}),
        ("pfedme", {"steps": 5, "participation": 0.6}),
    ],
)
def test_methods_find_the_same_models_in_the_span(name, settings, monkeypatch) -> None:
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 80, generator=draw, dtype=torch.float64) for n in SIZES]
    ys = [torch.randint(0, 3, (n,), generator=draw) for n in SIZES]

    def trained() -> tuple[Any, Tensor]:
        model = models.softmax(classes=3, intercept=True)
        fed = Federation.from_arrays(xs, ys, model, clusters=[0, 1, 0, 1, 0], seed=3)
        run = fit(fed, make(name, batch=8, **settings), 3, evaluate_every=0)
        return run.fed.runtime.paths_used(), run.personal

    used, found = trained()
    assert used["row-span"]
    monkeypatch.setenv("COTERIE_FAST", "none")
    none, expected = trained()
    assert not none["row-span"]
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)

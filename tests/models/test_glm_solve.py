"""Minimisers against scikit-learn, numpy and the optimality condition; problems that have none."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from coterie import models
from coterie._core.errors import CoterieError
from coterie.models import solve
from coterie.models.base import norm
from coterie.models.solve import _solve_positive, largest_curvature, lbfgs, newton


def clouds(clients: int, rows: int, features: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Overlapping classes [k, B, p], [k, B], with every class at every client."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(rows).remainder(classes).repeat(clients, 1)
    shift = torch.randn(clients, classes, features, generator=draw, dtype=torch.float64)
    noise = torch.randn(clients, rows, features, generator=draw, dtype=torch.float64)
    return noise + 0.5 * shift.gather(1, y.unsqueeze(-1).expand(noise.shape)), y


def even(y: Tensor) -> Tensor:
    return torch.full(y.shape, 1.0 / y.shape[-1], dtype=torch.float64)


@pytest.mark.parametrize("intercept", (False, True))
@pytest.mark.parametrize("classes", (2, 3))
def test_solution_is_that_of_scikit_learn(classes: int, intercept: bool) -> None:
    l2, (x, y) = 0.05, clouds(2, 40, 3, classes)
    make = models.logistic if classes == 2 else models.softmax
    model = make(l2=l2, intercept=intercept).fit_to(x.flatten(0, 1), y.flatten())
    prepared = model.prepare(x.flatten(0, 1)).view(2, 40, -1)
    found = model.solve(torch.zeros(2, model.d, dtype=torch.float64), prepared, y, even(y), tol=1e-11)
    for i in range(2):
        # scikit-learn minimises C * sum of losses + |w|^2 / 2
        other = LogisticRegression(
            C=1 / (l2 * 40), fit_intercept=intercept, solver="lbfgs", tol=1e-12, max_iter=10000
        )
        other.fit(x[i].numpy(), y[i].numpy())
        table = found[i].view(model.outputs, -1)
        ours = table[:, 3] if intercept else torch.zeros(model.outputs)
        free = other.intercept_ - other.intercept_.mean() if classes > 2 else other.intercept_
        np.testing.assert_allclose(table[:, :3].numpy(), other.coef_, atol=2e-7)
        np.testing.assert_allclose((ours - ours.mean() if classes > 2 else ours).numpy(), free, atol=2e-7)


def test_linear_solution_is_least_squares_and_from_zero_the_shortest() -> None:
    draw = torch.Generator().manual_seed(0)
    for rows, features in ((30, 6), (4, 6)):
        x = torch.randn(5, rows, features, generator=draw, dtype=torch.float64)
        y = torch.randn(5, rows, generator=draw, dtype=torch.float64)
        model = models.linear().fit_to(x.flatten(0, 1), y.flatten())
        zero = torch.zeros(5, features, dtype=torch.float64)
        found = model.solve(zero, x, y, even(y), tol=1e-10)
        for i in range(5):
            best = np.linalg.lstsq(x[i].numpy(), y[i].numpy(), rcond=None)[0]
            np.testing.assert_allclose(found[i].numpy(), best, rtol=1e-9, atol=1e-10)


def test_linear_solution_nearest_to_the_start() -> None:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(3, 6, generator=draw).double(), torch.randn(3, generator=draw).double()
    w = torch.randn(6, generator=draw).double()
    model = models.linear().fit_to(x, y)
    expected = w.numpy() + np.linalg.pinv(x.numpy()) @ (y - x @ w).numpy()
    np.testing.assert_allclose(model.solve(w, x, y, even(y), tol=1e-10).numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("kind", ("linear", "logistic", "softmax"))
@pytest.mark.parametrize("intercept", (False, True))
@pytest.mark.parametrize("prox", (0.0, 0.3))
def test_gradient_at_the_solution_is_below_tol(kind: str, intercept: bool, prox: float) -> None:
    x, y = clouds(3, 30, 4, 3 if kind == "softmax" else 2)
    model = getattr(models, kind)(l2=0.01, intercept=intercept, reduction="sum").fit_to(
        x.flatten(0, 1), y.flatten()
    )
    prepared = model.prepare(x.flatten(0, 1)).view(3, 30, -1)
    weight = torch.ones_like(even(y))
    weight[:, 25:] = 0
    start = torch.randn(3, model.d, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = model.solve(start, prepared, y, weight, tol=1e-9, prox=prox)
    left = model.grad(found, prepared, y, weight) + prox * (found - start)
    assert float(norm(left).max()) <= 1e-9
    alone = model.solve(start[1], prepared[1], y[1], weight[1], tol=1e-9, prox=prox)
    torch.testing.assert_close(alone, found[1], rtol=0, atol=1e-6)


def test_more_than_512_parameters_go_through_lbfgs() -> None:
    x, y = clouds(2, 20, 600, 2)
    model = models.logistic(l2=0.1).fit_to(x.flatten(0, 1), y.flatten())
    found = model.solve(torch.zeros(2, 600, dtype=torch.float64), x, y, even(y), tol=1e-9)
    assert float(norm(model.grad(found, x, y, even(y))).max()) <= 1e-9
    # the minimiser lies in the span of the rows: solve the 20-dimensional problem by Newton
    for i in range(2):
        u, s, v = torch.linalg.svd(x[i], full_matrices=False)
        small = models.logistic(l2=0.1).fit_to(u * s, y[i])
        inner = small.solve(torch.zeros(20, dtype=torch.float64), u * s, y[i], even(y[i]), tol=1e-12)
        torch.testing.assert_close(found[i], inner @ v, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("scale", "reached"), ((1.0, 1e-14), (1e4, 1e-6)))
def test_unreachable_tolerance_ends_at_rounding(scale: float, reached: float) -> None:
    x, y = clouds(3, 12, 3, 3)
    model = models.softmax(l2=1e-3).fit_to(x.flatten(0, 1), y.flatten())
    start = torch.randn(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    found = model.solve(start, scale * x, y, even(y), tol=0.0, prox=1.0)
    left = model.grad(found, scale * x, y, even(y)) + found - start
    assert float(norm(left).max()) < reached


@pytest.mark.parametrize("features", (2, 600))
def test_separable_classes_without_l2_are_an_error(features: int) -> None:
    x, y = clouds(3, 12, features, 2)
    x[1, :, 0] = torch.where(y[1] == 1, 2.0, -2.0) + 0.1 * x[1, :, 1]
    weight = even(y)
    weight[:, -1] = 0
    model = models.logistic().fit_to(x.flatten(0, 1), y.flatten())
    with pytest.raises(CoterieError, match=r"no minimiser.*l2 > 0") as caught:
        model.solve(torch.zeros(3, features, dtype=torch.float64), x, y, weight, tol=1e-8)
    assert ("client(s) 1 " in str(caught.value)) == (features == 2)
    kept = models.logistic(l2=1e-4).fit_to(x.flatten(0, 1), y.flatten())
    found = kept.solve(torch.zeros(3, features, dtype=torch.float64), x, y, weight, tol=1e-8)
    assert torch.isfinite(found).all()


def test_classes_that_touch_on_the_plane_are_an_error_too() -> None:
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    y = torch.tensor([1, 0, 1, 0])
    model = models.logistic().fit_to(x, y)
    with pytest.raises(CoterieError, match="no minimiser"):
        model.solve(torch.zeros(2, dtype=torch.float64), x, y, even(y), tol=1e-3)


def test_a_start_so_far_out_that_its_gradient_is_zero_proves_nothing() -> None:
    x, y = torch.tensor([[1.0], [-1.0], [0.0]], dtype=torch.float64), torch.tensor([1, 0, 0])
    model = models.logistic().fit_to(x, y)
    with pytest.raises(CoterieError, match="no minimiser"):
        model.solve(torch.tensor([100.0], dtype=torch.float64), x, y, even(y), tol=1e-3)


def test_a_start_far_out_is_no_obstacle() -> None:
    x, y = clouds(3, 8, 3, 2)
    model = models.logistic(l2=1e-5, intercept=True).fit_to(x.flatten(0, 1), y.flatten())
    prepared = model.prepare(25 * x.flatten(0, 1)).view(3, 8, -1)
    far = 100 * torch.randn(3, model.d, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    found = model.solve(far, prepared, y, even(y), tol=1e-10)
    assert float(norm(model.grad(found, prepared, y, even(y))).max()) <= 1e-10


def test_overlapping_classes_without_l2_are_solved() -> None:
    x, y = clouds(4, 60, 3, 3)
    model = models.softmax().fit_to(x.flatten(0, 1), y.flatten())
    found = model.solve(torch.zeros(4, 9, dtype=torch.float64), x, y, even(y), tol=1e-10)
    assert float(norm(model.grad(found, x, y, even(y))).max()) <= 1e-10
    np.testing.assert_allclose(found.view(4, 3, 3).sum(1).numpy(), 0, atol=1e-10)
    exact = model.solve(found, x, y, even(y), tol=0.0)
    torch.testing.assert_close(exact, found, rtol=0, atol=1e-7)


def test_absent_class_with_intercept_is_an_error() -> None:
    x, y = clouds(2, 12, 3, 3)
    y[1][y[1] == 2] = 0
    model = models.softmax(l2=0.1, intercept=True).fit_to(x.flatten(0, 1), y.flatten())
    prepared = model.prepare(x.flatten(0, 1)).view(2, 12, -1)
    start = torch.zeros(2, model.d, dtype=torch.float64)
    with pytest.raises(CoterieError, match="client 1 of the stack has no row of class 2"):
        model.solve(start, prepared, y, even(y), tol=1e-8)
    pulled = model.solve(start, prepared, y, even(y), tol=1e-8, prox=0.1)
    assert float(norm(model.grad(pulled, prepared, y, even(y)) + 0.1 * pulled).max()) <= 1e-8


@settings(max_examples=60, derandomize=True)
@given(st.integers(0, 10**6), st.floats(1e-4, 10.0), st.integers(1, 8), st.sampled_from([0.0, 1e-2, 1.0]))
def test_newton_always_finds_the_regularised_minimiser(seed: int, l2: float, rows: int, prox: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = 5 * torch.randn(2, rows, 3, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 2, (2, rows), generator=draw)
    start = 10 * torch.randn(2, 3, generator=draw, dtype=torch.float64)
    model = models.logistic(l2=l2).fit_to(x.flatten(0, 1), y.flatten())
    found = model.solve(start, x, y, even(y), tol=1e-9, prox=prox)
    assert float(norm(model.grad(found, x, y, even(y)) + prox * (found - start)).max()) <= 1e-9


def test_lbfgs_on_ill_conditioned_bowls_of_different_difficulty() -> None:
    scale = torch.stack([torch.logspace(0, power, 30, dtype=torch.float64) for power in (0, 2, 4)])
    target = torch.ones_like(scale)
    found = lbfgs(
        lambda w, a, b: 0.5 * (a * (w - b) ** 2).sum(-1, keepdim=True),
        lambda w, a, b: a * (w - b),
        torch.zeros_like(scale),
        (scale, target),
        torch.full((3, 1), 1e-9, dtype=torch.float64),
    )
    assert bool(found.converged.all())
    torch.testing.assert_close(found.w, target, rtol=0, atol=1e-8)


def test_lbfgs_ends_at_a_kink_and_says_that_it_did_not_converge() -> None:
    calls = 0

    def slope(w: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.where(w >= 0, 1.0, -1.0).double()

    found = lbfgs(
        lambda w: w.abs().sum(-1, keepdim=True),
        slope,
        torch.tensor([[0.7]], dtype=torch.float64),
        (),
        torch.tensor([[1e-9]], dtype=torch.float64),
    )
    assert not bool(found.converged.any()) and calls < 300
    assert float(found.w.abs().max()) < 1e-8


def test_newton_reports_each_problem() -> None:
    found = newton(
        lambda w: torch.cosh(w).sum(-1, keepdim=True),
        lambda w: torch.sinh(w),
        lambda w: torch.diag_embed(torch.cosh(w)),
        torch.tensor([[0.0, 0.0], [3.0, -8.0]], dtype=torch.float64),
        (),
        torch.tensor([[1e-12], [1e-12]], dtype=torch.float64),
    )
    assert bool(found.converged.all()) and float(found.gradient.max()) <= 1e-12
    torch.testing.assert_close(found.w, torch.zeros(2, 2, dtype=torch.float64), rtol=0, atol=1e-12)


def test_newton_takes_the_step_whose_fall_rounding_hides() -> None:
    found = newton(
        lambda w: 1 + 1e-9 * (w.abs() < 0.999e-5),
        lambda w: 2 * w,
        lambda w: 2 * torch.eye(1, dtype=torch.float64).expand(1, 1, 1),
        torch.tensor([[-1e-5]], dtype=torch.float64),
        (),
        torch.tensor([[1e-12]], dtype=torch.float64),
        steps=3,
    )
    assert bool(found.converged.all())


def test_a_hessian_that_rounding_made_indefinite_still_gives_a_direction() -> None:
    matrix = torch.diag(torch.tensor([1.0, 1.0, -1e-8], dtype=torch.float64)).unsqueeze(0)
    found = _solve_positive(matrix, torch.tensor([[1.0, 2.0, 1.0]], dtype=torch.float64))[0]
    assert abs(float(found[0]) - 1) < 1e-5 and 1e6 < float(found[2]) < 1e9


def test_largest_curvature_of_known_matrices() -> None:
    draw = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(12, 12, generator=draw, dtype=torch.float64)).Q
    values = torch.stack([torch.linspace(1, 5, 12), torch.linspace(-7, 2, 12), torch.zeros(12)]).double()
    matrix = basis @ torch.diag_embed(values) @ basis.T
    start = torch.randn(12, generator=draw, dtype=torch.float64).expand(3, -1)
    found = largest_curvature(lambda v: (matrix @ v.unsqueeze(-1)).squeeze(-1), start, 12)
    torch.testing.assert_close(
        found.squeeze(-1), torch.tensor([5.0, 7.0, 0.0]).double(), rtol=1e-8, atol=1e-12
    )


def test_patience_starts_anew_after_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second step is said to make no progress: the search goes on, since no two in a row do."""
    whole, steps = solve._descend, itertools.count()

    def every_second(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        after, progress = whole(*arguments)
        return after, progress & (next(steps) % 2 == 0)

    monkeypatch.setattr(solve, "_descend", every_second)
    scale = torch.logspace(0, 4, 12, dtype=torch.float64).unsqueeze(0)
    found = solve.lbfgs(
        lambda w, a: 0.5 * (a * w * w).sum(-1, keepdim=True),
        lambda w, a: a * w,
        torch.ones_like(scale),
        (scale,),
        torch.full_like(scale[:, :1], 1e-8),
        patience=2,
    )
    assert bool(found.converged.all()) and next(steps) > 6

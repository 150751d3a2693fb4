"""Stacked runs of FLIX against the algorithm itself, and what DCGD's floor depends on."""

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie import Federation, models
from coterie.algorithms.flix import FLIX
from coterie.experiments.flix_logistic import Curves, Problem, factor
from coterie.experiments.flix_stacked import Lane, Stack
from coterie.select.flix_runs import local_models, states
from coterie.theory import flix_rates, flix_steps

ALPHAS = (0.1, 0.5, 1.0)


def make(l2: float = 0.1, n: int = 5, rows: int = 40, scale: float = 1.0, blank: int = 0) -> Problem:
    """Clients of unequal size whose classes are divided by different planes; `scale` makes sigmoids bend.

    The last `blank` of the 8 columns are zero, so that only l2 curves there.
    """
    draw = torch.Generator().manual_seed(1)
    xs = [scale * torch.randn(rows + k, 8, generator=draw, dtype=torch.float64) for k in range(n)]
    ys = []
    for x in xs:
        x[:, 8 - blank :] = 0
        plane = torch.randn(8, generator=draw, dtype=torch.float64)
        ys.append((x @ plane + 2 * torch.randn(len(x), generator=draw) > 0).double())
    fed = Federation.from_arrays(xs, ys, models.logistic(l2=l2), seed=3)
    own = local_models(fed, FLIX(alpha=0.5, local_tol=1e-12))
    x0 = torch.randn(8, generator=draw, dtype=torch.float64)
    return Problem(fed, own, x0, FLIX(alpha=1.0).mixture(fed))


@pytest.mark.parametrize("solver", ["dcgd", "diana"])
@pytest.mark.parametrize("l2", [0.1, 0.0])
def test_a_stack_takes_the_steps_that_flix_takes(solver, l2):
    problem = make(l2)
    d, lanes = problem.fed.d, [Lane(alpha, k) for alpha in ALPHAS for k in (1, 3, 8)]
    stack = Stack(problem.fed, problem.own, problem.mixture)
    steps = list(stack.run(solver, lanes, problem.x0, 12, every=1))
    for j, lane in enumerate(lanes):
        whole = lane.k == d
        sent = {} if whole else {"solver": solver, "compressor": f"rand-{lane.k}"}
        algorithm = FLIX.from_theory(problem.fed, alpha=lane.alpha, **sent)
        ran = [s for _, s in states(problem.fed, algorithm, 12, problem.own, problem.x0)]
        xs = torch.stack([s.mean if algorithm.average and t else s.x for t, s in enumerate(ran)])
        found = torch.from_numpy(np.stack([step.x[j] for step in steps]))
        torch.testing.assert_close(found, xs, rtol=1e-11, atol=1e-11)
        value = objective(problem, lane.alpha, xs[-1])
        slope = torch.autograd.functional.jacobian(lambda x, a=lane.alpha: objective(problem, a, x), xs[-1])
        assert steps[-1].loss[j] == pytest.approx(float(value), rel=1e-12)
        assert steps[-1].squared_grad[j] == pytest.approx(float(slope @ slope), rel=1e-9)


def objective(problem: Problem, alpha: float, x: Tensor) -> Tensor:
    """f~ written out again."""
    total = torch.zeros((), dtype=torch.float64)
    for k, own in enumerate(problem.own):
        rows, y = problem.fed.runtime.train.of(k)
        w = alpha * x + (1 - alpha) * own
        total = total + torch.nn.functional.binary_cross_entropy_with_logits(rows @ w, y)
        total = total + 0.5 * problem.fed.model.l2 * w @ w
    return total / problem.fed.n


def test_the_derivatives_and_the_minimiser_are_those_of_the_objective():
    problem = make()
    slopes, bends = problem.derivatives(0.5, problem.x0)
    found = torch.autograd.functional.hessian(lambda x: objective(problem, 0.5, x), problem.x0)
    torch.testing.assert_close(bends.mean(0), found, rtol=0, atol=1e-12)
    found = torch.autograd.functional.jacobian(lambda x: objective(problem, 0.5, x), problem.x0)
    torch.testing.assert_close(slopes.mean(0), found, rtol=0, atol=1e-12)
    assert problem.derivatives(0.5, problem.minimiser(0.5))[0].mean(0).norm() < 1e-12


def test_the_rate_of_diana_is_the_same_for_every_alpha():
    """Where only l2 curves it is slowest, as in mushrooms and a6a; elsewhere the curvature at x* has a say."""
    problem = make(n=20, rows=60, blank=2)
    curves = Curves.draw(problem, "diana", [Lane(alpha, 2) for alpha in ALPHAS], 400)
    factors = []
    for j, alpha in enumerate(ALPHAS):
        errors = np.square(curves.x[:, j] - problem.minimiser(alpha).numpy()).sum(-1)
        assert errors[-1] < 1e-12 * errors[0]
        factors.append(factor(curves.rounds, errors / errors[0]))
        assert factors[-1] <= flix_rates.diana_rate(problem.at(alpha), 3.0)
    assert max(factors) / min(factors) <= 1.01


def stationary(problem: Problem, alpha: float, k: int) -> tuple[float, float]:
    """E|x - x*|^2 and E f~ - min f~ of DCGD with Rand-k in the end, from its recursion linearised at x*.

    S = A S A + gamma^2/n^2 sum_i Cov(C v_i), v_i = G_i(x*) + J_i (x - x*), A = I - gamma mean J_i.
    """
    (n, d), best = problem.own.shape, problem.minimiser(alpha)
    slopes, bends = problem.derivatives(alpha, best)
    step = flix_steps.dcgd_step(problem.at(alpha), d / k - 1)
    kept = torch.eye(d, dtype=torch.float64) - step * bends.mean(0)
    diagonal, beside = d / k - 1, d * (k - 1) / (k * (d - 1)) - 1

    def noise(second: Tensor) -> Tensor:
        return beside * second + (diagonal - beside) * torch.diag(second.diagonal())

    spread = torch.zeros(d, d, dtype=torch.float64)
    for _ in range(3000):
        moments = slopes.T @ slopes + (bends @ spread @ bends).sum(0)
        after = kept @ spread @ kept + (step / n) ** 2 * noise(moments)
        if after.trace() - spread.trace() <= 1e-9 * after.trace():
            break
        spread = after
    return float(after.trace()), 0.5 * float((bends.mean(0) @ after).trace())


def floors(problem: Problem, k: int, rounds: int) -> list[tuple[float, float, float, float, float]]:
    """Per alpha: DCGD's squared distance and loss gap over alpha^2 in the end, each also as predicted; the bound."""
    lanes, found = [Lane(alpha, k) for alpha in ALPHAS], []
    curves, late = Curves.draw(problem, "dcgd", lanes, rounds, every=1), slice(rounds // 4, None)
    for j, alpha in enumerate(ALPHAS):
        best = problem.minimiser(alpha)
        least = float(objective(problem, alpha, best))
        distance = float(np.square(curves.x[late, j] - best.numpy()).sum(-1).mean())
        gap = float((curves.loss[late, j] - least).mean())
        predicted = stationary(problem, alpha, k)
        slopes = problem.derivatives(alpha, best)[0]
        bound = flix_rates.dcgd_floor(problem.at(alpha), problem.fed.d / k - 1, slopes)
        found.append((distance, gap / alpha**2, predicted[0], predicted[1] / alpha**2, bound))
    return found


def check_floors(found: list[tuple[float, float, float, float, float]], accuracy: float) -> None:
    """Each floor is the predicted one, to what one run tells, and by the same factor for every alpha (same masks)."""
    for measured, expected in ((0, 2), (1, 3)):
        ratios = [row[measured] / row[expected] for row in found]
        assert all(abs(ratio - 1) <= accuracy for ratio in ratios), ratios
        assert max(ratios) / min(ratios) <= 1.03, ratios
    assert all(row[0] <= row[4] for row in found)


@pytest.mark.slow
def test_the_floor_of_dcgd_is_the_one_of_its_linear_recursion_and_changes_with_alpha_through_the_noise_alone():
    problem = make(n=10, rows=60, scale=3.0)
    found = floors(problem, 3, 3000)
    check_floors(found, 0.1)
    assert max(row[0] for row in found) > 1.1 * min(row[0] for row in found)
    steps = [flix_steps.dcgd_step(problem.at(alpha), 3.0) * problem.at(alpha).mu for alpha in ALPHAS]
    assert max(steps) - min(steps) <= 1e-15


@pytest.mark.slow
@pytest.mark.parametrize("name, change", [("a6a", 1.05), ("mushrooms", 1.9)])
def test_on_real_data_too(name, change):
    from coterie._core.errors import DataError

    try:
        problem = Problem.make(name, 50, 0.1, 0)
    except DataError:
        pytest.skip("needs ../shared/data/libsvm")
    found = floors(problem, 20, 1500)
    check_floors(found, 0.15)
    assert max(row[0] for row in found) <= change * min(row[0] for row in found)

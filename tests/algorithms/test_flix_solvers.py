"""EF21 and Scaffnew on FLIX against their recursions written out, and certificates that no run may violate."""

import math

import pytest
import torch
from torch import Tensor

import coterie
from coterie import Federation, models
from coterie._core.errors import SettingError
from coterie.algorithms.flix import FLIX
from coterie.select.flix_runs import states
from coterie.select.plan import mixed_losses, plan
from coterie.theory import flix_rates, flix_rounds, flix_steps
from coterie.theory.flix import Mixture


def slopes(fed: Federation, own: Tensor, alpha: float, xs: Tensor) -> Tensor:
    """G_i at row i of xs, [n, d], by autograd."""
    found = []
    for k in range(fed.n):
        rows, y = fed.runtime.train.of(k)
        w = (alpha * xs[k] + (1 - alpha) * own[k]).detach().requires_grad_()
        z = rows @ w
        loss = (torch.nn.functional.softplus(z) - y * z).mean() + 0.05 * w @ w
        found.append(alpha * torch.autograd.grad(loss, w)[0])
    return torch.stack(found)


def top(values: Tensor, k: int) -> Tensor:
    kept = torch.zeros_like(values)
    for row, out in zip(values, kept, strict=True):
        at = row.abs().argsort(descending=True)[:k]
        out[at] = row[at]
    return kept


def test_ef21_is_its_recursion(logistic):
    fed, alpha, lr = logistic(), 0.6, 0.8
    found = list(states(fed, FLIX(alpha=alpha, solver="ef21", compressor="top-2", lr=lr), 6))
    own, x = found[-1][0].runtime.kept("own"), found[0][1].x
    g = slopes(fed, own, alpha, x.expand(fed.n, -1))
    for _, s in found[1:]:
        x = x - lr * g.mean(0)
        torch.testing.assert_close(s.x, x, rtol=0, atol=1e-12)
        g = g + top(slopes(fed, own, alpha, x.expand(fed.n, -1)) - g, 2)


def test_scaffnew_is_its_recursion_and_its_shifts_sum_to_zero(logistic):
    fed, alpha, lr, chance = logistic(), 0.6, 0.5, 0.3
    found = list(states(fed, FLIX(alpha=alpha, solver="scaffnew", lr=lr, chance=chance), 8))
    trial = found[-1][0]
    own, x = trial.runtime.kept("own"), found[0][1].x.repeat(fed.n, 1)
    h, lengths = torch.zeros_like(x), []
    for t, (_, s) in enumerate(found[1:], 1):
        draw = float(trial.uniform("coin", t, 1))
        lengths.append(1 + math.floor(math.log(draw) / math.log(1 - chance)))
        for _ in range(lengths[-1]):
            x = x - lr * (slopes(fed, own, alpha, x) - h)
        mean = x.mean(0).expand_as(x)
        h, x = h + chance / lr * (mean - x), mean
        torch.testing.assert_close(s.x, mean[0], rtol=0, atol=1e-12)
    assert len(set(lengths)) > 1 and h.sum(0).abs().max() < 1e-12
    torch.testing.assert_close(trial.runtime.kept("h"), h, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_scaffnew_reaches_the_minimum_in_fewer_rounds_than_gradient_descent():
    draw = torch.Generator().manual_seed(5)
    scale = torch.tensor([1.0, 0.1, 0.03], dtype=torch.float64)  # condition number about 1,000
    xs = [scale * torch.randn(40, 3, generator=draw, dtype=torch.float64) for _ in range(6)]
    ys = [x @ (torch.randn(3, generator=draw, dtype=torch.float64) / scale) for x in xs]
    fed, gap = Federation.from_arrays(xs, ys, models.linear(l2=1e-6)), {}
    least = min(mixed_losses(fed, FLIX.from_theory(fed, alpha=0.7), 8000))
    for solver in ("dgd", "scaffnew"):
        gap[solver] = mixed_losses(fed, FLIX.from_theory(fed, alpha=0.7, solver=solver), 200)[-1] - least
    assert gap["scaffnew"] < 0.01 * gap["dgd"]


def test_scaffnew_communicates_once_in_the_root_of_kappa_steps():
    mixture = Mixture.equal(1.0, torch.tensor([16.0]), torch.tensor([1.0]))
    assert flix_steps.scaffnew_chance(mixture) == 0.25
    assert flix_rates.scaffnew_rate(mixture) == 1 - 1 / 16
    assert flix_steps.scaffnew_chance(Mixture.equal(1.0, torch.tensor([16.0]), torch.zeros(1))) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "compressor"),
    [("dgd", "identity"), ("ef21", "top-1"), ("ef21", "sign"), ("scaffnew", "identity")],
)
def test_a_plan_keeps_its_promise(solver, compressor, logistic):
    for seed in range(3):
        fed = logistic(n=5, d=3, rows=25, seed=seed)
        chosen = plan(fed, 1e-3, solver=solver, encoding=compressor, local_tol=1e-10)
        descent = FLIX.from_theory(fed, alpha=chosen.alpha, start_at="average", local_tol=1e-10)
        curve = mixed_losses(fed, chosen.algorithm, chosen.rounds)
        assert curve[-1] - min(mixed_losses(fed, descent, 400)) <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(200), marks=pytest.mark.slow)], ids=len)
def test_the_running_certificate_is_never_below_the_gap(seeds, logistic):
    ratios = []
    for seed in seeds:
        fed = logistic(n=4, d=3, rows=12, seed=seed, l2=0.01 * 3 ** (seed % 4))
        alpha = (0.3, 0.7, 1.0)[seed % 3]
        method = FLIX(alpha=alpha, local_tol=1e-10)
        found = list(states(fed, method, 12))
        curve = torch.tensor(mixed_losses(fed, method, 12), dtype=torch.float64)
        least = min(mixed_losses(fed, method, 400)[-1], float(curve.min()))
        bound = torch.tensor([method.certificate(s) for _, s in found[1:]], dtype=torch.float64)
        assert (curve - least <= bound + 1e-13).all(), f"seed {seed}"
        ratios.append(float((curve[-1] - least) / bound[-1]))
    assert sorted(ratios)[len(ratios) // 2] > 0.1


def test_a_certificate_needs_everybody_and_gradient_descent(logistic):
    for settings in ({"lr": 0.1}, {"solver": "ef21", "compressor": "top-1"}, {"participation": 0.5}):
        method = FLIX(**settings)
        assert math.isinf(method.certificate(list(states(logistic(), method, 2))[-1][1]))


def test_networks_get_no_certificate_and_the_steps_for_losses_that_are_not_convex():
    xs = [torch.randn(20, 2, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    fed = Federation.from_arrays(xs, [x.sin().sum(1) for x in xs], models.mlp(hidden=(3,)))
    with pytest.raises(SettingError, match="certificates: they need a convex loss"):
        plan(fed, 1e-3)
    local = {"local": "sgd", "local_steps": 20}
    method = FLIX.from_theory(fed, alpha=0.5, solver="diana", compressor="rand-2", **local)
    mixture, omega = method.mixture(fed), fed.d / 2 - 1
    assert (
        method.lr == pytest.approx(flix_steps.diana_step_nonconvex(mixture, omega), rel=1e-6)
        and not method.average
    )
    run = coterie.fit(fed, FLIX(alpha=0.5, **local), 2)
    assert math.isinf(run.algorithm.certificate(run.state))


def test_solvers_refuse_what_they_have_no_theory_for():
    for settings, why in (
        ({"solver": "ef21", "compressor": "rand-2"}, "contraction"),
        ({"solver": "diana", "compressor": "top-2"}, "biased"),
        ({"solver": "scaffnew", "compressor": "top-2"}, "whole vectors"),
        ({"solver": "scaffnew", "participation": 0.5}, "all clients"),
        ({"solver": "scaffnew", "alpha": "auto"}, "given alpha"),
    ):
        with pytest.raises(SettingError, match=why):
            FLIX(**settings)
    assert FLIX(solver="ef21", compressor="top-2").compressor == "top-2-plain"


def test_ef21_without_compression_is_gradient_descent():
    mixture = Mixture(torch.tensor([0.5, 1.0]), torch.tensor([4.0, 3.0]), torch.tensor([0.4, 0.2]))
    assert flix_steps.ef21_step(mixture, 1.0) == flix_steps.dgd_step(mixture)
    assert flix_rates.ef21_rate(mixture, 1.0) == pytest.approx(flix_rates.dgd_rate(mixture))
    assert flix_rounds.ef21_rounds(mixture, 1.0, 1.0, 1e-3) == flix_rounds.dgd_rounds(mixture, 1.0, 1e-3)
    theta = 1 - math.sqrt(0.75)  # delta = 1/4
    by_hand = 1 / (2 + math.sqrt((1 + 9) / 2) * math.sqrt(2 * 0.75 / theta / theta))
    assert flix_steps.ef21_step(mixture, 0.25) == pytest.approx(min(by_hand, theta / 2 / 0.15))

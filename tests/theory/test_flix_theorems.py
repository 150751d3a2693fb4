"""Every statement on FLIX against runs on 100 random problems; docs/flix-theory.md lists them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from coterie import Federation, models
from coterie.algorithms.flix import FLIX
from coterie.engine.compressors import compressor
from coterie.select.flix_runs import states
from coterie.theory import flix, flix_bounds, flix_nonconvex, flix_rates, flix_rounds, flix_steps
from tests.theory.flix_problems import DRAWS, Problem, dcgd, diana, rand_k
from tests.theory.flix_problems import problem as make

ROUNDS = 40


@pytest.fixture(params=[range(15), pytest.param(range(100), marks=pytest.mark.slow)], ids=len)
def seeds(request) -> range:
    return request.param


def kept(problem: Problem, seed: int) -> tuple[Tensor, Tensor]:
    """How many coordinates each client keeps, and its omega_i."""
    k = torch.randint(1, problem.d + 1, (problem.n,), generator=torch.Generator().manual_seed(seed))
    k = k.amax().expand(problem.n) if seed % 3 == 1 else k  # corollaries are on one omega for all
    return k, problem.d / k.double() - 1


def below(measured: Tensor, bound: Tensor) -> bool:
    """Whether means over draws, the last axis, exceed no bound by more than 4 standard errors."""
    error = measured.std(-1) / math.sqrt(measured.shape[-1])
    return bool((measured.mean(-1) <= bound * (1 + 1e-9) + 4 * error + 1e-13).all())


def problems(seeds, **settings):
    for seed in seeds:
        yield seed, make(seed, ("ridge", "logistic")[seed % 2], **settings)


def test_constants_bound_the_hessian(seeds):
    """Propositions 1 and 2."""
    for _, problem in problems(seeds):
        for x in (problem.x0, problem.minimiser):
            values = torch.linalg.eigvalsh(problem.hessian(x))
            assert problem.mixture.mu * (1 - 1e-9) <= values[0] and values[-1] <= problem.mixture.L * (
                1 + 1e-9
            )


def test_mixing_shrinks_the_spread(seeds):
    """Proposition 3."""
    for _, problem in problems(seeds, equal=True):
        mixture, alpha = problem.mixture, float(problem.alpha[0])
        deployed = mixture.spread(problem.mixed(problem.x0))
        assert deployed == pytest.approx(flix.mixed_spread(alpha, mixture.spread(problem.own)), rel=1e-9)


def test_moments_of_compressed_gradients(seeds):
    """Propositions 4 and 5: E|g|^2 of DCGD and of DIANA, and DIANA's shifts one step later, exactly."""
    for seed, problem in problems(seeds):
        omega = kept(problem, seed)[1]
        best = problem.minimiser
        star, draw = problem.slopes(best), torch.Generator().manual_seed(seed)
        for x in (problem.x0, best):
            here = problem.slopes(x)
            gap = float(problem.value(x) - problem.value(best))
            moments = flix_bounds.dcgd_moments(problem.mixture, omega, star)
            second = here.mean(0).square().sum() + (omega * here.square().sum(-1)).sum() / problem.n**2
            assert second <= (2 * moments.A * gap + moments.D) * (1 + 1e-9) + 1e-13
            away = torch.randn(here.shape, generator=draw, dtype=torch.float64)
            for h in (away, 2 * star - here):  # the second is the worst case
                _check_diana(problem, omega, star, here, h, gap)


def _check_diana(problem: Problem, omega: Tensor, star: Tensor, here: Tensor, h: Tensor, gap: float) -> None:
    moments, sizes = flix_bounds.diana_moments(problem.mixture, omega), (here - h).square().sum(-1)
    sigma = float((omega * (h - star).square().sum(-1)).sum()) / problem.n**2
    second = here.mean(0).square().sum() + (omega * sizes).sum() / problem.n**2
    assert second <= (2 * moments.A * gap + moments.B * sigma) * (1 + 1e-9) + 1e-13
    beta = flix_steps.diana_beta(omega).unsqueeze(-1)
    moved = h + beta * (here - h) - star  # the mean; beta^2 omega |G - h|^2 is the variance
    spread = beta.squeeze(-1).square() * omega * sizes
    later = float((omega * (moved.square().sum(-1) + spread)).sum()) / problem.n**2
    assert later <= ((1 - moments.rho) * sigma + 2 * moments.C * gap) * (1 + 1e-9) + 1e-13


def test_rand_k_has_the_variance_that_theory_assumes():
    values = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k = torch.tensor([1, 2, 4, 5])
    sent = rand_k(values.expand(4_000, -1, -1), k, torch.Generator().manual_seed(1))
    torch.testing.assert_close(sent.mean(0), values, rtol=0, atol=0.2)
    measured = (sent - values).square().sum(-1).mean(0) / values.square().sum(-1)
    torch.testing.assert_close(measured, 5 / k.double() - 1, rtol=0.1, atol=1e-12)


def test_one_shot_average(seeds):
    """Theorem 1: the bounds in order, and alphas that reach a given accuracy."""
    for seed, problem in problems(seeds):
        mixture, own = problem.mixture, problem.own
        x = mixture.average(own)
        gap = float(problem.value(x) - problem.value(problem.minimiser))
        sure = flix.certificate(problem.losses(problem.mixed(x)), problem.losses(own))
        tight = flix.one_shot_bound(mixture, mixture.spread(own))
        coarse = flix.one_shot_diameter_bound(mixture, flix.diameter(own))
        assert gap <= sure + 1e-12 and sure <= tight * (1 + 1e-9) and tight <= coarse * (1 + 1e-9), seed
    for seed, problem in problems(seeds, equal=True):
        mixture, eps = problem.mixture, 10.0 ** -(seed % 5)
        alpha = flix.one_shot_alpha(eps, float(mixture.smoothness.mean()), mixture.spread(problem.own))
        problem = problem.at(alpha)
        x = mixture.average(problem.own)
        assert problem.value(x) - problem.value(problem.minimiser) <= eps * (1 + 1e-9), seed


def test_gradient_descent(seeds):
    """Theorem 2: the gap in every round, and the rounds of the closed form."""
    for seed, problem in problems(seeds, equal=True):
        mixture, x = problem.mixture, problem.mixture.average(problem.own)
        least, gaps = problem.value(problem.minimiser), []
        for _ in range(ROUNDS):
            gaps.append(float(problem.value(x) - least))
            x = x - flix_steps.dgd_step(mixture) * problem.slopes(x).mean(0)
        bounds = flix_rates.gap_bounds("dgd", mixture, 0.0, 1.0, max(gaps[0], 0.0), ROUNDS)
        assert all(g <= b * (1 + 1e-9) + 1e-13 for g, b in zip(gaps, bounds, strict=True)), seed
        spread, mean_l = mixture.spread(problem.own), float(mixture.smoothness.mean())
        eps, mean_mu = 1e-3 * max(bounds[0], 1e-9), float(mixture.convexity.mean())
        promised = flix_rounds.rounds_for_alpha(float(problem.alpha[0]), eps, mean_l, mean_mu, spread)
        assert promised >= ROUNDS or gaps[promised] <= eps * (1 + 1e-9) + 1e-13, seed


def test_one_shot_average_without_convexity(seeds):
    """Theorem 3: weights alpha^4 L^2."""
    for seed in seeds:
        problem = make(seed, "robust")
        mixture, own = problem.mixture, problem.own
        slope = float(problem.slopes(mixture.average(own, stationary=True)).mean(0).norm())
        rest = float(problem.grads(own).norm(dim=-1).max())  # what is left of the gradients at x_i
        tight = flix.stationary_bound(mixture, mixture.spread(own, stationary=True))
        assert slope <= tight + rest and tight <= flix.stationary_diameter_bound(
            mixture, flix.diameter(own)
        ) * (1 + 1e-9)
        assert tight <= flix.stationary_bound(mixture, _spread(mixture, own, mixture.weights)) * (1 + 1e-9)
        eps = 10.0 ** -(seed % 4)
        equal = problem.at(1.0)  # with equal alphas the weights do not depend on alpha
        middle, spread = (
            equal.mixture.average(own, stationary=True),
            equal.mixture.spread(own, stationary=True),
        )
        equal = problem.at(flix.stationary_alpha(eps, mixture.smoothness, spread))
        assert equal.slopes(middle).mean(0).norm() <= eps * (1 + 1e-9) + rest, seed


def _spread(mixture: flix.Mixture, own: Tensor, weights: Tensor) -> float:
    """sum w_i |x_i - x|^2 around the average with other weights, in the weights of Theorem 3."""
    x = (weights.unsqueeze(-1) * own).sum(0)
    return float((mixture.stationary_weights * (own - x).square().sum(-1)).sum())


def test_dcgd(seeds):
    """Theorem 4 with one omega per client, and Corollary 1."""
    for seed, problem in problems(seeds):
        k, omega = kept(problem, seed)
        mixture, best = problem.mixture, problem.minimiser
        xs = dcgd(problem, k, flix_steps.dcgd_step(mixture, omega), ROUNDS, seed)
        errors, star = (xs - best).square().sum(-1), problem.slopes(best)
        bound = flix_bounds.dcgd_distances(mixture, omega, float(errors[0, 0]), star, ROUNDS + 1)
        assert below(errors, torch.tensor(bound, dtype=torch.float64)), seed
        floor = flix_rates.dcgd_floor(mixture, omega, star)
        coarse = flix_bounds.dcgd_neighbourhood(mixture, omega, mixture.spread(problem.own))
        assert floor <= coarse * (1 + 1e-9), seed
        noise = float(star.square().sum(-1).mean())
        assert noise <= flix_bounds.slopes_at_minimum(mixture, mixture.spread(problem.own)) * (1 + 1e-9), seed


def test_the_printed_neighbourhood_is_coarser(seeds):
    """Corollary 1 for equal alpha: 2 gamma_0 omega max(L)^3 D^2 / (n mean(mu)^2)."""
    for _, problem in problems(seeds, equal=True):
        mixture, alpha = problem.mixture, float(problem.alpha[0])
        step = flix_steps.dcgd_step(mixture, 1.0) * alpha**2
        top, mean_mu = float(mixture.smoothness.max()), float(mixture.convexity.mean())
        printed = 2 * step * top**3 * flix.diameter(problem.own) / (problem.n * mean_mu**2)
        assert flix_bounds.dcgd_neighbourhood(mixture, 1.0, mixture.spread(problem.own)) <= printed * (
            1 + 1e-9
        )


def test_diana(seeds):
    """Theorem 5 with one omega per client, and Corollary 2 where all have the same."""
    checked = 0
    for seed, problem in problems(seeds):
        k, omega = kept(problem, seed)
        mixture, best = problem.mixture, problem.minimiser
        star, zero = problem.slopes(best), seed % 3 == 0
        xs, shifts = diana(problem, k, flix_steps.diana_step(mixture, omega), ROUNDS, seed, zero)
        energy = torch.tensor(
            [
                [
                    flix_bounds.diana_energy(mixture, omega, float((x - best).square().sum()), h - star)
                    for x, h in pairs
                ]
                for pairs in (zip(xs[t], shifts[t], strict=True) for t in (0, 1, 5, ROUNDS))
            ],
            dtype=torch.float64,
        )
        bound = flix_bounds.diana_distances(mixture, omega, float(energy[0, 0]), ROUNDS + 1)
        assert below(energy, torch.tensor([bound[t] for t in (0, 1, 5, ROUNDS)], dtype=torch.float64)), seed
        if not zero and (omega == omega[0]).all():
            gap = float(problem.value(problem.x0) - problem.value(best))
            promised = flix_rounds.diana_rounds(mixture, float(omega[0]), gap, 0.9 * gap)
            xs, _ = diana(problem, k, flix_steps.diana_step(mixture, omega), min(promised, 400), seed)
            reached = (problem.value(xs) - problem.value(best))[-1]
            checked += promised <= 400
            assert promised > 400 or below(reached, torch.tensor(0.9 * gap)), seed
    assert checked >= len(seeds) // 6


def test_averaged_iterates_without_strong_convexity(seeds):
    """Theorems 6 and 7, Corollaries 3 and 4: a quarter of the step, the mean of the iterates."""
    for seed in seeds:
        problem = make(seed, "ridge", l2=0.0)
        k, omega = kept(problem, seed)
        mixture, best = problem.mixture, problem.minimiser
        mixture = flix.Mixture(mixture.alpha, mixture.smoothness, torch.zeros(problem.n))
        star, start = problem.slopes(best), float((problem.x0 - best).square().sum())
        lr = flix_steps.dcgd_step(mixture, omega) / 4
        gaps = problem.value(dcgd(problem, k, lr, ROUNDS, seed)[1:].mean(0)) - problem.value(best)
        bound = flix_bounds.dcgd_average_gap(mixture, omega, lr, start, star, ROUNDS)
        assert below(gaps, torch.tensor(bound)), seed
        lr, zero = flix_steps.diana_step(mixture, omega) / 4, seed % 2 == 0
        xs, shifts = diana(problem, k, lr, ROUNDS, seed, zero)
        gaps = problem.value(xs[1:].mean(0)) - problem.value(best)
        bound = flix_bounds.diana_average_gap(mixture, omega, lr, start, shifts[0, 0] - star, ROUNDS)
        assert below(gaps, torch.tensor(bound)), seed


def test_bounds_of_averaged_iterates_scale_with_the_square_of_alpha(seeds):
    """Corollaries 3 and 4 on quadratics, where x* does not depend on alpha; Theorems 6 and 7 run under the bounds."""
    for seed in seeds:
        start, bounds, omega = 1.0, [], 0.5 + seed % 4
        for alpha in (0.3, 1.0):
            problem = make(seed, "ridge", equal=True).at(alpha)
            mixture = problem.mixture
            star, lr = problem.slopes(problem.minimiser), flix_steps.dcgd_step(mixture, omega) / 4
            slow = flix_steps.diana_step(mixture, omega) / 4
            bounds.append(
                (
                    flix_bounds.dcgd_average_gap(mixture, omega, lr, start, star, 30),
                    flix_bounds.diana_average_gap(mixture, omega, slow, start, -star, 30),
                )
            )
        assert bounds[0] == pytest.approx([0.09 * value for value in bounds[1]], rel=1e-6), seed


def test_dcgd_without_convexity(seeds):
    """Proposition 6, Theorem 8 and Corollary 5; losses are at least 0, which stands for their infimum."""
    for seed in seeds:
        problem = make(seed, "robust")
        k, omega = kept(problem, seed)
        mixture, gap = problem.mixture, float(problem.value(problem.x0))
        a, c = flix_nonconvex.dcgd_noise(mixture, omega, 0.0)
        here = problem.slopes(problem.x0)
        second = here.mean(0).square().sum() + (omega * here.square().sum(-1)).sum() / problem.n**2
        assert second <= (2 * a * gap + here.mean(0).square().sum() + c) * (1 + 1e-9), seed
        for lr in (flix_steps.dcgd_step_nonconvex(mixture, omega, ROUNDS), flix_steps.dgd_step(mixture)):
            sizes = problem.slopes(dcgd(problem, k, lr, ROUNDS - 1, seed)).mean(-2).square().sum(-1)
            bound = flix_nonconvex.dcgd_gradient(mixture, omega, lr, gap, 0.0, ROUNDS)
            assert sizes.mean(-1).min() <= bound, seed
        lr, rounds = flix_nonconvex.dcgd_plan(
            mixture, omega, gap, 0.0, eps := math.sqrt(0.5 * mixture.L * gap)
        )
        assert flix_nonconvex.dcgd_gradient(mixture, omega, lr, gap, 0.0, rounds) <= eps**2, seed
        if rounds <= 400 and seed % 10 == 0:
            sizes = problem.slopes(dcgd(problem, k, lr, rounds - 1, seed)).mean(-2).square().sum(-1)
            assert sizes.mean(-1).min() <= eps**2, seed


def test_diana_without_convexity(seeds):
    """Theorem 9 with one omega per client, and Corollary 6."""
    for seed in seeds:
        problem = make(seed, "robust")
        k, omega = kept(problem, seed)
        mixture, gap = problem.mixture, float(problem.value(problem.x0))
        for zero in (False, True):
            xs, shifts = diana(
                problem, k, flix_steps.diana_step_nonconvex(mixture, omega), ROUNDS - 1, seed, zero
            )
            sizes = problem.slopes(xs).mean(-2).square().sum(-1)
            first = shifts[0, 0] - problem.slopes(problem.x0)
            bound = flix_nonconvex.diana_gradient(mixture, omega, gap, ROUNDS, first)
            assert sizes.mean(-1).min() <= bound, seed
        rounds = flix_nonconvex.diana_rounds_nonconvex(mixture, omega, gap, math.sqrt(bound))
        assert flix_nonconvex.diana_gradient(mixture, omega, gap, max(1, rounds)) <= bound * (1 + 1e-9)


def test_jensen_rules_out_the_printed_constant():
    """Theorem 9 as printed has L_alpha: one curved client of 20 moves the shifts 20 times as much."""
    mixture = flix.Mixture.equal(1.0, torch.tensor([20.0] + [0.0] * 19), torch.zeros(20))
    assert mixture.L_rms**2 / mixture.L**2 == pytest.approx(20.0)


def test_draws_are_enough_to_notice():
    """A bound that is half of the mean is found by `below`."""
    values = torch.rand(1, DRAWS, generator=torch.Generator().manual_seed(0))
    assert below(values, torch.tensor([0.5])) and not below(values, torch.tensor([0.25]))


@pytest.mark.parametrize(("solver", "sent"), [("dcgd", "rand-1"), ("diana", "rand-1"), ("diana", "qsgd-2")])
def test_the_algorithm_itself(solver, sent, seeds):
    """Theorems 4 and 5 with `FLIX.from_theory`, as users run it: one federation after another, two draws each."""
    for seed in seeds:
        task = make(seed, "ridge", l2=0.05)
        fed = Federation.from_arrays(list(task.a), list(task.b), models.linear(l2=0.05))
        alpha = tuple(task.alpha.tolist())
        method = FLIX.from_theory(fed, alpha=alpha, solver=solver, compressor=sent, local_tol=1e-11)
        mixture, omega = method.mixture(fed), compressor(sent).omega(fed.d)
        torch.testing.assert_close(mixture.smoothness, task.mixture.smoothness, rtol=1e-6, atol=0)
        best = task.minimiser
        star, start = task.slopes(best), float(best.square().sum())
        last = torch.stack([list(states(fed.fresh(draw), method, 12))[-1][1].x for draw in range(2)])
        if solver == "dcgd":
            bound = flix_bounds.dcgd_distances(mixture, omega, start, star, 13)[-1]
        else:
            shifts = task.slopes(torch.zeros_like(best)) - star
            energy = flix_bounds.diana_energy(mixture, omega, start, shifts)
            bound = flix_bounds.diana_distances(mixture, omega, energy, 13)[-1]
        assert below((last - best).square().sum(-1), torch.tensor(bound)), seed


def test_networks_average_by_the_weights_of_theorem_three():
    xs = [scale * torch.randn(20, 2, generator=torch.Generator().manual_seed(1)) for scale in (1.0, 3.0)]
    fed = Federation.from_arrays(xs, [x.sin().sum(1) for x in xs], models.mlp(hidden=(3,)))
    method = FLIX(alpha=0.5, solver="one-shot", local="sgd", local_steps=20)
    (trial, _), (_, s) = states(fed, method, 1)
    own, mixture = trial.runtime.kept("own"), method.mixture(fed)
    torch.testing.assert_close(s.x, mixture.average(own, stationary=True))
    assert not torch.allclose(s.x, mixture.average(own))


def test_networks_take_shorter_steps_for_more_rounds():
    xs = [torch.randn(20, 2, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    fed = Federation.from_arrays(xs, [x.sin().sum(1) for x in xs], models.mlp(hidden=(3,)))
    take = [
        FLIX.from_theory(fed, 0.5, "dcgd", "rand-1", rounds=rounds, local="sgd", local_steps=2)
        for rounds in (None, 10_000)
    ]
    mixture, omega = take[0].mixture(fed), fed.d - 1.0
    steps = [flix_steps.dcgd_step_nonconvex(mixture, omega, rounds) for rounds in (None, 10_000)]
    assert [one.lr for one in take] == pytest.approx(steps, rel=1e-5) and take[1].lr < take[0].lr

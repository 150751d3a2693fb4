"""FLIX against closed forms and its corrected theorems, what it sends and what "auto" chooses."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import coterie
from coterie import Federation
from coterie._core import randomness
from coterie._core.errors import SettingError
from coterie.algorithms.flix import FLIX
from coterie.conformance import federation
from coterie.engine.compressors import compressor
from coterie.select.flix_runs import states
from coterie.select.plan import cost, mixed_losses, rounds_within
from coterie.theory import flix as theory
from coterie.theory import flix_rates, flix_rounds, flix_steps

ALPHAS = (0.1, 0.5, 1.0)


def iterates(
    fed: Federation, algorithm: FLIX, rounds: int, x0: Tensor | None = None
) -> tuple[Tensor, Federation]:
    """x after 0, 1, ... rounds, and the federation that ran them."""
    found = list(states(fed, algorithm, rounds, x0=x0))
    return torch.stack([s.x for _, s in found]), found[-1][0]


def own_models(fed: Federation) -> Tensor:
    return fed.runtime.store.columns["own"].rows


def rows_of(fed: Federation) -> list[tuple[Tensor, Tensor]]:
    return [fed.runtime.train.of(k) for k in range(fed.n)]


def objective(fed: Federation, own: Tensor, alpha: Tensor, x: Tensor) -> Tensor:
    """f~ written out again, for autograd."""
    total = torch.zeros((), dtype=torch.float64)
    for (rows, y), mine, a in zip(rows_of(fed), own, alpha, strict=True):
        w = a * x + (1 - a) * mine
        z = rows @ w
        total = total + (torch.nn.functional.softplus(z) - y * z).mean() + 0.05 * w @ w
    return total / fed.n


def gradient_of(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf)[0]

    return gradient


def test_hessian_of_the_mixed_problem_lies_between_mu_and_l_alpha(logistic):
    fed = logistic()
    alpha = torch.linspace(0.2, 1.0, 8, dtype=torch.float64)
    algorithm = FLIX(alpha=tuple(alpha.tolist()))
    mixture = algorithm.mixture(fed)
    own = own_models(iterates(fed, algorithm, 0)[1])
    for scale in (0.0, 1.0, 5.0):
        x = scale * randomness.normal(randomness.slots(randomness.key(3, "x"), fed.d))
        hessian = torch.autograd.functional.hessian(lambda w: objective(fed, own, alpha, w), x)
        spectrum = torch.linalg.eigvalsh(hessian)
        assert mixture.mu <= spectrum[0] + 1e-12 and spectrum[-1] <= mixture.L + 1e-12


def test_a_round_of_gradient_descent_is_a_step_on_the_written_out_objective(logistic):
    fed = logistic()
    alpha = torch.linspace(0.0, 1.0, 8, dtype=torch.float64)
    xs, ran = iterates(fed, FLIX(alpha=tuple(alpha.tolist()), lr=0.7), 3)
    slope = gradient_of(lambda w: objective(fed, own_models(ran), alpha, w))
    for k in range(3):
        torch.testing.assert_close(xs[k + 1], xs[k] - 0.7 * slope(xs[k]), rtol=0, atol=1e-13)


def test_adam_is_torchs_adam_on_the_written_out_objective(logistic):
    fed, alpha = logistic(), torch.full((8,), 0.6, dtype=torch.float64)
    xs, ran = iterates(fed, FLIX(alpha=0.6, solver="adam", lr=0.05, batch=0), 5)
    x = xs[0].clone().requires_grad_()
    adam = torch.optim.Adam([x], lr=0.05)
    for expected in xs[1:]:
        adam.zero_grad()
        objective(fed, own_models(ran), alpha, x).backward()
        adam.step()
        torch.testing.assert_close(x.detach(), expected, rtol=0, atol=1e-12)


def test_local_models_are_minimisers(logistic):
    for local in ({}, {"local": "sgd", "batch": 0, "local_lr": 0.5, "local_steps": 5000}):
        ran = iterates(logistic(), FLIX(local_tol=1e-8, **local), 0)[1]
        client = ran.map(FLIX(alpha=1.0, lr=0.1).slope, each={"x": own_models(ran)}).values
        assert client.norm(dim=-1).max() <= 1e-8


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
def test_mixing_shrinks_the_variance_of_the_models_by_the_square(alpha, logistic):
    run = coterie.fit(logistic(), FLIX(alpha=alpha), 5)
    own = own_models(coterie.fit(logistic(), FLIX(alpha=0.5), 0).fed)

    def spread(rows: Tensor) -> Tensor:
        return (rows - rows.mean(0)).square().sum(-1).mean()

    assert abs(spread(run.personal) - (1 - alpha) ** 2 * spread(own)) <= 1e-12 * spread(own)


def test_alpha_zero_is_the_local_model_and_costs_nothing(logistic):
    run = coterie.fit(logistic(), FLIX(alpha=0.0), 7)
    for count in ("messages_up", "floats_up", "bytes_up", "messages_down", "floats_down", "bytes_down"):
        assert run.fed.ledger.total(count) == 0
    assert torch.equal(run.personal, own_models(run.fed)) and cost(FLIX(alpha=0.0), run.fed, 7) == 0


def test_alpha_one_is_gradient_descent_on_the_average_risk(logistic):
    fed = logistic()
    algorithm = FLIX.from_theory(fed, alpha=1.0)
    run = coterie.fit(fed, algorithm, 20)
    x = torch.zeros(fed.d, dtype=torch.float64)
    ones, none = torch.ones(fed.n, dtype=torch.float64), torch.zeros(fed.n, fed.d, dtype=torch.float64)
    for _ in range(20):
        x = x - algorithm.lr * gradient_of(lambda w: objective(fed, none, ones, w))(x)
    torch.testing.assert_close(run.personal, x.expand(fed.n, -1), rtol=0, atol=1e-13)


def test_gradient_descent_obeys_its_rate_from_the_one_shot_average_for_every_round(logistic):
    fed = logistic()
    for alpha in ALPHAS:
        algorithm = FLIX.from_theory(fed, alpha=alpha, start_at="average", local_tol=1e-11)
        gaps = torch.tensor(mixed_losses(fed, algorithm, 200), dtype=torch.float64)
        gaps = gaps - gaps.min()
        mixture = algorithm.mixture(fed)
        bound = gaps[0] * flix_rates.dgd_rate(mixture) ** torch.arange(len(gaps)).double()
        assert (gaps <= bound * (1 + 1e-9) + 1e-14).all()
        own = own_models(iterates(fed, algorithm, 1)[1])
        assert gaps[0] <= theory.one_shot_bound(mixture, mixture.spread(own))
        assert theory.one_shot_bound(mixture, mixture.spread(own)) <= theory.one_shot_diameter_bound(
            mixture, theory.diameter(own)
        )
        for eps in (1e-3, 1e-6):
            needed = int((gaps <= eps).nonzero()[0])
            assert flix_rounds.dgd_rounds(mixture, float(gaps[0]), eps) >= needed
            closed = flix_rounds.rounds_for_alpha(
                alpha, eps, float(mixture.smoothness.mean()), 0.1, mixture.spread(own)
            )
            assert closed >= needed


@pytest.mark.parametrize("solver, sent", [("dgd", "identity"), ("dcgd", "rand-3"), ("diana", "rand-3")])
def test_on_quadratics_the_iterates_do_not_depend_on_alpha(solver, sent, least_squares):
    fed = least_squares()
    found = [
        iterates(fed, FLIX.from_theory(fed, alpha=alpha, solver=solver, compressor=sent), 60)[0]
        for alpha in ALPHAS
    ]
    for other in found[1:]:
        assert (other - found[0]).abs().max() <= 1e-10


def test_diana_converges_where_dcgd_stalls_below_its_floor(logistic):
    fed = logistic()
    best = iterates(fed, FLIX.from_theory(fed, alpha=0.5, local_tol=1e-12), 200)[0][-1]
    slopes = fed.fresh()
    slopes.enter_round(0, None)
    probe = FLIX(alpha=0.5, lr=1.0, local_tol=1e-12)
    probe.start(slopes)
    at_best = slopes.map(probe.slope, x=best).values
    errors = {}
    for solver in ("dcgd", "diana"):
        xs, _ = iterates(fed, FLIX.from_theory(fed, 0.5, solver, "rand-3", local_tol=1e-12), 500)
        errors[solver] = (xs - best).square().sum(-1)
    assert errors["diana"][-1] < 1e-18
    floor = flix_rates.dcgd_floor(probe.mixture(fed), compressor("rand-3").omega(fed.d), at_best)
    assert 1e-6 < errors["dcgd"][-200:].mean() <= floor


def test_diana_obeys_its_bound_in_the_mean(logistic):
    fed = logistic()
    algorithm = FLIX.from_theory(fed, alpha=0.7, solver="diana", compressor="rand-2", local_tol=1e-11)
    mixture, omega = algorithm.mixture(fed), compressor("rand-2").omega(fed.d)
    best = iterates(fed, FLIX.from_theory(fed, alpha=0.7, local_tol=1e-11), 200)[0][-1]
    runs = [(iterates(fed.fresh(seed), algorithm, 150)[0] - best).square().sum(-1) for seed in range(4)]
    mean = torch.stack(runs).mean(0)
    curvature, beta = float(mixture.curvatures.max()), flix_steps.diana_beta(omega)
    scale = 1 + 4 * algorithm.lr**2 * omega / (fed.n * beta) * curvature**2
    bound = scale * mean[0] * flix_rates.diana_rate(mixture, omega) ** torch.arange(151).double()
    assert (mean <= bound).all()
    gap = 0.5 * mixture.L * float(mean[0])
    for eps in (1e-4, 1e-8):
        needed = (
            int((0.5 * mixture.L * mean <= eps).nonzero()[0])
            if (0.5 * mixture.L * mean <= eps).any()
            else 151
        )
        assert flix_rounds.diana_rounds(mixture, omega, gap, eps) >= needed


def test_one_shot_is_the_weighted_average_in_one_round(logistic):
    fed = logistic()
    alpha = tuple(torch.linspace(0.2, 1.0, 8).tolist())
    algorithm = FLIX(alpha=alpha, solver="one-shot")
    xs, ran = iterates(fed, algorithm, 3)
    mixture = algorithm.mixture(fed)
    weights = mixture.alpha.square() * mixture.smoothness
    expected = (weights.unsqueeze(-1) * own_models(ran)).sum(0) / weights.sum()
    torch.testing.assert_close(xs[1], expected)
    assert torch.equal(xs[3], xs[1])
    assert ran.ledger.total("floats_up") == fed.n * (fed.d + 1) and ran.ledger.total("floats_down") == 0


@pytest.mark.parametrize("loop", [False, True])
def test_auto_chooses_on_validation_rows_and_reports_one_number(loop, logistic):
    fed = logistic(n=6, rows=60, split=(0.5, 0.3, 0.2), loop=loop)
    run = coterie.fit(fed, FLIX(alpha="auto", local_tol=1e-9), 40)
    alpha, own = run.state.alpha, own_models(run.fed)
    grid = torch.linspace(0, 1, 11, dtype=torch.float64)
    scores = torch.stack([run.fed.score(own + a * (run.state.x - own), "validation")["loss"] for a in grid])
    chosen = run.fed.score(run.personal, "validation")["loss"]
    assert (chosen <= scores.min(0).values + 5e-3).all() and len(set(alpha.tolist())) > 1
    per_round = fed.n * (fed.d + 1)
    assert run.fed.ledger.total("floats_up", phase="slope") == 40 * per_round
    if loop:
        stacked = coterie.fit(
            logistic(n=6, rows=60, split=(0.5, 0.3, 0.2)), FLIX(alpha="auto", local_tol=1e-9), 40
        )
        torch.testing.assert_close(stacked.personal, run.personal, rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", [{}, {"solver": "diana", "compressor": "rand-2"}], ids=str)
def test_auto_costs_one_number_per_visit_more_than_a_given_alpha(settings, logistic):
    fed, rounds = logistic(n=6, rows=60, split=(0.5, 0.3, 0.2)), 20
    auto, given = (
        coterie.fit(fed, FLIX(alpha=alpha, **settings), rounds).fed.ledger for alpha in ("auto", 0.5)
    )
    assert auto.total("floats_up") - given.total("floats_up") == rounds * fed.n
    for count in ("messages_up", "messages_down", "floats_down", "bytes_down"):
        assert auto.total(count) == given.total(count)


SETTINGS = [
    {},
    {"solver": "one-shot"},
    {"start_at": "average"},
    {"alpha": (0.2,) * 6},
    {"solver": "dcgd", "compressor": "qsgd-2"},
    {"solver": "diana", "compressor": "rand-2"},
    {"solver": "diana", "compressor": "natural", "shift": "zero", "start_at": "average"},
    {"solver": "ef21", "compressor": "top-1"},
    {"solver": "ef21", "compressor": "sign", "shift": "zero", "start_at": "average"},
    {"solver": "scaffnew"},
    {"solver": "scaffnew", "lr": 0.1, "chance": 0.5, "start_at": "average", "alpha": (0.2,) * 6},
    {"solver": "sgd", "lr": 0.1, "participation": 0.5, "compressor": "top-1"},
    {"solver": "adam", "lr": 0.1, "participation": 0.34},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_cost_of_rounds_is_what_the_ledger_says(settings):
    algorithm = FLIX(**settings)
    for rounds in (0, 1, 2, 5):
        run = coterie.fit(federation(), algorithm, rounds)
        spent = run.fed.ledger.total("bytes_up") + run.fed.ledger.total("bytes_down")
        assert spent == cost(algorithm, run.fed, rounds)
    for budget in (900.0, 5000.0):
        try:
            rounds = rounds_within(algorithm, federation(), budget)
        except SettingError as problem:
            assert "too small" in str(problem)
            continue
        assert cost(algorithm, federation(), rounds) <= budget
        more = cost(algorithm, federation(), rounds + 1)
        assert more > budget or algorithm.solver == "one-shot"


def test_the_servers_shift_is_the_mean_of_all_clients_shifts_when_some_are_away(logistic):
    """DIANA and EF21: whoever is away keeps its h_i, so that a change counts for its share of all clients only."""
    for solver, how in (("diana", "rand-2"), ("ef21", "top-2")):
        fed = logistic(dropout=0.4)
        method = FLIX(alpha=0.6, solver=solver, compressor=how, lr=0.05)
        ran, state = list(states(fed, method, 12))[-1]
        column = ran.runtime.store.columns["h"]
        shifts = column.rows[column.slot] * (column.slot >= 0).unsqueeze(-1)
        assert torch.allclose(state.h, shifts.sum(0) / fed.n, atol=1e-12), solver


def test_the_average_is_the_mean_of_all_iterates(logistic):
    found = [s for _, s in states(logistic(), FLIX(alpha=0.6, solver="dgd", lr=0.2, average=True), 9)]
    iterates_after = torch.stack([s.x for s in found])[1:]
    assert torch.allclose(found[-1].mean, iterates_after.mean(0), atol=1e-12)
    assert not torch.allclose(found[-1].mean, found[-1].x, atol=1e-3)

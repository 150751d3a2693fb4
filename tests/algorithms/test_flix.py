"""FLIX against closed forms and its corrected theorems (facts E6 to E10 of the analysis)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import coterie
from coterie import Federation, State, models
from coterie.algorithms.flix import FLIX
from coterie.data.partition import equal_shares
from coterie.errors import DataError, SettingError
from coterie.federation import randomness
from coterie.federation.compressors import compressor
from coterie.runs.conformance import federation
from coterie.runs.experiments import shared_data
from coterie.runs.plan import cost, mixed_losses, rounds_within
from coterie.theory import flix as theory

ALPHAS = (0.1, 0.5, 1.0)


def least_squares(n: int = 6, d: int = 8, rows: int = 20, seed: int = 0) -> Federation:
    draw = torch.Generator().manual_seed(seed)
    xs = [torch.randn(rows, d, generator=draw, dtype=torch.float64) for _ in range(n)]
    ys = [x @ torch.randn(d, generator=draw, dtype=torch.float64) for x in xs]
    return Federation.from_arrays(xs, ys, models.linear(l2=0.1))


def logistic(n: int = 8, d: int = 6, rows: int = 30, seed: int = 1, l2: float = 0.1, **options) -> Federation:
    draw = torch.Generator().manual_seed(seed)
    xs = [torch.randn(rows, d, generator=draw, dtype=torch.float64) for _ in range(n)]
    ys = [
        (
            x @ torch.randn(d, generator=draw, dtype=torch.float64) + torch.randn(rows, generator=draw) > 0
        ).double()
        for x in xs
    ]
    return Federation.from_arrays(xs, ys, models.logistic(l2=l2), **options)


def iterates(
    fed: Federation, algorithm: FLIX, rounds: int, x0: Tensor | None = None
) -> tuple[Tensor, Federation]:
    """x after 0, 1, ... rounds, and the federation that ran them."""
    fed = fed.fresh()
    fed.enter_round(0, None)
    s = algorithm.start(fed)
    s = s if x0 is None else State(**{**s.fields(), "x": x0})
    found = [s.x]
    for t in range(1, rounds + 1):
        fed.enter_round(t, s)
        s = algorithm.round(fed, s, t)
        found.append(s.x)
    return torch.stack(found), fed


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


def test_hessian_of_the_mixed_problem_lies_between_mu_and_l_alpha():
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


def test_a_round_of_gradient_descent_is_a_step_on_the_written_out_objective():
    fed = logistic()
    alpha = torch.linspace(0.0, 1.0, 8, dtype=torch.float64)
    xs, ran = iterates(fed, FLIX(alpha=tuple(alpha.tolist()), lr=0.7), 3)
    slope = gradient_of(lambda w: objective(fed, own_models(ran), alpha, w))
    for k in range(3):
        torch.testing.assert_close(xs[k + 1], xs[k] - 0.7 * slope(xs[k]), rtol=0, atol=1e-13)


def test_local_models_are_minimisers():
    for local in ({}, {"local": "sgd", "batch": 0, "local_lr": 0.5, "local_steps": 5000}):
        ran = iterates(logistic(), FLIX(local_tol=1e-8, **local), 0)[1]
        client = ran.map(FLIX(alpha=1.0, lr=0.1).slope, each={"x": own_models(ran)}).values
        assert client.norm(dim=-1).max() <= 1e-8


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
def test_mixing_shrinks_the_variance_of_the_models_by_the_square(alpha):
    run = coterie.fit(logistic(), FLIX(alpha=alpha), 5)
    own = own_models(coterie.fit(logistic(), FLIX(alpha=0.5), 0).fed)

    def spread(rows: Tensor) -> Tensor:
        return (rows - rows.mean(0)).square().sum(-1).mean()

    assert abs(spread(run.personal) - (1 - alpha) ** 2 * spread(own)) <= 1e-12 * spread(own)


def test_alpha_zero_is_the_local_model_and_costs_nothing():
    run = coterie.fit(logistic(), FLIX(alpha=0.0), 7)
    for count in ("messages_up", "floats_up", "bytes_up", "messages_down", "floats_down", "bytes_down"):
        assert run.fed.ledger.total(count) == 0
    assert torch.equal(run.personal, own_models(run.fed)) and cost(FLIX(alpha=0.0), run.fed, 7) == 0


def test_alpha_one_is_gradient_descent_on_the_average_risk():
    fed = logistic()
    algorithm = FLIX.from_theory(fed, alpha=1.0)
    run = coterie.fit(fed, algorithm, 20)
    x = torch.zeros(fed.d, dtype=torch.float64)
    ones, none = torch.ones(fed.n, dtype=torch.float64), torch.zeros(fed.n, fed.d, dtype=torch.float64)
    for _ in range(20):
        x = x - algorithm.lr * gradient_of(lambda w: objective(fed, none, ones, w))(x)
    torch.testing.assert_close(run.personal, x.expand(fed.n, -1), rtol=0, atol=1e-13)


def test_gradient_descent_obeys_its_rate_from_the_one_shot_average_for_every_round():
    fed = logistic()
    for alpha in ALPHAS:
        algorithm = FLIX.from_theory(fed, alpha=alpha, start_at="average", local_tol=1e-11)
        gaps = torch.tensor(mixed_losses(fed, algorithm, 200), dtype=torch.float64)
        gaps = gaps - gaps.min()
        mixture = algorithm.mixture(fed)
        bound = gaps[0] * theory.dgd_rate(mixture) ** torch.arange(len(gaps)).double()
        assert (gaps <= bound * (1 + 1e-9) + 1e-14).all()
        own = own_models(iterates(fed, algorithm, 1)[1])
        assert gaps[0] <= theory.one_shot_bound(mixture, mixture.spread(own))
        assert theory.one_shot_bound(mixture, mixture.spread(own)) <= theory.one_shot_diameter_bound(
            mixture, theory.diameter(own)
        )
        for eps in (1e-3, 1e-6):
            needed = int((gaps <= eps).nonzero()[0])
            assert theory.dgd_rounds(mixture, float(gaps[0]), eps) >= needed
            closed = theory.rounds_for_alpha(
                alpha, eps, float(mixture.smoothness.mean()), 0.1, mixture.spread(own)
            )
            assert closed >= needed


@pytest.mark.parametrize("solver, sent", [("dgd", "identity"), ("dcgd", "rand-3"), ("diana", "rand-3")])
def test_on_quadratics_the_iterates_do_not_depend_on_alpha(solver, sent):
    fed = least_squares()
    found = [
        iterates(fed, FLIX.from_theory(fed, alpha=alpha, solver=solver, compressor=sent), 60)[0]
        for alpha in ALPHAS
    ]
    for other in found[1:]:
        assert (other - found[0]).abs().max() <= 1e-10


def test_diana_converges_where_dcgd_stalls_below_its_floor():
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
    floor = theory.dcgd_floor(probe.mixture(fed), compressor("rand-3").omega(fed.d), at_best)
    assert 1e-6 < errors["dcgd"][-200:].mean() <= floor


def test_diana_obeys_its_bound_in_the_mean():
    fed = logistic()
    algorithm = FLIX.from_theory(fed, alpha=0.7, solver="diana", compressor="rand-2", local_tol=1e-11)
    mixture, omega = algorithm.mixture(fed), compressor("rand-2").omega(fed.d)
    best = iterates(fed, FLIX.from_theory(fed, alpha=0.7, local_tol=1e-11), 200)[0][-1]
    runs = [(iterates(fed.fresh(seed), algorithm, 150)[0] - best).square().sum(-1) for seed in range(4)]
    mean = torch.stack(runs).mean(0)
    curvature, beta = float(mixture.curvatures.max()), theory.diana_beta(omega)
    scale = 1 + 4 * algorithm.lr**2 * omega / (fed.n * beta) * curvature**2
    bound = scale * mean[0] * theory.diana_rate(mixture, omega) ** torch.arange(151).double()
    assert (mean <= bound).all()
    gap = 0.5 * mixture.L * float(mean[0])
    for eps in (1e-4, 1e-8):
        needed = (
            int((0.5 * mixture.L * mean <= eps).nonzero()[0])
            if (0.5 * mixture.L * mean <= eps).any()
            else 151
        )
        assert theory.diana_rounds(mixture, omega, gap, eps) >= needed


def test_one_shot_is_the_weighted_average_in_one_round():
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
def test_auto_chooses_on_validation_rows_and_reports_one_number(loop):
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


SETTINGS = [
    {},
    {"solver": "one-shot"},
    {"start_at": "average"},
    {"alpha": (0.2,) * 6},
    {"solver": "dcgd", "compressor": "qsgd-2"},
    {"solver": "diana", "compressor": "rand-2"},
    {"solver": "diana", "compressor": "natural", "shift": "zero", "start_at": "average"},
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


@pytest.mark.slow
@pytest.mark.parametrize("settings", [*SETTINGS[4:], {"average": True, "local": "sgd"}], ids=str)
def test_other_settings_keep_the_promises_too(settings):
    coterie.check_algorithm(FLIX(**settings))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"alpha": 1.5}, "at most 1"),
        ({"alpha": -0.1}, "at least 0"),
        ({"alpha": float("nan")}, "at most 1"),
        ({"alpha": (0.5, 2.0)}, "client 1"),
        ({"alpha": "much"}, "not a number"),
        ({"compressor": "rand-2"}, "dgd sends whole vectors"),
        ({"solver": "diana", "compressor": "top-2"}, "biased"),
        ({"solver": "adam"}, "set lr"),
        ({"solver": "newton"}, "is not one of"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings, message):
    with pytest.raises(SettingError, match=message):
        FLIX(**settings)


def test_more_coordinates_than_the_model_has_are_refused_at_the_start():
    with pytest.raises(SettingError, match="choose k from 1 to 6"):
        coterie.fit(logistic(), FLIX(solver="diana", compressor="rand-7"), 1)
    with pytest.raises(SettingError, match="2 values of alpha for 8 clients"):
        coterie.fit(logistic(), FLIX(alpha=(0.5, 0.5)), 1)
    with pytest.raises(SettingError, match="validation rows"):
        coterie.fit(logistic(), FLIX(alpha="auto"), 1)


def test_a_divergent_step_size_is_detected_and_named():
    with pytest.raises(SettingError, match=r"lr = 50 diverges.*Theory allows"):
        coterie.fit(least_squares(), FLIX(lr=50.0), 500)
    coterie.fit(least_squares(), FLIX(), 200)


def test_a_local_problem_without_a_minimiser_is_named_and_sgd_is_the_way_out():
    fed = logistic(rows=3, l2=0.0)
    with pytest.raises(SettingError, match=r"no minimiser.*local='sgd'"):
        coterie.fit(fed, FLIX(), 1)
    run = coterie.fit(fed, FLIX(local="sgd", local_steps=200, batch=0, local_lr=1.0), 5)
    assert torch.isfinite(run.personal).all()


def libsvm_federation(name: str, n: int = 50, l2: float = 0.1) -> Federation:
    try:
        path = shared_data(f"libsvm/{name}.bz2")
    except DataError:
        pytest.skip("needs ../shared/data/libsvm")
    return Federation.from_clients(equal_shares(coterie.data.libsvm(path), n), models.logistic(l2=l2))


def rounds_to(errors: Tensor, share: float) -> int:
    return int((errors <= share * errors[0]).nonzero()[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, reference",
    [
        ("a6a", {"identity": 17812, "rand-7": 3349, "natural": 5200, "qsgd-4": 3323}),
        ("mushrooms", {"identity": 33376, "rand-7": 6727, "natural": 9688, "qsgd-4": 6292}),
    ],
)
def test_uplink_floats_to_a_relative_error_of_1e_8(name, reference):
    """The reference starts at x0 ~ N(0, I), which excites the directions in which only l2 curves."""
    fed = libsvm_federation(name)
    x0 = randomness.normal(randomness.slots(randomness.key(0, "start"), fed.d))
    best = iterates(fed, FLIX.from_theory(fed, local_tol=1e-12), 500)[0][-1]
    used = {}
    for sent, floats in reference.items():
        solver = "dgd" if sent == "identity" else "diana"
        algorithm = FLIX.from_theory(fed, solver=solver, compressor=sent, local_tol=1e-12)
        rounds = int(1.2 * floats / compressor(sent).floats(fed.d))
        xs, ran = iterates(fed, algorithm, rounds, x0)
        k = rounds_to((xs - best).square().sum(-1), 1e-8)
        once = fed.d if solver == "diana" else 0
        used[sent] = once + k * compressor(sent).floats(fed.d)
        per_client = ran.ledger.total("floats_up") / fed.n
        assert per_client == once + rounds * compressor(sent).floats(fed.d)
        assert abs(used[sent] / floats - 1) <= 0.1, (sent, used[sent], floats)
    assert used["identity"] >= 4 * used["rand-7"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a6a", "mushrooms"])
def test_on_real_data_the_rate_of_diana_is_the_same_for_every_alpha_and_dcgd_stalls(name):
    fed = libsvm_federation(name)
    kept, omega = "rand-20", compressor("rand-20").omega(fed.d)
    x0 = randomness.normal(randomness.slots(randomness.key(0, "start"), fed.d))
    factors, floors, losses = [], [], []
    for alpha in ALPHAS:
        exact = FLIX.from_theory(fed, alpha=alpha, local_tol=1e-12)
        best, ran = iterates(fed, exact, 600)
        best = best[-1]
        slopes = ran.map(exact.slope, x=best).values
        diana = FLIX.from_theory(fed, alpha=alpha, solver="diana", compressor=kept, local_tol=1e-12)
        xs, _ = iterates(fed, diana, 900, x0)
        errors = (xs - best).square().sum(-1)
        first, last = rounds_to(errors, 1e-3), rounds_to(errors, 1e-12)
        factors.append(float(errors[last] / errors[first]) ** (1 / (last - first)))
        mixture = exact.mixture(fed)
        assert factors[-1] <= theory.diana_rate(mixture, omega)
        assert errors[-1] <= 1e-12 * errors[0]
        dcgd = FLIX.from_theory(fed, alpha=alpha, solver="dcgd", compressor=kept, local_tol=1e-12)
        stalled = (iterates(fed, dcgd, 600, x0)[0] - best).square().sum(-1)[-200:].mean()
        floors.append(float(stalled))
        assert 1e-8 < stalled <= theory.dcgd_floor(mixture, omega, slopes)
        losses.append(0.5 * mixture.mu * float(stalled) / alpha**2)
    assert max(factors) - min(factors) <= 2e-3 and max(factors) / min(factors) <= 1.01
    allowed = (
        1.1 if name == "a6a" else 2.0
    )  # the rows of mushrooms are sorted, so its clients differ much more
    assert max(floors) <= allowed * min(floors) and max(losses) <= allowed * min(losses)


@pytest.mark.slow
def test_on_sines_the_stopping_rule_decides_and_with_the_tight_one_an_interior_alpha_wins():
    from types import SimpleNamespace

    from coterie.runs.flix_sine import sine

    settings = {"sizes": (50, 150), "alphas": (0.3,), "steps": 200}
    found = sine(SimpleNamespace(plans=[SimpleNamespace(settings=settings)]), 0)
    assert found["loose_best_alpha"] == 0.0
    assert found["tight_inside_over_local"] < 1 and found["tight_inside_over_shared"] < 1

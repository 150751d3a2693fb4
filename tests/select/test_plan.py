"""Plans: never too few rounds, certificates that hold and are tight, budgets that are kept to the byte."""

import statistics

import pytest
import torch

import coterie
from coterie import Federation, models
from coterie._core.errors import SettingError
from coterie.report.budget import plan_plot
from coterie.select.plan import cost, measure, mixed_losses, plan, rounds_within, survey
from coterie.theory import flix as theory
from coterie.theory import flix_rounds, flix_steps
from coterie.theory.flix import Mixture


def random_federation(seed: int) -> Federation:
    """A convex federation of random size, spread, curvature and kind."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: float, high: float) -> float:
        return low * (high / low) ** float(torch.rand((), generator=draw))

    n, d = int(number(2, 15)), int(number(1, 12))
    scales = torch.exp(0.7 * torch.randn(d, generator=draw, dtype=torch.float64))
    centre, spread = torch.randn(d, generator=draw, dtype=torch.float64), number(0.1, 3.0)
    xs, ys, binary = [], [], seed % 2 == 0
    for _ in range(n):
        rows = int(number(4, 60))
        x = torch.randn(rows, d, generator=draw, dtype=torch.float64) * scales
        w = centre + spread * torch.randn(d, generator=draw, dtype=torch.float64)
        z = x @ w + 0.3 * torch.randn(rows, generator=draw, dtype=torch.float64)
        xs.append(x)
        ys.append((z > 0).double() if binary else z)
    make = models.logistic if binary else models.linear
    return Federation.from_arrays(xs, ys, make(l2=number(0.03, 1.0)))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(100), marks=pytest.mark.slow)], ids=len)
def test_over_random_federations_the_plan_is_never_short_and_the_certificate_is_tight(seeds):
    ratios = []
    for seed in seeds:
        fed = random_federation(seed)
        facts = survey(fed, local_tol=1e-10)
        alpha = (0.2, 0.5, 1.0)[seed % 3]
        mixture = Mixture.equal(alpha, facts.smoothness, facts.convexity)
        gap = facts.certificates[alpha]
        target = gap * (0.1, 0.01, 1e-3)[seed % 3]
        promised = flix_rounds.dgd_rounds(mixture, gap, target)
        algorithm = coterie.algorithms.FLIX(
            alpha=alpha, lr=flix_steps.dgd_step(mixture), start_at="average", local_tol=1e-10
        )
        curve = torch.tensor(mixed_losses(fed, algorithm, promised + 1), dtype=torch.float64)
        trial = fed.fresh()
        trial.enter_round(0, None)
        trial.map(algorithm.begin)
        own = trial.runtime.store.columns["own"].rows
        lower = minimum(fed, own, alpha, facts.average)
        assert curve[0] - lower <= gap + 1e-12, f"the certificate fails for seed {seed}"
        assert curve[promised] - lower <= target + 1e-12, f"too few rounds for seed {seed}"
        assert gap <= theory.one_shot_bound(mixture, facts.spread) + 1e-12
        closed = flix_rounds.rounds_for_alpha(
            alpha, target, float(facts.smoothness.mean()), float(facts.convexity.mean()), facts.spread
        )
        assert closed >= promised
        ratios.append(theory.one_shot_diameter_bound(mixture, theory.diameter(own)) / gap)
    assert statistics.median(ratios) >= 5


def minimum(fed: Federation, own: torch.Tensor, alpha: float, x: torch.Tensor) -> float:
    """min f~ by Newton's method, written out again."""
    binary, l2 = fed.model.task == "binary", fed.model.l2
    for _ in range(30):
        value, slope, bend = 0.0, torch.zeros_like(x), torch.zeros(fed.d, fed.d, dtype=torch.float64)
        for k in range(fed.n):
            rows, y = fed.runtime.train.of(k)
            w = alpha * x + (1 - alpha) * own[k]
            z = rows @ w
            p = torch.sigmoid(z) if binary else z
            losses = torch.nn.functional.softplus(z) - y * z if binary else 0.5 * (z - y) ** 2
            curve = p * (1 - p) if binary else torch.ones_like(z)
            value += float(losses.mean() + 0.5 * l2 * w @ w) / fed.n
            slope += alpha * (rows.T @ (p - y) / len(y) + l2 * w) / fed.n
            ridge = l2 * torch.eye(fed.d, dtype=torch.float64)
            bend += alpha**2 * (rows.T @ (rows * curve.unsqueeze(-1)) / len(y) + ridge) / fed.n
        x = x - torch.linalg.solve(bend, slope)
    return value


def test_the_plan_keeps_its_budget_and_reaches_its_target():
    fed = random_federation(4)
    whole = plan(fed, 1e-4)
    assert whole.alpha == 1.0 and whole.rounds >= 1
    chosen = plan(fed, 1e-4, rounds=4)
    assert chosen.rounds <= 4 and chosen.alpha < 1
    assert [one.alpha for one in chosen.options] == sorted(one.alpha for one in chosen.options)
    assert chosen.closed_form_alpha is not None and chosen.closed_form_alpha <= chosen.alpha + 0.05
    facts = survey(fed)
    for one in chosen.options[1:]:
        assert one.certificate == pytest.approx(facts.certificates[one.alpha]) and one.certificate < one.bound
    budget = 0.5 * whole.megabytes
    cheap = plan(fed, 1e-4, megabytes=budget)
    run = coterie.fit(fed, cheap.algorithm, cheap.rounds)
    spent = run.fed.ledger.total("bytes_up") + run.fed.ledger.total("bytes_down")
    assert spent == round(1e6 * cheap.megabytes) and spent <= 1e6 * budget
    bound, gaps = measure(fed, chosen, 4)
    assert all(b >= g for b, g in zip(bound, gaps, strict=True))


def test_diana_plans_count_what_it_sends():
    fed = random_federation(12)
    chosen = plan(fed, 1e-3, solver="diana", encoding="rand-1")
    run = coterie.fit(fed, chosen.algorithm, 6)
    spent = run.fed.ledger.total("bytes_up") + run.fed.ledger.total("bytes_down")
    assert spent == cost(chosen.algorithm, fed, 6)
    assert (
        rounds_within(chosen.algorithm, fed, spent) == 6
        and rounds_within(chosen.algorithm, fed, spent - 1) == 5
    )


@pytest.mark.parametrize("solver, encoding", [("dgd", "identity"), ("diana", "rand-1")])
def test_the_curve_is_that_of_the_solver_asked_for_and_stays_below_its_bound(solver, encoding):
    fed = random_federation(12)
    chosen = plan(fed, 1e-3, solver=solver, encoding=encoding)
    assert chosen.rounds > 1 and (chosen.algorithm.solver, chosen.algorithm.compressor) == (solver, encoding)
    bound, gaps = measure(fed, chosen, chosen.rounds)
    assert bound[0] == chosen.certificate and all(b >= g for b, g in zip(bound, gaps, strict=True))
    assert gaps[-1] <= chosen.target and bound[-1] <= chosen.target < bound[-2]
    losses = mixed_losses(fed, chosen.algorithm, 3)
    fallen = [losses[0] - loss for loss in losses]
    assert [gaps[0] - gap for gap in gaps[:3]] == pytest.approx(fallen, abs=1e-12)
    drawn = plan_plot(chosen, bound, gaps)
    assert solver in drawn.layout.title.text and encoding.removeprefix("identity") in drawn.layout.title.text


def test_what_one_round_makes_certain_needs_no_more():
    fed = random_federation(12)
    for solver, encoding in (("dgd", "identity"), ("diana", "rand-1")):
        chosen = plan(fed, 1e-3, rounds=1, solver=solver, encoding=encoding)
        larger = [one for one in chosen.options if one.alpha > chosen.alpha]
        assert chosen.rounds == 1 and 0 < chosen.certificate <= 1e-3
        assert all(one.certificate > 1e-3 for one in larger)


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"target": 0.0}, "must be positive"),
        ({"target": 1e-3, "rounds": 0}, "too small for one round"),
        ({"target": 1e-3, "megabytes": 1e-6}, "too small"),
        ({"target": 1e-3, "solver": "dcgd"}, "no rate"),
        ({"target": 1e-3, "solver": "diana", "encoding": "top-1"}, "biased"),
        ({"target": 1e-3, "solver": "diana", "encoding": "rand-99"}, "choose k from"),
    ],
)
def test_plans_that_cannot_be_are_refused(asked, message):
    with pytest.raises(SettingError, match=message):
        plan(random_federation(4), **asked)


def test_without_strong_convexity_there_is_a_certificate_but_no_number_of_rounds():
    fed = random_federation(1)
    xs, ys = zip(*(fed.runtime.train.of(k) for k in range(fed.n)), strict=True)
    flat = Federation.from_arrays([x[:1] for x in xs], [y[:1] for y in ys], models.linear())
    with pytest.raises(SettingError, match="strongly convex"):
        plan(flat, 1e-9)
    assert survey(flat).certificates[1.0] >= 0

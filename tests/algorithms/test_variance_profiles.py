"""Profile intervals of variances that the rows say little about: brute force, and searches of their own."""

import math

import numpy as np
import polars as pl
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit, logsumexp

from coterie import Federation, fit, models
from coterie.algorithms import make
from coterie.algorithms.crossed_cells import layout
from coterie.algorithms.crossed_modes import ModeSearch
from coterie.train.effects import trained_clients

APART = 2.705543  # of the deviance at the ends of a 90 % interval


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def crossed(kind, seed, lecturers=6, spread=0.0):
    """Students whose intercepts have variance 1, and lecturers between whom hardly anything differs."""
    rng = np.random.default_rng(seed)
    student, lecturer = np.repeat(np.arange(16), 8), rng.integers(0, lecturers, 128)
    score = rng.normal(size=16)[student] + spread * rng.normal(size=lecturers)[lecturer]
    y = score + rng.normal(size=128)
    if kind == "logistic":
        y = np.where(rng.uniform(size=128) < expit(score), "yes", "no")
    frame = pl.DataFrame({"student": [f"s{k:02d}" for k in student], "lecturer": [f"l{k}" for k in lecturer]})
    fed = Federation.from_table(
        frame.with_columns(y=pl.Series(y)),
        "student",
        "y",
        cluster=["lecturer"],
        model=getattr(models, kind)(intercept=True),
        split=(1.0, 0.0, 0.0),
        task="regression" if kind == "linear" else "classification",
    )
    return fit(fed, make("hierarchical", effects="intercept"), rounds=1, evaluate_every=0)


def row(run, name):
    return next(one for one in run.variances(0.9).to_dicts() if one["variance"] == name)


def test_a_crossed_variance_of_zero_has_an_upper_end():
    """Least squares: the deviance there is that of the level, with all other variances at their best."""
    run = crossed("linear", 2)
    found = row(run, "lecturer")
    assert found["estimate"] == 0 and found["lower"] == 0 and 0 < found["upper"] < 2
    model, point, best = run.algorithm.crossed_likelihood(*trained_clients(run)[1:], run.state)
    scale = run.fed.table.target_scale**2 * model.scale
    end = math.log(found["upper"] / float(scale[2]))
    start = point.clamp(min=-6.0)
    assert model.fit(start, {2: end})[1] - best == pytest.approx(APART, abs=0.02)
    students = row(run, "clients")
    for side in ("lower", "upper"):
        end = math.log(students[side] / float(scale[1]))
        assert model.fit(start, {1: end})[1] - best == pytest.approx(APART, abs=0.02)


@pytest.mark.quick("0.0")
@pytest.mark.parametrize("spread", [0.0, 0.4])
def test_a_crossed_variance_of_classes_has_the_ends_of_its_profile(spread):
    """By Laplace's approximation, with a search of scipy's for the students' variance."""
    run = crossed("logistic", 5, spread=spread)
    before = run.personal.clone()
    found = row(run, "lecturer")
    assert 0 <= found["lower"] <= found["estimate"] < found["upper"] < 3
    method, fed = trained_clients(run)
    search = ModeSearch(method, fed, run.state, layout(fed), run.state.client_groups)
    here, scale = search.start(run.state.variances), float(search.first.scale[2])
    best = search.deviance(here)
    for end in [found["upper"], *([found["lower"]] if found["lower"] > 1e-6 else [])]:
        other = torch.tensor(math.log(end / scale), dtype=torch.float64)
        least = minimize_scalar(
            lambda at, other=other: search.deviance(torch.stack([torch.tensor(at).double(), other])),
            bounds=(-3.0, 3.0),
            method="bounded",
        )
        assert least.fun - best == pytest.approx(APART, abs=0.03)
    assert torch.equal(before, run.personal)


@pytest.mark.parametrize(("seed", "spread"), [(0, 0.0), (1, 1.0)])
def test_classes_have_the_profile_of_brute_force_integration(seed, spread):
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(6, 1)) for _ in range(14)]
    ys = [(rng.uniform(size=6) < expit(x[:, 0] + spread * rng.normal())).astype(int) for x in xs]
    fed = Federation.from_arrays(xs, ys, models.logistic(intercept=True))
    method = make("hierarchical", grouping="one", effects="intercept", choose="ml")
    run = fit(fed, method, rounds=60, evaluate_every=0)
    found, before = row(run, "client 0"), run.personal.clone()
    nodes, weights = np.polynomial.hermite_e.hermegauss(61)
    x, sign = np.stack(xs)[..., 0], 2 * np.stack(ys) - 1

    def deviance(w, size):
        z = w[0] * x[:, None] + w[1] + math.sqrt(size) * nodes[:, None]
        mass = weights / weights.sum()
        return -2 * logsumexp(-np.logaddexp(0, -sign[:, None] * z).sum(-1), b=mass, axis=1).sum()

    def profile(size):
        return minimize(deviance, run.state.x.numpy(), args=(size,), tol=1e-10).fun

    best = profile(found["estimate"])
    assert found["upper"] < 10
    assert profile(found["upper"]) - best == pytest.approx(APART, abs=0.03)
    if spread == 0:
        assert found["lower"] == 0, "no differences are possible"
    elif found["lower"] > 0:
        assert profile(found["lower"]) - best == pytest.approx(APART, abs=0.03)
    assert torch.equal(before, run.personal)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"effects": "intercept"}, {"sd noise", "sd clients", "sd clusters"}),
        ({"effects": "intercept", "variances": "cluster"}, {"sd noise"}),
        ({"effects": "intercept", "noise": "client"}, {"sd clients", "sd clusters"}),
        ({"grouping": "mixture", "effects": "intercept"}, {"sd noise", "sd clients"}),
        (
            {"grouping": "one", "effects": "intercept", "slopes": "0", "covariance": "full"},
            {"sd noise", "sd clients: x0", "sd clients: intercept"},
        ),
        ({"choose": "given"}, set()),
    ],
)
def test_what_is_recorded_of_standard_deviations(settings, names):
    rng = np.random.default_rng(3)
    xs = [rng.normal(size=(12, 2)) for _ in range(12)]
    ys = [x[:, 0] * (1 + 0.5 * rng.normal()) + 4 * (k % 3) + rng.normal() for k, x in enumerate(xs)]
    ys = [y + rng.normal(size=12) for y in ys]
    fed = Federation.from_arrays(xs, ys, models.linear(intercept=True), clusters=[k % 3 for k in range(12)])
    run = fit(fed, make("hierarchical", **settings), rounds=1, evaluate_every=0)
    found = run.algorithm.observe(run.fed, run.state)
    assert {name for name in found if name.startswith("sd ")} == names
    assert all(float(found[name]) > 0 for name in names)

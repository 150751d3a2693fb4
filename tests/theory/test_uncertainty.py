"""Intervals and tests of hierarchical models: dense normal posteriors, coverage, and p-values under the null."""

import numpy as np
import polars as pl
import pytest
import torch

from coterie import Federation, fit, models
from coterie._core.errors import SettingError
from coterie.algorithms import make
from coterie.theory.hierarchical import certainty, lift
from coterie.theory.mixed_likelihood import Likelihood
from coterie.theory.uncertainty import boundary_chance, client_effects, difference_tests, profile_interval
from coterie.theory.variance_components import Sums, pattern


def level(seed, clients=25, rows=5, spread=1.0):
    rng = np.random.default_rng(seed)
    truth = 2 + spread * rng.normal(size=clients)
    return truth, [np.ones((rows, 1))] * clients, [t + rng.normal(size=rows) for t in truth]


def sums_of(xs, ys, clusters=None):
    label = torch.zeros(len(xs), dtype=torch.long) if clusters is None else torch.tensor(clusters)
    return Sums.of([torch.from_numpy(x) for x in xs], [torch.from_numpy(y) for y in ys], label)


def test_effects_have_the_variances_of_the_joint_posterior():
    """Variances known: against the inverse of the precision of all models and the common centre at once."""
    rng = np.random.default_rng(0)
    n, d = 4, 2
    xs = [torch.from_numpy(rng.normal(size=(m, d))) for m in (2, 5, 9, 1)]
    a = torch.stack([x.T @ x for x in xs])
    b = torch.from_numpy(rng.normal(size=(n, d)))
    spread = torch.tensor([[0.5, 1.5]], dtype=torch.float64)
    precision = torch.zeros(n + 1, d, n + 1, d, dtype=torch.float64)
    tie = torch.diag(1 / spread[0])
    for i in range(n):
        precision[i, :, i] += a[i] + tie
        precision[n, :, n] += tie
        precision[i, :, n] -= tie
        precision[n, :, i] -= tie
    whole = precision.reshape((n + 1) * d, -1)
    mean = torch.linalg.solve(whole, torch.cat([b, torch.zeros(1, d).double()]).flatten()).view(n + 1, d)
    error = torch.linalg.inv(whole).diagonal().sqrt().view(n + 1, d)
    h, _ = lift(a, b, spread.expand(n, d))
    sure = certainty(h, torch.zeros(n, dtype=torch.long), torch.zeros(1, d).double())
    found = client_effects(
        a,
        b,
        mean[n].expand(n, d),
        spread.expand(n, d),
        sure.expand(n, d, d),
        torch.zeros(0, 0),
        torch.tensor([0, 1]),
    )
    assert (found.estimate - mean[:n]).abs().max() < 1e-10
    assert (found.error - error[:n]).abs().max() < 1e-10


def test_profile_ends_have_the_right_deviance():
    _, xs, ys = level(1)
    model = Likelihood(sums_of(xs, ys), pattern("same", 1))
    point, best = model.fit(model.start())
    for end in profile_interval(model, point, best, 1, 0.9):
        assert abs(model.fit(point, {1: end})[1] - best - 2.705543) < 0.02


@pytest.mark.slow
def test_tests_know_whether_clients_differ():
    """Under the null p-values are 1 half of the time and below 0.1 a tenth of the time; else tiny."""
    small = []
    for seed in range(24):
        _, xs, ys = level(seed, clients=15, rows=4, spread=0.0)
        model = Likelihood(sums_of(xs, ys), pattern("same", 1))
        small.append(difference_tests(model, *model.fit(model.start()))["clients differ"])
    assert np.mean(np.array(small) < 0.1) < 0.1 + 3 * np.sqrt(0.09 / 24)
    assert 0.3 < np.mean(np.array(small) > 0.45) < 0.85
    _, xs, ys = level(0)
    model = Likelihood(sums_of(xs, ys, clusters=[k % 5 for k in range(25)]), pattern("same", 1))
    found = difference_tests(model, *model.fit(model.start()))
    assert found["clients differ"] < 1e-3 and found["clusters differ"] > 0.05
    assert boundary_chance(3.0, 2) > boundary_chance(3.0, 1)


@pytest.mark.parametrize("kind", ["linear", "logistic"])
def test_tables_of_a_run(kind):
    _, xs, ys = level(2, rows=8, spread=1.5)
    targets = ys if kind == "linear" else [(y > 2).astype(int) for y in ys]
    fed = Federation.from_arrays([0 * x for x in xs], targets, getattr(models, kind)(l2=1e-6, intercept=True))
    run = fit(fed, make("hierarchical", grouping="one", effects="intercept"), rounds=30)
    before = run.personal.clone()
    table, sizes = run.effects(), run.variances()
    own = table.filter(table["coefficient"] == "(intercept)")
    assert np.abs(own["estimate"].to_numpy() - run.personal[:, 1].numpy()).max() < 1e-3
    assert (own["lower"] < own["estimate"]).all() and own["shrinkage"].is_between(0, 1).all()
    assert (sizes["lower"] < sizes["estimate"]).all() and (sizes["estimate"] < sizes["upper"]).all()
    assert run.tests()["clients differ"] < 0.01
    assert torch.equal(before, run.fed.personal(run.algorithm, run.state)) or kind == "logistic"
    with pytest.raises(SettingError, match="hierarchical"):
        fit(fed, "fedavg", rounds=1).effects()


def test_a_table_has_its_variances_and_effects_in_units_of_the_target():
    """A target in units of 1/1000 has variances and intervals that are 1000 or a million times as large."""
    rng = np.random.default_rng(4)
    site = np.repeat(np.arange(15), 12)
    frame = pl.DataFrame({"site": [f"s{k:02d}" for k in site], "x": rng.normal(size=len(site))})
    frame = frame.with_columns(
        y=7 + rng.normal(size=15)[site] + 0.5 * frame["x"] + rng.normal(size=len(site))
    )
    sizes, effects = [], []
    for unit in (1.0, 1000.0):
        fed = Federation.from_table(frame.with_columns(pl.col("y") * unit), client="site", target="y")
        run = fit(fed, make("hierarchical", grouping="one", effects="intercept", choose="reml"), rounds=1)
        sizes.append(run.variances().select("estimate", "lower", "upper").to_numpy())
        effects.append(run.effects().select("estimate", "lower", "upper", "centre").to_numpy())
    assert np.abs(sizes[1] / sizes[0] / 1e6 - 1).max() < 0.01
    assert np.abs(effects[1] / effects[0] / 1e3 - 1).max() < 0.01
    assert (sizes[0][:, 1] < 1).all() and (sizes[0][:, 2] > 1).all(), "both variances are 1"
    assert run.variances()["coefficients"].to_list() == ["", "(intercept)"]
    recorded = run.algorithm.observe(run.fed, run.state)
    for name, size in zip(("sd noise", "sd clients"), sizes[1][:, 0], strict=True):
        assert float(recorded[name]) ** 2 == pytest.approx(size, rel=1e-3)
    intercepts = run.effects().filter(pl.col("coefficient") == "(intercept)")["estimate"]
    assert intercepts.mean() == pytest.approx(float(frame["y"].mean()) * 1000, rel=0.1)


@pytest.mark.slow
def test_coverage():
    """Ninety-percent intervals over 100 federations: 2500 effects within 87 to 93 %, variances as near as chance."""
    effects, variances = [], []
    for seed in range(100):
        truth, xs, ys = level(1000 + seed)
        fed = Federation.from_arrays(xs, ys, models.linear())
        run = fit(fed, make("hierarchical", grouping="one", effects="same"), rounds=1, evaluate_every=0)
        table, sizes = run.effects(0.9), run.variances(0.9)
        effects += ((table["lower"].to_numpy() <= truth) & (truth <= table["upper"].to_numpy())).tolist()
        variances += [low <= 1.0 <= high for low, high in zip(sizes["lower"], sizes["upper"], strict=True)]
    assert 0.87 < np.mean(effects) < 0.93
    assert 0.84 < np.mean(variances) < 0.95

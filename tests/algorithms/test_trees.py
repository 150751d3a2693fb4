"""Boosted trees as a method: equal to LightGBM on pooled rows and on every runtime, personal where it pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import coterie
from coterie import Federation, fit, models
from coterie._core.errors import SettingError
from coterie.algorithms import make
from coterie.deploy.loopback import LoopbackRuntime

ROWS = (60, 25, 80, 10, 45, 70)


def a_federation(seed=0, effect=2.0, classes=0, missing=0.0, split=(1.0, 0.0, 0.0), model=None, **options):
    """Return clients with an intercept of their own in a function with an interaction."""
    draw = torch.Generator().manual_seed(seed)
    total, owner = sum(ROWS), torch.repeat_interleave(torch.arange(len(ROWS)), torch.tensor(ROWS))
    x = torch.rand(total, 4, generator=draw, dtype=torch.float64)
    own = effect * torch.randn(len(ROWS), generator=draw, dtype=torch.float64)[owner]
    y = (
        3 * torch.sin(3 * x[:, 0] * x[:, 1])
        + own
        + 0.3 * torch.randn(total, generator=draw, dtype=torch.float64)
    )
    x[torch.rand(total, 4, generator=draw) < missing] = float("nan")
    if classes:
        y = torch.bucketize(y, y.quantile(torch.arange(1, classes).double() / classes))
    xs, ys = x.split(list(ROWS)), y.split(list(ROWS))
    return Federation.from_arrays(xs, ys, model or models.trees(12, 8), split=split, seed=seed, **options)


@pytest.mark.parametrize(
    ("classes", "objective"), [(0, "regression"), (2, "binary"), (3, "multiclass"), (0, "poisson")]
)
def test_shared_trees_are_those_of_lightgbm_on_pooled_rows(classes, objective):
    lgb = pytest.importorskip("lightgbm")
    draw = np.random.default_rng(1)
    x = draw.integers(0, 12, size=(900, 4)).astype(float)
    x[draw.uniform(size=x.shape) < 0.05] = np.nan
    score = np.sin(np.nan_to_num(x[:, 0]) * np.nan_to_num(x[:, 1]) / 20) + 0.1 * np.nan_to_num(x[:, 2])
    y = (
        draw.poisson(np.exp(0.5 * score)).astype(float)
        if objective == "poisson"
        else score + draw.normal(size=900)
    )
    if classes:
        y = np.digitize(y, np.quantile(y, np.arange(1, classes) / classes))
    kind = models.trees(5, 8, objective)
    fed = Federation.from_arrays(np.split(x, [200, 230]), np.split(y, [200, 230]), kind)
    run = fit(fed, make("trees", lambda_="shared", leaves=8, depth=3, least=5.0), rounds=5)
    settings = {"objective": objective, "num_leaves": 8, "max_depth": 3, "lambda_l2": 1.0, "verbose": -1}
    settings |= {
        "min_sum_hessian_in_leaf": 5.0,
        "min_data_in_leaf": 1,
        "min_data_in_bin": 1,
        "num_threads": 1,
    }
    settings |= {"num_class": classes} if classes > 2 else {}
    settings |= {"poisson_max_delta_step": 1e-12} if objective == "poisson" else {}
    booster = lgb.train(settings, lgb.Dataset(x, y, params={"verbose": -1}), 5)
    expected, found = booster.predict(x), run.model("0")(torch.from_numpy(x)).numpy()
    assert np.abs((found[:, 1] if classes == 2 else found) - expected).max() < 1e-5


@pytest.mark.parametrize("profile", [False, True])
def test_four_nodes_grow_the_local_trees(profile):
    method = make("trees", leaves=8, profile=profile)
    local = fit(a_federation(missing=0.1), method, rounds=6)
    apart = a_federation(missing=0.1)
    apart.runtime = LoopbackRuntime.of(apart, 4)
    run = fit(apart, method, rounds=6)
    assert torch.equal(run.personal, local.personal)
    assert run.fed.ledger.entries == local.fed.ledger.entries


def test_no_value_of_a_feature_leaves_a_client(monkeypatch):
    """Look at all that clients send: counts are whole numbers, and no answer holds a value of a row."""
    answers, real = [], Federation._call

    def overheard(self, algorithm, phase, *arguments, **more):
        replies = real(self, algorithm, phase, *arguments, **more)
        answers.append((phase, replies))
        return replies

    monkeypatch.setattr(Federation, "_call", overheard)
    fed = a_federation()
    fit(fed, make("trees", leaves=8), rounds=3)
    values = fed.runtime.rows("train").x.flatten()
    surveys = [replies.values for phase, replies in answers if phase == "survey"]
    assert 1 <= len(surveys) <= 6 and {phase for phase, _ in answers} == {
        "tally",
        "survey",
        "begin",
        "histogram",
        "plant",
    }
    assert all(torch.equal(counts, counts.round()) for counts in surveys)
    assert torch.equal(surveys[0].sum(-1), torch.tensor(ROWS).double().unsqueeze(-1).expand(-1, 4))
    for _, replies in answers:
        for sent in replies.named.values():
            assert not torch.isin(sent.flatten().double(), values).any()


@pytest.mark.slow
def test_leaves_are_personal_where_clients_differ_and_shared_where_they_do_not():
    method = make("trees", leaves=8)
    same = fit(a_federation(effect=0.0), method, rounds=12)
    other = fit(a_federation(effect=3.0), method, rounds=12)
    assert float(other.state.pulls[-1, 0]) < float(same.state.pulls[-1, 0])
    held = {}
    for pull in ("auto", "shared"):
        fed = a_federation(effect=3.0, split=(0.6, 0.2, 0.2), model=models.trees(60, 8))
        held[pull] = fit(fed, method.replace(lambda_=pull), rounds=60).pooled("test", "rmse")
    assert held["auto"] < 0.5 * held["shared"]


def test_without_a_pull_leaves_are_those_of_the_client_alone():
    fed = a_federation(model=models.trees(1, 4))
    run = fit(fed, make("trees", leaves=4, lambda_=0.0, lr=1.0), rounds=1)
    model, rows = fed.model, fed.runtime.rows("train")
    for k in range(fed.n):
        x, y = rows.of(k)
        leaf = model.leaf_numbers(run.personal[k], x).squeeze(-1)
        found = model.scores(run.personal[k], x).squeeze(-1)
        for one in leaf.unique().tolist():
            here = leaf == one
            assert torch.allclose(found[here], y[here].mean().expand(int(here.sum())), atol=1e-9)


@pytest.mark.slow
def test_growth_ends_when_validation_loss_no_longer_falls():
    fed = a_federation(split=(0.5, 0.5, 0.0), model=models.trees(200, 16))
    run = fit(fed, make("trees", lr=0.5, least=0.1, patience=5), rounds=200, evaluate_every=1)
    best, planted = run.state.best, run.state.planted
    assert planted == best + 5 < 200
    values = fed.model.parts(run.personal)[2]
    assert not values[:, best:].any() and values[:, best - 1].any()
    losses = [fed.score(fit(fed, run.algorithm, rounds=t).personal, "validation")["loss"] for t in (best,)]
    rows = fed.rows["validation"].double()
    assert float((losses[0] * rows).sum() / rows.sum()) == pytest.approx(run.state.lowest)


def test_monotone_columns_are_monotone_for_every_client():
    fed = a_federation(effect=1.0, model=models.trees(20, 8))
    run = fit(fed, make("trees", leaves=8, least=1.0, lambda_=1.0, monotone="x0-, x2+"), rounds=20)
    grid = torch.rand(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for column, sign in ((0, -1), (2, 1)):
        ladder = grid.repeat(30, 1, 1)
        ladder[..., column] = torch.linspace(-0.1, 1.1, 30, dtype=torch.float64).unsqueeze(-1)
        for k in range(fed.n):
            scores = fed.model.scores(run.personal[k], ladder.flatten(0, 1)).view(30, 50)
            assert (sign * scores.diff(dim=0) >= -1e-12).all()
            shared = fed.model.scores(run.common(), ladder.flatten(0, 1)).view(30, 50)
            assert (sign * shared.diff(dim=0) >= -1e-12).all()


def test_without_the_constraint_they_are_not():
    fed = a_federation(effect=1.0, model=models.trees(20, 8))
    run = fit(fed, make("trees", leaves=8, least=1.0), rounds=20)
    ladder = torch.full((30, 4), 0.5, dtype=torch.float64)
    ladder[:, 0] = torch.linspace(0, 1, 30, dtype=torch.float64)
    assert (fed.model.scores(run.personal[0], ladder).diff(dim=0) > 0).any()


def test_categories_and_missing_values_of_a_table():
    draw = np.random.default_rng(5)
    n = 600
    kind = draw.choice(["a", "b", "c", "d", "e"], n)
    age = draw.uniform(20, 80, n)
    gone = draw.uniform(size=n) < 0.3
    y = 2.0 * np.isin(kind, ["b", "e"]) + 3.0 * gone + 0.1 * draw.normal(size=n)
    table = {
        "site": draw.choice(["s", "t", "u"], n),
        "kind": [None if k == "c" and age[i] < 30 else k for i, k in enumerate(kind)],
        "age": [None if g else a for g, a in zip(gone, age, strict=True)],
        "y": y,
    }
    fed = Federation.from_table(table, "site", "y", model=models.trees(40, 4), task="regression")
    assert fed.table.preprocessor.feature_names == ["age", "kind"] and fed.model.levels == (0, 5)
    run = fit(fed, make("trees", leaves=4, lr=0.3), rounds=40)
    assert run.pooled("test", "rmse") < 0.2
    predicted = run.predict(
        {"site": ["s", "s", "s"], "kind": ["b", "a", "never seen"], "age": [50.0, None, 50.0]}
    )
    assert predicted["prediction"].to_list()[:2] == pytest.approx([2.0, 3.0], abs=0.2)


@pytest.mark.parametrize(("profile", "classes"), [(False, 0), (True, 0), (True, 3)])
def test_a_newcomer_has_the_leaves_it_would_have_had(profile, classes):
    """A client that joins after training goes through the same trees as one that was there."""
    fed = a_federation(split=(0.7, 0.3, 0.0), classes=classes)
    method = make("trees", leaves=8, profile=profile)
    run = fit(fed, method, rounds=12)
    joined = method.adapt(fed, run.state, run.personal, 12)
    assert torch.allclose(joined, run.personal, atol=1e-12)


def test_splits_tell_clients_apart_by_their_residual():
    """Shared trees on rows with the residual as a fifth column, and the client's own models, score alike."""
    draw = torch.Generator().manual_seed(5)
    x = [torch.rand(60, 4, generator=draw, dtype=torch.float64) for _ in range(12)]
    y = [(3.0 if k % 2 else -1.0) * one[:, 0] for k, one in enumerate(x)]
    held = {}
    for profile in (False, True):
        fed = Federation.from_arrays(x, y, models.trees(40, 8), split=(0.6, 0.2, 0.2))
        run = fit(fed, make("trees", leaves=8, lambda_=300.0, profile=profile), rounds=40)
        held[profile] = run.pooled("test", "rmse")
    assert held[True] < 0.5 * held[False]
    rows, model = fed.runtime.rows("train"), fed.model
    wide = replace(model, features=5, levels=None)
    shared, base = run.state.x, float(rows.y.mean())
    assert (model.parts(shared)[1][..., 1] == 4).any() and (model.parts(run.personal)[1][..., 1] < 4).all()
    for k in range(fed.n):
        own, target = rows.of(k)
        residual = (target - base).sum() / (len(target) + 10)
        told = torch.cat([own, residual.expand(len(own), 1)], 1)
        mine = shared.clone()
        model.parts(mine)[2].copy_(model.parts(run.personal[k])[2])
        mine = model.first_trees(mine, run.state.best)
        assert torch.allclose(wide.scores(mine, told), model.scores(run.personal[k], own), atol=1e-12)


def test_several_trees_in_a_round_are_the_trees_of_several_rounds():
    method = make("trees", leaves=4, lambda_="shared")
    once, thrice = (fit(a_federation(), method.replace(per_round=each), rounds=12 // each) for each in (1, 3))
    assert torch.equal(once.personal, thrice.personal)
    assert method.replace(per_round=3).own_model(4).trees == 12


def test_clients_that_miss_trees_still_have_finite_models():
    fed = a_federation(dropout=0.5)
    run = fit(fed, make("trees", leaves=8), rounds=12)
    assert torch.isfinite(run.personal).all()
    values = fed.model.parts(run.personal)[2]
    assert (values != 0).any(-1).any(-1).sum(1).min() < 12


def test_balanced_classes_weigh_the_same():
    draw = torch.Generator().manual_seed(2)
    x = torch.rand(2000, 1, generator=draw, dtype=torch.float64)
    y = (torch.rand(2000, generator=draw) < 0.02 + 0.1 * x[:, 0]).long()
    fed = Federation.from_arrays(x.split(500), y.split(500), models.trees(20, 4))
    plain, even = (fit(fed, make("trees", leaves=4, balance=on), rounds=20) for on in (False, True))
    likely = [float(run.model("0")(x)[:, 1].mean()) for run in (plain, even)]
    assert likely[0] < 0.15 and 0.35 < likely[1] < 0.65


def test_other_methods_go_on_from_the_leaves():
    fed = a_federation(split=(0.6, 0.2, 0.2))
    run = fit(fed, make("trees", leaves=4), rounds=5)
    model, w = fed.model, run.common()
    splits = {split: fed.runtime.rows(split) for split in ("train", "test")}
    parts = [splits["train"].of(k) for k in range(fed.n)]
    leaves = Federation.from_arrays(
        [model.indicators(w, x) for x, _ in parts], [y for _, y in parts], models.linear(l2=1e-3)
    )
    on = fit(leaves, make("ditto", lr=0.05), rounds=20)
    before = torch.stack([(model.scores(w, x).squeeze(-1) - y).square().mean() for x, y in parts]).mean()
    after = torch.stack(
        [(model.indicators(w, x) @ on.personal[k] - y).square().mean() for k, (x, y) in enumerate(parts)]
    ).mean()
    assert float(after) < float(before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lambda_": "much"}, "auto, shared or a number"),
        ({"lambda_": -1.0}, "below 0"),
        ({"monotone": "x9+"}, "not a column"),
    ],
)
def test_settings_that_cannot_be_are_named(settings, message):
    with pytest.raises(SettingError, match=message):
        fit(a_federation(), make("trees", **{"leaves": 8, **settings}), rounds=1)


def test_the_method_asks_for_its_model():
    with pytest.raises(SettingError, match=r"models\.trees"):
        fit(
            coterie.Federation.from_arrays([torch.ones(3, 1)], [torch.ones(3)], models.linear()),
            "trees",
            rounds=1,
        )

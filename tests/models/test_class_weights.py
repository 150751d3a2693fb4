"""Class weights and Tweedie's loss against scikit-learn, and one way to ask for them."""

import numpy as np
import polars as pl
import pytest
import torch
from sklearn.linear_model import LogisticRegression, TweedieRegressor

import coterie
from coterie import Federation, models
from coterie._core.errors import DataError, SettingError
from coterie.models.class_weights import balanced, chosen
from coterie.models.metrics.over_rows import row_scores
from coterie.report.page import write_report

DRAW = np.random.default_rng(7)
X = DRAW.normal(size=(300, 3))
SCORE = X @ [1.0, -0.5, 0.3] - 1.5
LABELS = {2: (SCORE + DRAW.logistic(size=300) > 0).astype(int), 3: np.digitize(SCORE, [-2.0, 0.3])}
AMOUNTS = np.exp(0.4 * SCORE) * DRAW.gamma(2.0, size=300) * (DRAW.uniform(size=300) < 0.6)


def solved(model, y):
    """Return the model fitted to the rows, its rows, targets and minimiser."""
    x, target = torch.from_numpy(X), torch.as_tensor(y)
    model = model.fit_to(x, target)
    rows, weight = model.prepare(x), torch.full((len(y),), 1 / len(y), dtype=torch.float64)
    return model, rows, model.solve(torch.zeros(model.d, dtype=torch.float64), rows, target, weight, 1e-10)


@pytest.mark.parametrize("classes", [2, 3])
def test_weights_are_those_of_scikit_learn(classes):
    y, l2 = LABELS[classes], 0.02
    make = models.logistic if classes == 2 else models.softmax
    model, rows, w = solved(
        make(l2=l2, intercept=True, class_weights=balanced(torch.from_numpy(y), classes)), y
    )
    theirs = LogisticRegression(C=1 / (l2 * len(y)), class_weight="balanced", tol=1e-10, max_iter=5000).fit(
        X, y
    )
    ours = torch.sigmoid(model.scores(w, rows)) if classes == 2 else torch.softmax(model.scores(w, rows), -1)
    expected = theirs.predict_proba(X)[:, 1:] if classes == 2 else theirs.predict_proba(X)
    assert np.abs(ours.numpy() - expected).max() < 1e-6
    plain = solved(make(l2=l2, intercept=True), y)[2]
    assert (plain - w).abs().max() > 0.1


@pytest.mark.parametrize("classes", [2, 3])
def test_derivatives_of_weighted_losses(classes):
    y = torch.from_numpy(LABELS[classes])
    make = models.logistic if classes == 2 else models.softmax
    model, rows, _ = solved(
        make(l2=0.1, intercept=True, class_weights=range(1, classes + 1)), LABELS[classes]
    )
    w = torch.from_numpy(DRAW.normal(size=model.d))
    v = torch.from_numpy(DRAW.normal(size=model.d))
    weight = torch.full((300,), 1 / 300, dtype=torch.float64)
    by_hand = [
        torch.autograd.functional.jacobian(lambda w: model.loss(w, rows, y, weight).sum(), w),
        torch.autograd.functional.hessian(lambda w: model.loss(w, rows, y, weight).sum(), w),
    ]
    assert torch.allclose(model.grad(w, rows, y, weight), by_hand[0], atol=1e-12)
    assert torch.allclose(model.hessian(w, rows, y, weight), by_hand[1], atol=1e-12)
    assert torch.allclose(model.hvp(w, v, rows, y, weight), by_hand[1] @ v, atol=1e-12)
    scores = (model.design(rows) @ w).mT
    loss, _, second = model.row_derivatives(scores, y)
    assert torch.allclose(
        (loss * weight).sum() + 0.05 * model._penalised(w).square().sum(), model.loss(w, rows, y, weight)
    )
    design = model.design(rows)
    whole = torch.einsum("bsd,stb,bte,b->de", design, second, design, weight)
    assert torch.allclose(whole + torch.diag(model._penalty_diagonal(w)), by_hand[1], atol=1e-12)
    assert float(torch.linalg.eigvalsh(by_hand[1])[-1]) <= float(model.smoothness(w, rows, y, weight))
    assert models.from_description(model.describe()) == model


@pytest.mark.parametrize("power", [1.2, 1.5, 1.9])
def test_tweedie_is_that_of_scikit_learn(power):
    l2 = 0.01
    model, rows, w = solved(models.tweedie(l2=l2, intercept=True, power=power), AMOUNTS)
    theirs = TweedieRegressor(power=power, alpha=l2, link="log", solver="newton-cholesky", tol=1e-12).fit(
        X, AMOUNTS
    )
    assert np.abs(w.numpy() - np.r_[theirs.coef_, theirs.intercept_]).max() < 1e-6
    assert np.abs(model.scores(w, rows).squeeze(-1).numpy() - theirs.predict(X)).max() < 1e-6
    y, v = torch.from_numpy(AMOUNTS), torch.from_numpy(DRAW.normal(size=4))
    weight = torch.full((300,), 1 / 300, dtype=torch.float64)
    second = torch.autograd.functional.hessian(lambda w: model.loss(w, rows, y, weight).sum(), v)
    assert torch.allclose(model.hessian(v, rows, y, weight), second, atol=1e-12)
    assert models.from_description(model.describe()) == model


def test_what_has_no_such_loss_says_so():
    with pytest.raises(DataError, match="amounts are 0 or more"):
        models.tweedie().fit_to(torch.zeros(2, 1), torch.tensor([1.0, -1.0]))
    with pytest.raises(SettingError, match="between 1 and 2"):
        models.tweedie(power=2.0)
    with pytest.raises(SettingError, match="takes no class weights"):
        models.linear().with_class_weights([1.0, 2.0])
    with pytest.raises(SettingError, match="takes no class weights"):
        models.mlp((4,)).with_class_weights([1.0, 2.0])
    with pytest.raises(SettingError, match="positive"):
        models.logistic(class_weights=(1.0, 0.0))
    with pytest.raises(SettingError, match="no class 'ye'"):
        chosen({"ye": 2.0}, ["no", "yes"], torch.tensor([0, 1]))
    with pytest.raises(SettingError, match="this one has numbers"):
        chosen("balanced", [], torch.zeros(2))
    with pytest.raises(SettingError, match="give 'balanced'"):
        chosen("even", ["no", "yes"], torch.tensor([0, 1]))


def table(target):
    columns = {f"x{k}": X[:, k] for k in range(3)}
    return pl.DataFrame({**columns, "site": [f"s{k % 5}" for k in range(300)], "y": target})


def said_yes(run):
    """Return how many test rows have a probability above a half."""
    return int((row_scores(run.fed.model, run.personal, run.fed.runtime.rows("test")) > 0).sum())


@pytest.mark.parametrize("method", ["fedavg", "trees"])
def test_a_table_weighs_classes_in_every_model(method):
    frame = table(np.where(LABELS[2], "yes", "no"))
    model = models.trees(trees=10, leaves=4) if method == "trees" else None

    def run(weights):
        fed = Federation.from_table(frame, "site", "y", model=model, class_weights=weights)
        return coterie.fit(fed, method, rounds=10)

    plain, even, given = run(None), run("balanced"), run({"yes": 8.0})
    called = [said_yes(one) for one in (plain, even, given)]
    assert called[0] < called[1] < called[2]
    weights = even.fed.model.class_weights
    counts = np.bincount(even.fed.runtime.rows("train").y.long().numpy())
    assert weights == pytest.approx(tuple(counts.sum() / (2 * counts)))
    assert even.fed.with_model(models.logistic()).model.class_weights == weights


def test_trees_take_balanced_weights_as_their_own_setting_does():
    frame = table(np.where(LABELS[2], "yes", "no"))
    own = models.trees(trees=5, leaves=4)
    weighed = Federation.from_table(frame, "site", "y", model=own, class_weights="balanced")
    plain = Federation.from_table(frame, "site", "y", model=own)
    one = coterie.fit(weighed, "trees", rounds=5).personal
    other = coterie.fit(plain, coterie.algorithms.BoostedTrees(balance=True), rounds=5).personal
    assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.slow
def test_trees_take_the_loss_of_the_model_asked_for():
    counts = DRAW.poisson(np.exp(0.5 * SCORE)).astype(float)
    fed = Federation.from_table(table(counts), "site", "y", model="poisson", task="regression")
    choice = coterie.choose(fed, rounds=9, methods=["fedavg", "trees"])
    rivals = {row["method"]: row["validation_loss"] for row in choice.rows}
    assert abs(rivals["trees"] - rivals["fedavg"]) < 0.5  # the same loss on the same scale


@pytest.mark.parametrize("model", ["poisson", "tweedie"])
def test_a_run_folder_keeps_models_of_quantities(model, tmp_path):
    target = DRAW.poisson(np.exp(0.5 * SCORE)).astype(float) if model == "poisson" else AMOUNTS
    fed = Federation.from_table(table(target), "site", "y", model=model, task="regression")
    run = coterie.fit(fed, "fedavg", rounds=3, out=tmp_path / "run")
    found = coterie.load(tmp_path / "run")
    assert torch.equal(found.personal, run.personal) and found.fed.model == run.fed.model
    expected = run.fed.model.scores(run.personal[0], run.fed.model.prepare(torch.zeros(1, 3).double()))
    found = run.model("s0")(torch.zeros(1, 3).double()).detach()
    assert float(found) == pytest.approx(float(expected))
    write_report([tmp_path / "run"])

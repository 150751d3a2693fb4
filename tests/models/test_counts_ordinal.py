"""Poisson, negative binomial and ordinal models: derivatives, likelihoods of scipy, fits of statsmodels."""

import numpy as np
import pytest
import torch
from scipy import stats

from coterie import Federation, fit, models
from coterie._core.errors import CoterieError, DataError
from coterie.algorithms import make

RNG = np.random.default_rng(3)
X = torch.from_numpy(RNG.normal(size=(60, 2)))
Z = (X @ torch.tensor([0.6, -0.4], dtype=torch.float64)).numpy() + 0.5
TARGETS = {
    "poisson": torch.from_numpy(RNG.poisson(np.exp(Z)).astype(float)),
    "negative_binomial": torch.from_numpy(RNG.negative_binomial(2, 2 / (2 + np.exp(Z))).astype(float)),
    "ordinal": torch.from_numpy(np.digitize(Z + RNG.logistic(size=60), [0.0, 0.7, 2.0])),
}
KINDS = list(TARGETS)


def made(kind, **settings):
    return getattr(models, kind)(intercept=True, **settings).fit_to(X, TARGETS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_and_hessian_are_derivatives(kind):
    """Against automatic differentiation of the loss, on a stack of two clients with padding."""
    model = made(kind, l2=0.3)
    x, y = model.prepare(X).view(2, 30, -1), TARGETS[kind].view(2, 30)
    weight = torch.full((2, 30), 0.05, dtype=torch.float64)
    weight[1, 20:] = 0
    w = 0.4 * torch.from_numpy(RNG.normal(size=(2, model.d)))
    moving = w.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model.loss(moving, x, y, weight).sum(), moving)
    assert (model.grad(w, x, y, weight) - slope).abs().max() < 1e-12
    whole = torch.autograd.functional.hessian(lambda at: model.loss(at, x[1], y[1], weight[1]).sum(), w[1])
    assert (model.hessian(w, x, y, weight)[1] - whole).abs().max() < 1e-10
    v = torch.ones_like(w)
    assert (model.hvp(w, v, x, y, weight)[1] - whole @ v[1]).abs().max() < 1e-10


def test_losses_are_negative_log_likelihoods():
    w = {name: 0.3 * torch.ones(made(name).d, dtype=torch.float64) for name in KINDS}
    rows = {name: made(name).prepare(X) for name in KINDS}
    z = (rows["poisson"] @ w["poisson"]).numpy()
    one = torch.ones(60, dtype=torch.float64)
    mean, size = np.exp(z), np.exp(-0.3)
    expected = {
        "poisson": stats.poisson(mean).logpmf(TARGETS["poisson"]),
        "negative_binomial": stats.nbinom(size, size / (size + mean)).logpmf(TARGETS["negative_binomial"]),
    }
    cuts = np.concatenate([[-np.inf, 0.0], np.exp(0.3) * np.arange(1, 3), [np.inf]])
    below = stats.logistic.cdf(cuts[:, None] - z)
    expected["ordinal"] = np.log(np.diff(below, axis=0)[TARGETS["ordinal"], np.arange(60)])
    for kind in KINDS:
        loss = made(kind).loss(w[kind], rows[kind], TARGETS[kind], one)
        assert abs(float(loss) + expected[kind].sum()) < 1e-9, kind
    likely = made("ordinal").scores(w["ordinal"], rows["ordinal"]).exp()
    assert (likely.sum(-1) - 1).abs().max() < 1e-12
    assert (made("ordinal").module(w["ordinal"])(X) - likely).abs().max() < 1e-12
    counts = made("negative_binomial")
    found = counts.module(w["negative_binomial"])(X)
    assert np.abs(found.detach().numpy() - mean).max() < 1e-10


def test_fits_are_those_of_statsmodels():
    sm = pytest.importorskip("statsmodels.api")
    design = np.column_stack([X.numpy(), np.ones(60)])
    one = torch.full((60,), 1 / 60, dtype=torch.float64)
    counted = made("poisson")
    w = counted.solve(torch.zeros(3).double(), counted.prepare(X), TARGETS["poisson"], one, 1e-10)
    theirs = sm.GLM(TARGETS["poisson"].numpy(), design, family=sm.families.Poisson()).fit(tol=1e-12)
    assert np.abs(w.numpy() - theirs.params).max() < 1e-6
    spread = made("negative_binomial")
    w = spread.solve(torch.zeros(4).double(), spread.prepare(X), TARGETS["negative_binomial"], one, 1e-9)
    theirs = sm.NegativeBinomial(TARGETS["negative_binomial"].numpy(), design).fit(disp=0, gtol=1e-9)
    assert np.abs(w[:3].numpy() - theirs.params[:3]).max() < 1e-3
    assert abs(float(w[3].exp()) - theirs.params[3]) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_methods_train_them(kind):
    """Descent lowers the loss, and a description makes the model again."""
    y = TARGETS[kind]
    fed = Federation.from_arrays([X[:30], X[30:]], [y[:30], y[30:]], getattr(models, kind)(intercept=True))
    run = fit(fed, "fedavg", rounds=20)
    first, last = (run.history.at(t, "train", "loss").mean() for t in (0, 20))
    assert last < first
    assert models.from_description(fed.model.describe()) == fed.model


def test_wrong_targets():
    with pytest.raises(DataError, match="no count"):
        models.poisson().fit_to(X, torch.full((60,), 0.5))
    with pytest.raises(DataError, match="no count"):
        models.negative_binomial().fit_to(X, torch.full((60,), -1.0))
    model = models.poisson(intercept=True).fit_to(X, torch.zeros(60))
    with pytest.raises(CoterieError, match="all counts"):
        model.solve(torch.zeros(3), model.prepare(X).float(), torch.zeros(60), torch.ones(60), 1e-6)


@pytest.mark.parametrize("kind", ["negative_binomial", "ordinal"])
def test_tables_take_them_by_name(kind):
    """As --model does; a note says in which order classes that are no numbers are taken."""
    named = {
        "negative_binomial": TARGETS[kind].numpy(),
        "ordinal": np.array(list("abcd"))[TARGETS["ordinal"]],
    }
    frame = {"site": ["x", "y"] * 30, "age": X[:, 0].numpy(), "dose": X[:, 1].numpy(), "y": named[kind]}
    task = "classification" if kind == "ordinal" else "regression"
    fed = Federation.from_table(frame, "site", "y", model=kind, task=task)
    assert fed.model.name == kind and fed.model.l2 == 1e-3 and fed.model.intercept
    order = [note for note in fed.table.warnings if "taken in this order: a < b < c < d" in note]
    assert len(order) == (kind == "ordinal")
    run = fit(fed, make("hierarchical", grouping="one", effects="intercept"), rounds=3, evaluate_every=0)
    predicted = run.predict(frame)["prediction"].to_list()
    assert set(predicted) <= set("abcd") if kind == "ordinal" else min(predicted) > 0
    other = "regression" if kind == "ordinal" else "classification"
    with pytest.raises(CoterieError, match=f"--task {task}"):
        Federation.from_table(frame | {"y": TARGETS["ordinal"].numpy()}, "site", "y", model=kind, task=other)


@pytest.mark.parametrize("kind", ["negative_binomial", "ordinal"])
def test_derivatives_in_the_predictor_are_a_part_of_all(kind):
    model, y = made(kind), TARGETS[kind]
    z, extras = X[:, 0], torch.full((model.extras, 1), 0.3, dtype=torch.float64)
    scores = torch.cat([z.unsqueeze(0), extras.expand(-1, 60)])
    losses, first, second = model.row_derivatives(scores, y)
    found = model.predictor_derivatives(z, extras, y)
    for mine, theirs in zip(found, (losses, first[0], second[0, 0]), strict=True):
        assert (mine - theirs).abs().max() < 1e-12

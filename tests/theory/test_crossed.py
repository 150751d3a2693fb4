"""Crossed and nested effects: the dense covariance matrix of all rows, statsmodels, REML, elimination by pairs."""

import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from coterie._core.errors import SettingError
from coterie.theory import crossed
from coterie.theory.crossed import CellSums, Crossed
from coterie.theory.deviance_search import slope_of


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def world(seed, nested, clients=12, rows=15, levels=(6, 4)):
    """Rows of clients (random intercept and slope) with two factors: crossed with clients, or containing them."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(clients), rows)
    if nested:
        first = (np.arange(clients) % levels[0])[owner]
        second = first % levels[1]
    else:
        first, second = (rng.integers(0, count, clients * rows) for count in levels)
    x = np.stack([rng.normal(size=clients * rows), np.ones(clients * rows)], 1)
    y = (
        x @ [0.7, -0.3]
        + 0.8 * rng.normal(size=clients)[owner]
        + 0.5 * rng.normal(size=clients)[owner] * x[:, 0]
    )
    y += 1.1 * rng.normal(size=levels[0])[first] + 0.6 * rng.normal(size=levels[1])[second]
    return owner, first, second, x, y + 0.9 * rng.normal(size=clients * rows)


def sums_of(owner, first, second, x, y, levels=(6, 4)):
    at = torch.from_numpy(np.stack([first, levels[0] + second], 1))
    sizes = np.bincount(owner).tolist()
    return CellSums.of(
        list(torch.from_numpy(x).split(sizes)),
        list(torch.from_numpy(y).split(sizes)),
        list(at.split(sizes)),
        levels,
    )


def dense(variances, owner, first, second, x, y, restricted):
    """-2 log likelihood from the covariance matrix of all rows, the coefficients, and what is left of y."""
    noise, slope, intercept, one, other = variances

    def same(label):
        return label[:, None] == label[None]

    v = noise * np.eye(len(y)) + same(owner) * (slope * np.outer(x[:, 0], x[:, 0]) + intercept)
    v = v + one * same(first) + other * same(second)
    solved = np.linalg.solve(v, np.column_stack([x, y]))
    information = x.T @ solved[:, :2]
    beta = np.linalg.solve(information, x.T @ solved[:, 2])
    left = y - x @ beta
    value = len(y) * np.log(2 * np.pi) + np.linalg.slogdet(v)[1] + left @ np.linalg.solve(v, left)
    if restricted:
        value += np.linalg.slogdet(information)[1] - 2 * np.log(2 * np.pi)
    return value, beta, np.linalg.solve(v, left)


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("restricted", [False, True])
def test_all_is_that_of_the_dense_covariance_matrix(nested, restricted):
    """Likelihood at any variances, its maximum, coefficients and effects, by direct maximisation over a dense V."""
    data = world(3, nested)
    model = Crossed(sums_of(*data), torch.tensor([0, 1]), ("first", "second"), restricted)
    for values in ([0.8, 0.3, 0.5, 1.2, 0.4], [1.5, 1e-9, 2.0, 0.01, 3.0]):
        point = (torch.tensor(values, dtype=torch.float64) / model.scale).log()
        assert float(model.deviance(point)) == pytest.approx(dense(values, *data, restricted)[0], abs=1e-6)
    found = minimize(
        lambda logs: dense(np.exp(logs), *data, restricted)[0],
        np.log([0.8, 0.3, 0.5, 1.2, 0.4]),
        method="L-BFGS-B",
        bounds=[(-15, 5)] * 5,
        options={"ftol": 1e-14, "gtol": 1e-7},
    )
    point = model.sharpened(model.fit(model.start())[0])
    assert float(model.deviance(point)) <= found.fun + 1e-6
    logs, information = model.variances(point).log().numpy(), model.information(point).numpy()
    inside = np.flatnonzero(np.diag(information) > 0)
    slope = [
        (
            dense(np.exp(logs + 1e-4 * e), *data, restricted)[0]
            - dense(np.exp(logs - 1e-4 * e), *data, restricted)[0]
        )
        / 2e-4
        for e in np.eye(5)[inside]
    ]
    information = information[np.ix_(inside, inside)]
    off = np.linalg.solve(2 * information, slope) / np.sqrt(np.diag(np.linalg.inv(information)))
    assert np.abs(off).max() < 1e-4  # standard deviations from the maximum
    values = model.variances(point)
    _, beta, left = dense(values.numpy(), *data, restricted)
    common, effect, _ = model.effects(values)
    assert np.abs(common.numpy() - beta).max() < 1e-8
    for factor, place, variance in ((data[1], 0, values[3]), (data[2], 6, values[4])):
        blup = [float(variance) * left[factor == level].sum() for level in range(factor.max() + 1)]
        assert np.abs(effect[place : place + len(blup)].numpy() - blup).max() < 1e-8


@pytest.mark.slow
def test_statsmodels_finds_the_same_crossed_variances():
    """MixedLM with one group of all rows and a variance component for each factor and for clients."""
    pd = pytest.importorskip("pandas")
    smf = pytest.importorskip("statsmodels.formula.api")
    from statsmodels.regression.mixed_linear_model import MixedLMParams

    owner, first, second, x, y = world(5, False, clients=8, rows=10)
    frame = pd.DataFrame({"y": y, "x": x[:, 0], "c": owner, "f": first, "s": second, "one": 1})
    components = {"c": "0 + C(c)", "f": "0 + C(f)", "s": "0 + C(s)"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = smf.mixedlm("y ~ x", frame, groups="one", re_formula="0", vc_formula=components).fit(
            reml=True, method=["lbfgs"]
        )
    model = Crossed(sums_of(owner, first, second, x, y), torch.tensor([-1, 0]), ("f", "s"), restricted=True)
    point = model.sharpened(model.fit(model.start())[0])
    ours = model.variances(point).sqrt().numpy()
    theirs = np.sqrt([fitted.scale, *fitted.vcomp])
    error = 0.5 * ours * np.sqrt(1 / model.information(point).diagonal().numpy().clip(1e-9))
    assert (np.abs(ours - theirs) / error).max() < 1e-3, "as far as their search goes"
    assert float(model.deviance(point)) <= -2 * fitted.llf + 1e-9, "ours is the higher likelihood"
    noise, *rest = (ours**2).tolist()

    def theirs_at(logs):
        """Their log likelihood, profiled over coefficients and noise, of variances relative to the noise."""
        params = MixedLMParams.from_components(fitted.fe_params, np.zeros((0, 0)), vcomp=np.exp(logs))
        return fitted.model.loglike(params, profile_fe=True)

    assert _off(theirs_at, np.log(np.array(rest) / noise)) < 1e-4


def _off(likelihood, point, step=1e-3):
    """Return how far the maximum of a log likelihood is, in standard deviations, by a Newton step from differences."""
    moves = step * np.eye(len(point))
    slope = np.array([(likelihood(point + m) - likelihood(point - m)) / (2 * step) for m in moves])
    bent = np.array(
        [
            [
                likelihood(point + a + b)
                - likelihood(point + a - b)
                - likelihood(point - a + b)
                + likelihood(point - a - b)
                for b in moves
            ]
            for a in moves
        ]
    ) / (-4 * step**2)
    return float(np.sqrt(slope @ np.linalg.solve(bent, slope)))


def test_pairs_and_dense_products_eliminate_clients_alike(monkeypatch):
    data = world(7, False, clients=40, rows=3, levels=(30, 20))
    sums = sums_of(*data, levels=(30, 20))
    assert sums.pairs is not None
    model = Crossed(sums, torch.tensor([0, 1]), ("first", "second"))
    point = model.start()
    value, slope = float(model.deviance(point)), slope_of(model.deviance, point)
    monkeypatch.setitem(sums.__dict__, "pairs", None)
    assert float(model.deviance(point)) == pytest.approx(value, abs=1e-8)
    assert (slope_of(model.deviance, point) - slope).abs().max() < 1e-8


def test_a_factor_that_does_not_matter_has_variance_zero():
    owner, first, _, x, y = world(9, False)
    noise = np.random.default_rng(1).permutation(np.arange(len(y)) % 4)
    centred = y - np.array([y[noise == level].mean() for level in range(4)])[noise]
    model = Crossed(sums_of(owner, first, noise, x, centred), torch.tensor([-1, 0]), ("first", "nothing"))
    point, best = model.fit(model.start())
    assert model.variances(model.without(point, best))[3] == 0
    assert model.effects(model.variances(model.without(point, best)))[1][6:].abs().max() == 0


def test_rows_of_no_level_have_no_effect():
    """A pooled or unseen level is -1: its rows count for everything but the effects."""
    owner, first, second, x, y = world(11, False)
    pooled = np.where(first == 5, -1, first)
    at = torch.from_numpy(np.stack([pooled, np.where(pooled < 0, -1, 5 + second)], 1))
    sizes = np.bincount(owner).tolist()
    sums = CellSums.of(
        list(torch.from_numpy(x).split(sizes)),
        list(torch.from_numpy(y).split(sizes)),
        list(at.split(sizes)),
        (5, 4),
    )
    assert sums.count.sum() == len(y) and sums.between_levels.diagonal()[:5].sum() == (pooled >= 0).sum()


def test_too_many_levels_are_refused(monkeypatch):
    monkeypatch.setattr(crossed, "MOST_LEVELS", 9)
    with pytest.raises(SettingError, match="10 levels; 9 can be fitted"):
        Crossed(sums_of(*world(1, False)), torch.tensor([0, 0]), ("first", "second"))

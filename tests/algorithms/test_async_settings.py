"""Settings of the asynchronous methods: lists, numbers of numpy, steps from theory, and warnings before divergence."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from coterie import Federation, fit, models
from coterie._core.errors import SettingError
from coterie.algorithms import find, from_the_theory, make
from coterie.cli import app
from coterie.theory import hierarchical as exact
from coterie.theory.cluster_penalty import Penalty
from coterie.theory.coins import Coins, renewal

LABELS = [0, 0, 0, 1, 1, 2, 2, 2]


def world(heavy=False, seed=0, l2=0.1):
    rng = np.random.default_rng(seed)
    draw = (lambda shape: rng.standard_t(2, size=shape)) if heavy else (lambda shape: rng.normal(size=shape))
    xs = [draw((20, 3)) for _ in LABELS]
    ys = [x @ rng.normal(size=3) + rng.normal(size=20) for x in xs]
    fed = Federation.from_arrays(xs, ys, models.linear(l2=l2), clusters=LABELS, dtype=torch.float64)
    a = torch.stack([torch.from_numpy(x.T @ x / 20) + l2 * torch.eye(3) for x in xs])
    return fed, a, torch.stack([torch.from_numpy(x.T @ y / 20) for x, y in zip(xs, ys, strict=True)])


@pytest.mark.quick("one-gamma0", "one-gamma1")
@pytest.mark.parametrize("gamma", [(0.5, 1.0, 2.0), tuple(0.2 + 0.2 * k for k in range(8))])
@pytest.mark.parametrize("coins", ["independent", "one"])
def test_gamma_per_cluster_and_per_client_reach_their_minimisers(gamma, coins):
    """Means weigh clients by gamma: without that the fixed point is another one."""
    fed, a, b = world()
    method = find("async-al2sgd+").from_theory(fed, gamma=gamma, lambda_=1.0, batch=0, coins=coins)
    best = exact.minimiser(a, b, method.penalty(fed)).models
    run = fit(fed, method, rounds=800, evaluate_every=0)
    assert (run.personal - best).norm() < 1e-6 * best.norm()
    uniform = exact.minimiser(a, b, Penalty.of(torch.tensor(LABELS), 1.0, lambda_=1.0)).models
    assert (uniform - best).norm() > 0.01 * best.norm()


def test_heavy_tails_do_not_stall():
    """Rows from t with two degrees: p0 is tiny, and anchors were renewed as rarely; now within 1e-4."""
    fed, a, b = world(heavy=True)
    method = find("async-al2sgd+").from_theory(fed, gamma=0.5, lambda_=1.0, batch=0)
    best = exact.minimiser(a, b, method.penalty(fed)).models
    settings = {"gamma": 0.5, "lambda_": 1.0, "batch": 0}
    rare = find("async-al2sgd+").from_theory(fed, **settings, rho=method.p0 * (1 - method.p0))
    errors = {}
    for name, one in (("now", method), ("rare", rare)):
        run = fit(fed, one, rounds=1500, evaluate_every=0)
        errors[name] = float((run.personal - best).norm() / best.norm())
    assert errors["now"] < 1e-4 < 10 * errors["rare"]
    assert (
        4 * method.lr * (method.constants(fed)["smoothness"] + 0.5) <= 1 + 1e-9
    )  # Theorem 4.3: lr <= 1/(4 M)


@pytest.mark.slow
@pytest.mark.parametrize("heavy", [False, True])
def test_classes_with_a_free_intercept_reach_their_minimiser(heavy):
    """Their curvature has no lower bound; the gradient of the whole objective vanishes all the same."""
    rng = np.random.default_rng(11)
    xs = [rng.standard_t(3, size=(30, 2)) if heavy else rng.normal(size=(30, 2)) for _ in LABELS]
    ys = [(x @ rng.normal(size=2) + 0.5 + rng.logistic(size=30) > 0).astype(int) for x in xs]
    model = models.logistic(l2=1e-3, intercept=True)
    fed = Federation.from_arrays(xs, ys, model, clusters=LABELS, dtype=torch.float64)
    method = find("async-al2sgd+").from_theory(fed, gamma=0.5, lambda_=1.0, batch=0)
    found = fit(fed, method, rounds=1500, evaluate_every=0).personal
    penalty, clusters, rows = method.penalty(fed), torch.tensor(LABELS), fed.runtime.rows("train")
    inside, common = penalty.means(found)
    alpha = penalty.alpha[clusters]
    pull = penalty.gamma * ((1 - alpha) * (found - inside[clusters]) + alpha * (found - common))
    weight = torch.full((30,), 1 / 30, dtype=torch.float64)
    slopes = [fed.model.grad(found[k], *rows.of(k), weight) for k in range(fed.n)]
    assert (torch.stack(slopes) + pull).abs().max() < 1e-5 < 0.1 * pull.abs().max()


def test_pulls_beside_which_losses_vanish_are_refused():
    for coins in ("independent", "one"):
        with pytest.raises(SettingError, match="is too strong beside losses"):
            from_the_theory("async-al2sgd+", world()[0], {"gamma": 1e300, "coins": coins})


def test_networks_have_no_theory():
    xs, ys = [np.eye(4)] * 2, [np.array([0, 1, 0, 1])] * 2
    fed = Federation.from_arrays(xs, ys, models.mlp((4,)), clusters=[0, 1])
    with pytest.raises(SettingError, match="theory is for convex losses"):
        from_the_theory("async-al2sgd+", fed, {})


def test_renewal_is_the_cheapest():
    """Against the cost per digit, (p0 + rho + 1/20) / sqrt(rho), over a grid."""
    coins = Coins.of(Penalty.of([0, 0, 1], gamma=1.0, alpha=0.5), p0=0.01, p=0.05)
    grid = np.geomspace(1e-4, 1, 4000)
    cheapest = grid[((coins.p0 + grid + 0.05) / np.sqrt(grid)).argmin()]
    assert abs(renewal(coins) / cheapest - 1) < 0.01


@pytest.mark.parametrize("number", [np.float32, np.float64, torch.tensor])
def test_numbers_of_numpy_and_torch(number):
    method = make("async-l2gd", p=number(0.25), gamma=np.array([0.5, 1.0, 2.0]))
    assert type(method.p) is float and method.p == 0.25 and method.gamma == (0.5, 1.0, 2.0)
    assert torch.isfinite(fit(world()[0], method, rounds=20).personal).all()
    with pytest.raises(SettingError, match="outside its range"):
        make("async-l2gd", gamma=[1.0, -1.0])


def test_lists_as_text():
    assert make("async-l2gd", gamma="[0.5,1,2]").gamma == (0.5, 1.0, 2.0)
    with pytest.raises(SettingError, match="such as"):
        make("async-l2gd", gamma="[a]")
    with pytest.raises(SettingError, match="3 clusters and 8 clients"):
        fit(world()[0], make("async-l2gd", gamma="[1,2]"), rounds=1)


def test_a_step_that_must_diverge_is_refused():
    with pytest.raises(SettingError, match="diverge"):
        fit(world()[0], make("async-l2gd", gamma=1000.0), rounds=10)
    with pytest.raises(SettingError, match="no steps from theory"):
        from_the_theory("fedavg", world()[0], {})


@pytest.mark.parametrize("strength", [1e-300, 1e-30, 1e300])
def test_extreme_strengths(strength):
    """Nothing ties the models: they are local. Everything does: they are one."""
    _, a, b = world()
    models_ = exact.minimiser(a, b, Penalty.of(torch.tensor(LABELS), strength, alpha=1.0)).models
    alone = torch.linalg.solve(a, b)
    if strength < 1:
        assert (models_ - alone).abs().max() < 1e-9
    else:
        assert (models_ - models_[0]).abs().max() < 1e-9


def test_single_precision():
    _, a, b = world()
    penalty = Penalty.of(torch.tensor(LABELS), 0.7, lambda_=1.0)
    single = exact.minimiser(a.float(), b.float(), penalty).models
    assert (
        single.dtype == torch.float32 and (single - exact.minimiser(a, b, penalty).models).abs().max() < 1e-4
    )


def test_theory_from_the_command_line(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["who,group,x,y"]
    lines += [f"c{k},g{k % 2},{rng.normal():.3f},{rng.normal():.3f}" for k in range(6) for _ in range(12)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    base = [
        "fit",
        str(tmp_path / "t.csv"),
        "--client",
        "who",
        "--target",
        "y",
        "--cluster",
        "group",
        "--rounds",
        "5",
    ]
    chosen = ["--algorithm", "async-l2gd", "--set", "theory=true", "--set", "gamma=[0.5,2]", "--l2", "0.1"]
    done = CliRunner().invoke(app, [*base, *chosen, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    wrong = CliRunner().invoke(app, [*base, "--set", "theory=maybe", "--out", str(tmp_path / "other")])
    assert wrong.exit_code != 0 and not (tmp_path / "other").exists()

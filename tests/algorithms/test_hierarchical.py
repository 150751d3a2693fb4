"""The hierarchical method: exact for least squares, Newton and gradients at the same point, pulls from the data."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import multivariate_normal
from torch import nn

from coterie import Federation, fit, models
from coterie._core.errors import SettingError
from coterie.algorithms import hierarchical, make
from coterie.theory import hierarchical as exact
from coterie.theory import linear_estimators
from coterie.theory.cluster_penalty import Penalty
from coterie.theory.mixed_likelihood import maximum_likelihood
from coterie.theory.variance_components import Sums

CLUSTERS = [0, 0, 0, 1, 1, 1, 2, 2, 3]
N, K, D = len(CLUSTERS), 4, 3
RNG = np.random.default_rng(6)
SIZES = (4, 9, 30, 12, 6, 20, 15, 8, 11)
XS = [RNG.normal(size=(m, D)) for m in SIZES]
TRUTH = RNG.normal(size=(K, D))[CLUSTERS] + 0.5 * RNG.normal(size=(N, D))
SCORES = [x @ t for x, t in zip(XS, TRUTH, strict=True)]
TARGETS = {
    "linear": [z + 0.5 * RNG.normal(size=len(z)) for z in SCORES],
    "logistic": [(z + RNG.logistic(size=len(z)) > 0).astype(int) for z in SCORES],
    "softmax": [np.digitize(z + RNG.logistic(size=len(z)), [-1, 1]) for z in SCORES],
}


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: a second thread costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def world(kind="linear", model=None, **options):
    made = model or getattr(models, kind)(reduction="sum", l2=0.0 if kind == "linear" else 0.01)
    return Federation.from_arrays(XS, TARGETS[kind], made, **{"clusters": CLUSTERS, **options})


def sums_of(xs=XS, kind="linear"):
    xs = [torch.from_numpy(x) for x in xs]
    return Sums.of(xs, [torch.from_numpy(y) for y in TARGETS[kind]], torch.tensor(CLUSTERS))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_least_squares_is_exact_in_one_round(reduction):
    """For given pulls the block elimination, whatever the model's reduction; later rounds ask nobody."""
    fed = world(model=models.linear(reduction=reduction))
    run = fit(fed, make("hierarchical", choose="given", gamma=0.7, lambda_=2.0), rounds=5)
    sums = sums_of()
    best = exact.minimiser(sums.xx, sums.xy, Penalty.of(torch.tensor(CLUSTERS), 0.7, lambda_=2.0))
    assert (run.personal - best.models).abs().max() < 1e-10
    assert (run.state.centres - best.centres).abs().max() < 1e-10
    assert (run.common() - best.common).abs().max() < 1e-10
    assert run.fed.ledger.total("messages_up", phase="curve") == N and run.state.done


@pytest.mark.parametrize("effects", ["same", "each"])
def test_nothing_to_set(effects):
    """Variances by maximum likelihood, then the best linear predictors."""
    run = fit(world(), make("hierarchical", effects=effects), rounds=1)
    found = maximum_likelihood(sums_of(), effects)
    assert abs(run.state.noise / found.noise - 1) < 1e-3
    assert (run.personal - found.models(sums_of())).abs().max() < 2e-3
    alone = linear_estimators.local_least_squares(sums_of().xx, sums_of().xy)
    truth = torch.from_numpy(TRUTH)
    assert (run.personal - truth).square().mean() < (alone - truth).square().mean()


@pytest.mark.quick("logistic")
@pytest.mark.parametrize("kind", ["logistic", "softmax"])
def test_newton_and_gradients_end_at_the_minimiser(kind):
    """Both have the gradient of the objective at zero, checked by automatic differentiation on the rows."""
    fed = world(kind)
    settings = {"choose": "given", "gamma": 0.8, "lambda_": 1.5}
    newton = fit(fed, make("hierarchical", **settings), rounds=30)
    assert newton.state.done
    penalty = Penalty.of(torch.tensor(CLUSTERS), 0.8, lambda_=1.5)
    for i, w in enumerate(newton.personal):
        x, y = torch.from_numpy(XS[i]), torch.from_numpy(TARGETS[kind][i])
        slope = (
            fed.model.grad(w, x, y, torch.ones(len(y), dtype=torch.float64))
            + penalty.grad(newton.personal)[i]
        )
        assert slope.abs().max() < 1e-7
    descent = fit(
        fed, make("hierarchical", **settings, solver="gradient", lr=0.4, steps=10, batch=0), rounds=300
    )
    assert (newton.personal - descent.personal).abs().max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["logistic", pytest.param("softmax", marks=pytest.mark.slow)])
def test_pulls_for_classes_are_estimated(kind):
    """Between training alone and one model for all in the pull, and no worse than either on held-out rows."""
    rng = np.random.default_rng(1)
    n, k, d = 36, 6, 3
    clusters = np.arange(n) % k
    truth = 1.5 * rng.normal(size=(k, d))[clusters] + 0.4 * rng.normal(size=(n, d))
    xs = [rng.normal(size=(50, d)) for _ in range(n)]
    noisy = [x @ t + rng.logistic(size=50) for x, t in zip(xs, truth, strict=True)]
    ys = [(z > 0).astype(int) if kind == "logistic" else np.digitize(z, [-1, 1]) for z in noisy]
    fed = Federation.from_arrays(
        xs, ys, getattr(models, kind)(l2=1e-3), clusters=clusters, split=(0.4, 0.2, 0.4)
    )
    scores = {}
    for name, settings in (
        ("ml", {"effects": "same"}),
        ("each", {}),
        ("validation", {"choose": "validation"}),
        ("moments", {"choose": "moments"}),
        ("alone", {"choose": "given", "gamma": 1e-3}),
        ("one", {"choose": "given", "gamma": 1e5, "lambda_": 1e5}),
    ):
        run = fit(fed, make("hierarchical", **settings), rounds=12, evaluate_every=0)
        scores[name] = float(run.score("test", "loss").nanmean())
    for name in ("ml", "each", "validation", "moments"):
        assert scores[name] < min(scores["alone"], scores["one"]), scores


def test_validation_takes_the_best_pair():
    fed = world(split=(0.6, 0.3, 0.1))
    run = fit(fed, make("hierarchical", choose="validation"), rounds=1)
    losses = {}
    for gamma, lambda_ in hierarchical.PAIRS:
        one = fit(fed, make("hierarchical", choose="given", gamma=gamma, lambda_=lambda_), rounds=1)
        mean = one.score("validation", "loss").nan_to_num()
        losses[gamma, lambda_] = float((mean * fed.rows["validation"]).sum())
    gamma, lambda_ = min(losses, key=losses.get)
    assert float(run.state.within[0, 0]) == 1 / gamma and float(run.state.between[0]) == 1 / lambda_


def test_any_module():
    """A module with the shape of linear regression takes the steps of linear regression; a network learns."""
    settings = {"choose": "given", "gamma": 0.8, "lambda_": 1.5, "solver": "gradient", "batch": 0, "lr": 0.3}

    def loss(output, y):
        return 0.5 * (output.squeeze(-1) - y).square()

    def zero():
        layer = nn.Linear(D, 1, bias=False)
        nn.init.zeros_(layer.weight)
        return layer

    net = world(model=models.network(zero, loss=loss, stacked=True), dtype=torch.float64)
    flat = fit(world(model=models.linear()), make("hierarchical", **settings), rounds=10, evaluate_every=0)
    deep = fit(net, make("hierarchical", **settings), rounds=10, evaluate_every=0)
    assert (flat.personal - deep.personal).abs().max() < 1e-10
    layers = models.network(lambda: nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 3)), stacked=True)
    run = fit(world("softmax", layers), make("hierarchical", lr=0.2), rounds=40)
    _, values = run.history.curve("train", "loss")
    assert values[-1] < 0.8 * values[0]


def test_limits():
    """lambda = 0 leaves the clusters independent; a cluster of one client is drawn to the common centre only."""
    sums = sums_of()
    run = fit(world(), make("hierarchical", choose="given", gamma=0.7, lambda_=0.0), rounds=1)
    best = exact.minimiser(sums.xx, sums.xy, Penalty.of(torch.tensor(CLUSTERS), 0.7, alpha=0.0))
    assert (run.personal - best.models).abs().max() < 1e-9
    descent = fit(
        world(), make("hierarchical", choose="given", lambda_=0.0, solver="gradient", batch=0), rounds=20
    )
    assert torch.isfinite(descent.personal).all() and torch.isfinite(descent.common()).all()
    alone = fit(world(clusters=list(range(N))), make("hierarchical"), rounds=1)
    assert torch.isfinite(alone.personal).all()
    one = fit(world(clusters=[0] * N), make("hierarchical"), rounds=1)
    assert torch.isfinite(one.personal).all()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"gamma": -1.0}, "gamma"),
        ({"gamma": 0.0}, "gamma"),
        ({"lambda_": -1.0}, "lambda_"),
        ({"choose": "validation"}, "validation rows"),
        ({"choose": "guess"}, "choose"),
        ({"effects": "slopes"}, "effects"),
        ({"solver": "gradient", "choose": "ml"}, "second derivatives"),
    ],
)
def test_bad_settings(settings, match):
    with pytest.raises(SettingError, match=match):
        fit(world(), make("hierarchical", **settings), rounds=1)


def test_networks_are_refused_with_a_remedy():
    layers = models.network(lambda: nn.Linear(D, 1))
    with pytest.raises(SettingError, match="solver = 'gradient'"):
        fit(world(model=layers), make("hierarchical", solver="newton"), rounds=1)


def test_without_known_clusters_all_clients_are_one():
    alone, one = (
        fit(world(clusters=None), make("hierarchical", grouping=grouping), rounds=1)
        for grouping in ("known", "one")
    )
    assert torch.equal(alone.personal, one.personal)


@pytest.mark.quick("linear")
@pytest.mark.parametrize("kind", ["linear", "logistic"])
def test_everybody_in_one_cluster_needs_no_clusters(kind):
    """grouping = "one" is one known cluster, without the traffic between its head and the server."""
    one = fit(world(kind, clusters=None), make("hierarchical", grouping="one"), rounds=2)
    known = fit(world(kind, clusters=[0] * N), make("hierarchical"), rounds=2)
    assert torch.equal(one.personal, known.personal)
    assert (known.state.within > 0).any() and not torch.equal(one.personal[0], one.personal[1])
    assert known.fed.ledger.total("bytes_up", link="cluster-server") > 0
    assert set(one.ledger["link"]) == {"client-server"}
    assert one.fed.ledger.total("bytes_up") < known.fed.ledger.total("bytes_up")


def newcomer(kind, rows, seed):
    """Rows of a client that was not in training, whose model is its own."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, D))
    z = x @ (TRUTH[0] + 0.5 * rng.normal(size=D))
    if kind == "linear":
        return x, z + 0.5 * rng.normal(size=rows)
    return x, (z + rng.logistic(size=rows) > 0).astype(int)


def joint(s, xs, ys, clusters):
    """Precision and right-hand side of all unknowns at once: models t_i, then centres w_j, then the common w."""
    n, k = len(xs), len(s.centres)
    precision, right = np.zeros((n + k + 1, D, n + k + 1, D)), np.zeros((n + k + 1, D))

    def tie(one, other, inverse):
        for a, b in ((one, one), (other, other)):
            precision[a, :, b] += np.diag(inverse)
        for a, b in ((one, other), (other, one)):
            precision[a, :, b] -= np.diag(inverse)

    for i, (x, y, j) in enumerate(zip(xs, ys, clusters, strict=True)):
        precision[i, :, i] += x.T @ x / s.noise
        right[i] = x.T @ y / s.noise
        tie(i, n + j, 1 / s.within[j].numpy())
    for j in range(k):
        tie(n + j, n + k, 1 / s.between.numpy())
    size = (n + k + 1) * D
    return precision.reshape(size, size), right.reshape(size)


def given(s, clusters):
    """Positive variances, so that precisions exist, and the centres and their certainty that belong to them."""
    s = s.replace(within=s.within + 0.05, between=s.between + 0.1)
    sums = sums_of()
    h, g = exact.lift(sums.xx / s.noise, sums.xy / s.noise, s.within[clusters])
    between = s.between.expand(s.within.shape)
    middle, common = exact.centres(h, g, clusters, between)
    return s.replace(x=common, centres=middle, certainty=exact.certainty(h, clusters, between))


@pytest.mark.quick("2-mean", "2-sum")
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("rows", [1, 2, 12])
def test_a_newcomer_gets_what_training_everybody_again_would_give(rows, reduction):
    """With the variances as they are, all normal: the posterior mean of its model given the rows of all."""
    model, method = models.linear(reduction=reduction), make("hierarchical", grouping="one")
    s = fit(world(model=model, clusters=None), method, rounds=1).state
    s = given(s, torch.zeros(N, dtype=torch.long))
    x, y = newcomer("linear", rows, seed=3)
    found = method.adapt(Federation.from_arrays([x], [y], model), s, torch.zeros(N, D), 1)[0]
    precision, right = joint(s, [*XS, x], [*TARGETS["linear"], y], [0] * (N + 1))
    everything = np.linalg.lstsq(precision, right, rcond=None)[0].reshape(-1, D)
    assert np.abs(found.numpy() - everything[N]).max() < 1e-9
    taken_as_known = exact.settle(
        torch.from_numpy(x.T @ x) / s.noise,
        torch.from_numpy(x.T @ y) / s.noise,
        s.centres[0],
        s.within[0],
    )
    assert (found - taken_as_known).abs().max() > 1e-3, "that the centre is estimated counts"


def test_certainty_of_an_estimated_centre_is_that_of_the_run():
    """As fitted, zero variances and all: one cluster's is the sum of what its clients say."""
    s = fit(world(clusters=None), make("hierarchical", grouping="one"), rounds=1).state
    sums = sums_of()
    h, _ = exact.lift(sums.xx / s.noise, sums.xy / s.noise, s.within[[0] * N])
    assert (s.certainty[0] - h.sum(0)).abs().max() < 1e-9 * h.sum(0).abs().max()


def test_a_newcomer_joins_the_cluster_under_which_its_rows_are_likeliest():
    """Against the density of the rows, N(Xw_j, X(S_j + V_j)X' + sigma^2 I), V_j from everybody's joint precision."""
    method, labels = make("hierarchical"), torch.tensor(CLUSTERS)
    s = fit(world(), method, rounds=1).state
    s = given(s.replace(within=s.within * torch.tensor([[1.0], [0.2], [3.0], [1.5]])), labels)
    precision, right = joint(s, XS, TARGETS["linear"], CLUSTERS)
    spread = np.linalg.inv(precision).reshape(N + K + 1, D, N + K + 1, D)
    middle = np.linalg.solve(precision, right).reshape(-1, D)[N : N + K]
    assert np.abs(s.centres.numpy() - middle).max() < 1e-9
    prior = exact.lift(s.certainty, torch.zeros(K, D, dtype=torch.float64), s.within)[0].flatten(1)
    taken = set()
    for seed in range(12):
        x, y = newcomer("linear", 6, seed)
        fed = Federation.from_arrays([x], [y], models.linear())
        density, each = [], []
        for k in range(K):
            around = np.diag(s.within[k].numpy()) + spread[N + k, :, N + k]
            rows = multivariate_normal(x @ middle[k], x @ around @ x.T + s.noise * np.eye(6))
            density.append(rows.logpdf(y))
            sent = {"centre": s.centres[[k]], "prior": prior[[k]]}
            each.append(fed.fresh().map(method.join, each=sent, noise=s.noise).values[0])
        likely = torch.stack(each)[:, -1].numpy()
        assert np.abs((likely - likely[0]) - (np.array(density) - density[0])).max() < 1e-8
        best = int(np.argmax(density))
        found = method.adapt(fed, s, torch.zeros(N, D), 1)[0]
        assert torch.equal(found, each[best][:-1])
        everything = np.linalg.solve(*joint(s, [*XS, x], [*TARGETS["linear"], y], [*CLUSTERS, best]))
        assert np.abs(found.numpy() - everything.reshape(-1, D)[N]).max() < 1e-8
        taken.add(best)
    assert len(taken) > 1


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_newcomer_with_classes_gets_the_posterior_mode(reduction):
    """Against a minimiser that knows nothing of Newton's steps."""
    model, method = models.logistic(reduction=reduction), make("hierarchical", grouping="one")
    s = fit(world("logistic", model=model, clusters=None), method, rounds=2).state
    x, y = newcomer("logistic", 9, seed=1)
    w = s.centres[0].numpy()
    q = np.linalg.inv(np.diag(s.within[0].numpy()) + np.linalg.inv(s.certainty[0].numpy()))

    def objective(t):
        return np.logaddexp(0, -(2 * y - 1) * (x @ t)).sum() + 0.5 * (t - w) @ q @ (t - w)

    found = method.adapt(Federation.from_arrays([x], [y], model), s, torch.zeros(N, D), 8)[0].numpy()
    best = minimize(objective, w, method="BFGS", options={"gtol": 1e-8})
    assert np.abs(found - best.x).max() < 1e-6 and objective(found) <= best.fun + 1e-12


def test_a_newcomer_of_the_gradient_solver_is_left_to_the_usual_rule():
    method = make("hierarchical", solver="gradient", choose="given")
    s = fit(world(), method, rounds=2).state
    fed = Federation.from_arrays([XS[0]], [TARGETS["linear"][0]], models.linear())
    assert method.adapt(fed, s, torch.zeros(N, D), 2) is None

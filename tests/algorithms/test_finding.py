"""Clusters that nobody named, found from sums over rows of linear models: what clients send and who is where."""

import numpy as np
import pytest
import torch

from coterie import Federation, fit, models
from coterie.algorithms import make
from coterie.algorithms.finding import FOLDS, sends_sums
from coterie.algorithms.head_sums import WIDTH

RNG = np.random.default_rng(3)
D, SIZES = 3, (3, 4, 9, 30, 12, 25)
CENTRES = np.array([[2.0, 0, 0], [-2.0, 1, 1]])
XS = [RNG.normal(size=(n, D)) for n in SIZES]
YS = [x @ CENTRES[k % 2] + 0.3 * RNG.normal(size=len(x)) for k, x in enumerate(XS)]


def world(model=None, **options):
    return Federation.from_arrays(XS, YS, model or models.linear(), clusters=[0, 1] * 3, **options)


def told(fed, name="pfl-tc"):
    r = fed.map(make(name).sum_folds, x=fed.initial_model())
    return r["hessians"].view(fed.n, FOLDS, fed.d, fed.d), r["slopes"].view(fed.n, FOLDS, fed.d)


@pytest.mark.parametrize("l2", [0.0, 0.7])
def test_sums_of_folds_add_up_to_those_of_all_rows(l2):
    hessians, slopes = told(world(models.linear(l2=l2)))
    for i, (x, y) in enumerate(zip(XS, YS, strict=True)):
        np.testing.assert_allclose(hessians[i].sum(0), x.T @ x, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(slopes[i].sum(0), x.T @ y, rtol=1e-9, atol=1e-9)
        rows = torch.linalg.matrix_rank(hessians[i])
        used = [int(rank) for rank in rows if rank]
        assert len(used) == max(1, min(FOLDS, len(y) // 2)) and min(used) >= 2, "a fold of one row shows it"


def test_the_quadratic_of_a_logistic_model_has_its_slope_and_curvature_at_the_fit():
    ys = [(y > 0).astype(float) for y in YS]
    fed = Federation.from_arrays(XS, ys, models.logistic(l2=0.1))
    hessians, slopes = told(fed)
    lr, w = 0.1, torch.zeros(6, D, dtype=torch.float64)
    fits = fit(fed, make("local", lr=lr, steps=50, batch=0), rounds=40, evaluate_every=0).personal
    for i, (x, y) in enumerate(zip(XS, ys, strict=True)):
        w = fits[i].numpy()
        likely = 1 / (1 + np.exp(-x @ w))
        curve = (x * (likely * (1 - likely))[:, None]).T @ x
        np.testing.assert_allclose(hessians[i].sum(0), curve, rtol=0.05, atol=0.02 * len(y))
        grad = hessians[i].sum(0).numpy() @ w - slopes[i].sum(0).numpy()
        np.testing.assert_allclose(grad, x.T @ (likely - y), atol=0.05 * len(y))


@pytest.mark.parametrize("name", ["pfl-tc", "ifca", "cobo"])
def test_ragged_clients_find_their_cluster_without_being_told(name):
    run = fit(world(), make(name, batch=0), rounds=30)
    assert run.history.at(30, "server", "ari").item() == 1.0
    pooled = [
        np.linalg.lstsq(np.concatenate(XS[k::2]), np.concatenate(YS[k::2]), rcond=None)[0] for k in (0, 1)
    ]
    tolerance = 0.15 if name == "pfl-tc" else 0.05  # its centres limit the weight of those with most rows
    np.testing.assert_allclose(run.personal, np.stack(pooled * 3), atol=tolerance)
    assert run.fed.ledger.total("messages_up", phase="sum_folds") == 6


def test_who_has_few_sums_and_who_has_not():
    assert sends_sums(world())
    assert not sends_sums(world(models.mlp(hidden=(4,))))
    wide = Federation.from_arrays([np.ones((2, 65))] * 2, [np.ones(2)] * 2, models.linear())
    assert not sends_sums(wide)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pfl-tc", "ifca", "cobo"])
@pytest.mark.parametrize("lie", ["sign-flip", "large", "random", "nan"])
def test_one_liar_harms_nobody(name, lie):
    xs, ys = XS[2:] * 2, YS[2:] * 2
    fed = Federation.from_arrays(xs, ys, models.linear(), byzantine={3: lie}, clusters=[0, 1] * 4)
    run = fit(fed, make(name, batch=0), rounds=30, evaluate_every=0)
    honest = [k for k in range(8) if k != 3]
    truth = np.stack([CENTRES[k % 2] for k in honest])
    assert np.linalg.norm(run.personal[honest].numpy() - truth, axis=1).max() < 0.5


def test_cobo_is_pulled_less_where_clients_differ_and_more_where_they_have_few_rows():
    """Thirty clients that vary as much as their fits do: better off pulled than alone or with one model."""
    rng = np.random.default_rng(0)
    truth = 1 + 0.08 * rng.normal(size=(30, D))
    xs = [rng.normal(size=(40, D)) for _ in truth]
    ys = [x @ own + 0.5 * rng.normal(size=40) for x, own in zip(xs, truth, strict=True)]
    errors = {}
    for name in ("local", "fedavg", "cobo"):
        run = fit(Federation.from_arrays(xs, ys, models.linear()), make(name), rounds=40, evaluate_every=0)
        errors[name] = np.linalg.norm(run.personal.numpy() - truth, axis=1).mean()
    weights = run.state.weights[~torch.eye(30, dtype=torch.bool)]
    assert 0 < weights.min() == weights.max() < 1
    assert errors["cobo"] < 0.9 * min(errors["local"], errors["fedavg"])
    alike = fit(world(), make("cobo"), rounds=5).state
    assert set(alike.weights.unique().tolist()) == {0.0, 1.0}
    assert "final" in alike and alike.lightness[0] > alike.lightness[3]


def test_cobo_looks_again_where_somebody_did_not_answer_at_first():
    run = fit(world(byzantine={0: "nan"}), make("cobo"), rounds=3)
    assert "final" not in run.state
    every = fit(world(), make("cobo", start_links="all"), rounds=3)
    assert "final" not in every.state and every.fed.ledger.total("messages_up", phase="probe") > 0


def renamed(seed, count, rows=40, classes=4, named=True, inputs=6):
    """Clients whose classes are blobs; every second one has other names for them."""
    rng = np.random.default_rng(seed)
    blobs, names = (
        1.5 * rng.normal(size=(classes, inputs)),
        (np.arange(classes), np.roll(np.arange(classes), 1)),
    )
    xs, ys = [], []
    for k in range(count):
        kind = rng.integers(classes, size=rows)
        xs.append((blobs[kind] + rng.normal(size=(rows, inputs))).astype(np.float32))
        ys.append(names[k % 2 if named else 0][kind])
    model = models.mlp(hidden=(24,))
    return Federation.from_arrays(
        xs, ys, model, clusters=[k % 2 if named else 0 for k in range(count)], seed=seed
    )


@pytest.mark.parametrize("inputs", [6, WIDTH + 4])
def test_sums_of_heads_are_those_of_least_squares_on_inputs_or_untrained_features(inputs):
    fed, cobo = renamed(0, 3, inputs=inputs), make("cobo")
    r = fed.map(cobo.sum_head, x=fed.initial_model())
    width = min(inputs, WIDTH) + 1
    hessians, slopes = r["hessians"].view(3, FOLDS, width, width), r["slopes"].view(3, FOLDS, width, 4)
    count = hessians.sum(1)[:, -1, -1]  # of the intercept
    np.testing.assert_allclose(count, [40.0] * 3, rtol=1e-5)
    np.testing.assert_allclose(slopes.sum(1)[:, -1].sum(-1), [40.0] * 3, rtol=1e-5)
    assert (torch.linalg.eigvalsh(hessians.double()) > -1e-3).all()
    up = cobo.traffic_of(fed.model)["sum_head"][1]
    assert r["hessians"].shape[1] + r["slopes"].shape[1] == up


def test_other_names_for_classes_are_seen_before_anybody_trains():
    for seed in range(4):
        fed = renamed(seed, 10)
        state = make("cobo").start(fed)
        same = fed.clusters.unsqueeze(1) == fed.clusters
        torch.testing.assert_close(state.weights, (same & ~torch.eye(10, dtype=torch.bool)).float())
        assert "final" not in state
        alike = make("cobo").start(renamed(seed, 10, named=False)).weights
        assert alike.sum() == 90
    assert make("cobo", start_links="all").start(fed).weights.sum() == 90
    assert make("cobo").start(renamed(0, 10, rows=12)).weights.sum() == 90  # too few rows to tell


def test_a_liar_has_no_first_links():
    for lie in ("sign-flip", "large", "random"):
        fed = renamed(0, 10).fresh(byzantine={3: lie})
        weights = make("cobo").start(fed).weights
        assert weights[3].sum() == 0 and weights[0].sum() == 4


@pytest.mark.quick("oracle-clusters")
@pytest.mark.parametrize(("name", "setting"), [("oracle", "clusters"), ("hierarchical", "grouping")])
def test_methods_for_known_clusters_run_on_those_that_are_found(name, setting):
    told = fit(world(), make(name), rounds=20, evaluate_every=0)
    unknown = Federation.from_arrays(XS, YS, models.linear())
    found = fit(unknown, make(name, **{setting: "found"}), rounds=20, evaluate_every=0)
    assert found.state.found_clusters.tolist() == [0, 1] * 3
    torch.testing.assert_close(found.personal, told.personal, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["pfl-tc", "ifca"])
def test_members_that_differ_deploy_the_model_of_their_cluster_and_what_their_rows_add(name):
    rng = np.random.default_rng(1)
    truth = np.repeat([[4.0, 0, 0], [-4.0, 1, 1]], 8, axis=0) + 0.15 * rng.normal(size=(16, D))
    xs = [rng.normal(size=(30, D)) for _ in truth]
    ys = [x @ own + 0.5 * rng.normal(size=30) for x, own in zip(xs, truth, strict=True)]
    run = fit(Federation.from_arrays(xs, ys, models.linear()), make(name), rounds=30, evaluate_every=0)
    state = run.state
    assert len(state.models) == 2 and state.own.any()
    torch.testing.assert_close(run.personal, state.models[state.labels] + state.own)
    alone = np.stack([np.linalg.lstsq(x, y, rcond=None)[0] for x, y in zip(xs, ys, strict=True)])
    error, of_alone = (np.linalg.norm(one - truth, axis=1).mean() for one in (run.personal.numpy(), alone))
    assert error < 0.97 * of_alone
    assert "own" not in fit(world(), make(name), rounds=2).state


@pytest.mark.parametrize("name", ["pfl-tc", "ifca"])
def test_networks_under_other_names_are_told_apart_before_they_train(name):
    fed = renamed(1, 10)
    run = fit(fed, make(name), rounds=2, evaluate_every=0)
    same = run.state.labels.unsqueeze(1) == run.state.labels
    assert torch.equal(same, fed.clusters.unsqueeze(1) == fed.clusters)
    assert run.fed.ledger.total("messages_up", phase="sum_head") == 10


def curved(seed, count=12, apart=0.35, **options):
    """Clients whose targets bend alike, 40 rows each; the slopes of every second one differ a little."""
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(40, 4)).astype(np.float32) for _ in range(count)]
    steep = np.array([2.0, -2.0, 0.0, 0.0], np.float32)
    slopes = [np.array([0, 0, apart * (-1) ** k, 0], np.float32) for k in range(count)]
    ys = [
        (np.abs(x @ steep) + x @ own + 0.2 * rng.normal(size=40)).astype(np.float32)
        for x, own in zip(xs, slopes, strict=True)
    ]
    labels = [k % 2 if apart else 0 for k in range(count)]
    return Federation.from_arrays(xs, ys, models.mlp(hidden=(16,)), clusters=labels, seed=seed, **options)


def test_sums_of_heads_of_numbers_are_those_of_the_residuals_at_the_model_that_is_sent():
    fed = curved(0, count=2)
    x = fed.initial_model() + 0.1
    r = fed.map(make("cobo").sum_head, x=x)
    for k in range(2):
        rows = fed.runtime.train.x[40 * k : 40 * k + 40]
        left = fed.runtime.train.y[40 * k : 40 * k + 40] - fed.model.scores(x, rows).flatten()
        wanted = torch.cat([rows, torch.ones(40, 1)], 1).T @ left
        torch.testing.assert_close(r["slopes"].view(2, FOLDS, 5)[k].sum(0), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.quick("large")
@pytest.mark.parametrize("lie", [None, "large", "sign-flip"])
def test_what_bends_alike_does_not_hide_slopes_that_differ(lie):
    """Least squares on the targets sees one group here; a model for all explains what bends, unless liars move it."""
    found = []
    for seed in range(3):
        fed = curved(seed, byzantine={0: lie} if lie else None)
        labels = make("pfl-tc").groups_by_heads(fed)[1:]
        truth = fed.clusters[1:]
        found.append(torch.equal(labels.unsqueeze(1) == labels, truth.unsqueeze(1) == truth))
    assert sum(found) >= 2
    assert all(int(make("pfl-tc").groups_by_heads(curved(seed, apart=0.0)).max()) == 0 for seed in range(3))


@pytest.mark.slow
def test_networks_of_one_distribution_are_not_split_at_random():
    """The mean of networks that were fitted apart is worse than they are; one that all fitted together is not."""
    for seed in range(4):
        fed = curved(seed, apart=0.0)
        assert int(make("ifca").find_clusters(fed, None).labels.max()) == 0


@pytest.mark.parametrize("name", ["pfl-tc", "ifca", "cobo"])
def test_few_rows_of_classes_that_a_line_separates_are_no_reason_to_part(name):
    """A client that fits its few rows without error shows no noise, so that chance once looked like a difference."""
    rng = np.random.default_rng(0)
    centre = rng.normal(size=20)
    xs = [rng.normal(size=(int(rows), 20)) for rows in rng.integers(12, 60, 10)]
    ys = [(x @ centre + 0.3 * rng.normal(size=len(x)) > 0).astype(float) for x in xs]
    fed = Federation.from_arrays(xs, ys, models.logistic())
    run = fit(fed, make(name), rounds=10)
    assert int(run.algorithm.observe(run.fed, run.state)["clusters_found"]) == 1
    fresh = rng.normal(size=(4000, 20))
    truth = torch.as_tensor(fresh @ centre > 0)
    right = (
        (torch.as_tensor(fresh, dtype=run.personal.dtype) @ run.personal.T > 0) == truth.unsqueeze(1)
    ).double()
    alone = fit(fed, make("local"), rounds=10)
    right_alone = (
        (torch.as_tensor(fresh, dtype=run.personal.dtype) @ alone.personal.T > 0) == truth.unsqueeze(1)
    ).double()
    assert float(right.mean()) > float(right_alone.mean()) + 0.05


def test_classes_of_many_features_under_other_names_are_told_apart_by_fits():
    """Softmax with more parameters than sums are sent for: linked all at first, nobody was ever told apart."""
    rng = np.random.default_rng(1)
    means = 2.0 * rng.normal(size=(5, 15))
    xs, ys = [], []
    for k in range(8):
        label = rng.integers(0, 5, 50)
        xs.append(means[label] + rng.normal(size=(50, 15)))
        ys.append((label + 2 * (k % 2)) % 5)
    fed = Federation.from_arrays(xs, ys, models.softmax(), clusters=[0, 1] * 4)
    assert not sends_sums(fed)
    state = make("cobo").start(fed)
    same = fed.clusters.unsqueeze(1) == fed.clusters
    assert torch.equal(state.weights > 0, same & ~torch.eye(8, dtype=torch.bool))


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_a_softmax_with_few_rows_keeps_clusters_with_other_names_apart(seed):
    """It has three columns of parameters for three classes, but the loss moves in two directions for each input."""
    draw = torch.Generator().manual_seed(seed)
    names = [torch.tensor(order) for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1])]
    blobs = 2.0 * torch.randn(3, 4, generator=draw)
    xs, ys = [], []
    for k in range(12):
        kind = torch.randint(3, (24,), generator=draw)
        xs.append(blobs[kind] + torch.randn(24, 4, generator=draw))
        ys.append(names[k % 3][kind])
    fed = Federation.from_arrays(xs, ys, models.softmax(intercept=True))
    run = fit(fed, make("pfl-tc"), rounds=1, evaluate_every=0)
    assert run.state.labels.tolist() == [0, 1, 2] * 4

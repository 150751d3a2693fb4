"""FTFA, RTFA, MAML-FL, pFedMe and local against the closed forms of their limits."""

import pytest
import torch

from coterie import Federation, fit, models
from coterie._core import randomness
from coterie._core.errors import SettingError
from coterie.algorithms import FTFA, RTFA, FedAvg, FineTuned, Local, MamlFL, PFedMe
from coterie.data import generate
from coterie.data.rows import Rows
from coterie.theory import filters

CLIENTS = generate.random_effects(
    10, 5, [3, 4, 8, 3, 5, 4, 9, 3, 4, 6], r2=1.0, rho2=2.0, sigma2=0.25, seed=4
)
SHARES = CLIENTS.sizes.tolist()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def federation(**options):
    return Federation.from_clients(CLIENTS, models.linear(), **options)


def centre(g):
    return filters.centre(CLIENTS.xs, CLIENTS.ys, g, SHARES)


def personal(middle, f):
    pairs = zip(CLIENTS.xs, CLIENTS.ys, strict=True)
    return torch.stack([filters.personal(x, y, middle, f) for x, y in pairs])


def close(found, expected):
    assert float((found - expected).norm() / expected.norm()) <= 1e-6


AVERAGE = {"lr": 0.25, "steps": 1, "batch": 0}
GLOBAL = {
    "fedavg": (FedAvg(**AVERAGE), filters.average()),
    "fedavg, 3 steps": (FedAvg(lr=0.25, steps=3, batch=0), filters.average(3, 0.25)),
    "maml free, narrow": (MamlFL(**AVERAGE, alpha=0.1, delta=1e-5), filters.maml(0.1)),
    "maml free, wide": (MamlFL(**AVERAGE, alpha=0.1, delta=1e-3), filters.maml(0.1)),
    "maml exact": (MamlFL(**AVERAGE, alpha=0.1, hessian="exact"), filters.maml(0.1)),
    "maml exact, 3 steps": (
        MamlFL(lr=0.25, steps=3, batch=0, alpha=0.1, hessian="exact"),
        filters.maml(0.1, 3, 0.25),
    ),
    "maml first order": (
        MamlFL(**AVERAGE, alpha=0.1, hessian="first-order"),
        filters.maml(0.1, first_order=True),
    ),
    "pfedme": (PFedMe(lr=0.5, lam=1.5, steps=1, inner_steps=0, batch=0), filters.proximal(1.5)),
    "pfedme, beta 2": (
        PFedMe(lr=0.25, lam=1.5, beta=2.0, steps=1, inner_steps=0, batch=0),
        filters.proximal(1.5),
    ),
    "pfedme, 3 steps": (
        PFedMe(lr=0.5, lam=1.5, steps=3, inner_steps=0, batch=0),
        filters.proximal(1.5, 3, 0.5),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GLOBAL)
def test_shared_models_converge_to_their_filter(name):
    algorithm, g = GLOBAL[name]
    run = fit(federation(), algorithm, rounds=500, evaluate_every=0)
    close(run.state.x, centre(g))


def test_filters_differ():
    limits = [centre(g) for _, g in GLOBAL.values()]
    distinct = [0, 1, 2, 5, 6, 7, 9]
    for i in distinct:
        for j in distinct:
            assert i == j or float((limits[i] - limits[j]).norm()) > 1e-3


PERSONAL = {
    "ftfa exact": (FTFA(**AVERAGE, tuning="exact"), filters.interpolate),
    "ftfa epochs": (FTFA(**AVERAGE, tuning_lr=0.2, tuning_epochs=7), filters.stopped(0.2, 7)),
    "fine-tuned": (FineTuned(**AVERAGE, tuning_lr=0.2, tuning_steps=7), filters.stopped(0.2, 7)),
    "rtfa exact": (RTFA(**AVERAGE, tuning="exact", lam=0.7), filters.ridge(0.7)),
    "rtfa epochs": (RTFA(**AVERAGE, tuning_lr=0.2, tuning_epochs=300, lam=0.7), filters.ridge(0.7)),
    "fedavg": (FedAvg(**AVERAGE), filters.nothing),
}


@pytest.mark.parametrize("name", PERSONAL)
def test_personal_models_converge_to_their_filter(name):
    algorithm, f = PERSONAL[name]
    close(
        fit(federation(), algorithm, rounds=400, evaluate_every=0).personal,
        personal(centre(filters.average()), f),
    )


def test_maml_and_pfedme_personalise_their_own_centre():
    tuned = MamlFL(**AVERAGE, alpha=0.1, hessian="exact", tuning="exact")
    found = fit(federation(), tuned, rounds=500, evaluate_every=0).personal
    close(found, personal(centre(filters.maml(0.1)), filters.interpolate))
    prox = PFedMe(lr=0.5, lam=1.5, steps=1, inner_steps=0, batch=0)
    found = fit(federation(), prox, rounds=400, evaluate_every=0).personal
    close(found, personal(centre(filters.proximal(1.5)), filters.ridge(1.5)))


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_pfedme_goes_beta_times_the_way_to_the_average(beta):
    """The fixed point does not depend on beta, a round does."""
    whole, part = (
        fit(federation(), PFedMe(lr=0.5, lam=1.5, steps=2, inner_steps=0, batch=0, beta=one), rounds=1)
        for one in (1.0, beta)
    )
    first = federation().initial_model()
    torch.testing.assert_close(part.state.x - first, beta * (whole.state.x - first))


def test_pfedme_inner_steps_approach_the_solution():
    stepped = PFedMe(lr=0.5, lam=1.5, steps=1, inner_steps=200, inner_lr=0.1, batch=0)
    found = fit(federation(), stepped, rounds=60, evaluate_every=0)
    solved = fit(federation(), stepped.replace(inner_steps=0), rounds=60, evaluate_every=0)
    close(found.personal, solved.personal)


@pytest.mark.parametrize("ridge", [0.0, 0.4])
def test_local_and_ridge_local(ridge):
    zero = torch.zeros(5, dtype=torch.float64)
    exact = fit(federation(), Local(exact=True, ridge=ridge), rounds=1, evaluate_every=0)
    close(exact.personal, personal(zero, filters.ridge(ridge) if ridge else filters.interpolate))
    assert exact.fed.ledger.total("floats_up") == exact.fed.ledger.total("floats_down") == 0
    stepped = fit(federation(), Local(lr=0.2, steps=200, batch=0, ridge=ridge), rounds=10, evaluate_every=0)
    close(stepped.personal, personal(zero, filters.ridge(ridge) if ridge else filters.stopped(0.2, 2000)))


def test_local_steps_reach_the_smallest_interpolator():
    made = generate.random_effects(4, 5, [1, 2, 40, 60], r2=1.0, rho2=2.0, sigma2=0.25, seed=4)
    fed = Federation.from_clients(made, models.linear())
    stepped = fit(fed, Local(lr=0.15, steps=100, batch=0), rounds=10, evaluate_every=0)
    close(stepped.personal, fit(fed, Local(exact=True), rounds=1, evaluate_every=0).personal)


def classes(**options):
    keys = randomness.key(5, torch.arange(120))
    x = randomness.normal(randomness.slots(keys, 4))
    y = ((x @ torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=x.dtype)) + randomness.normal(keys) > 0).double()
    return Federation.from_arrays(x.split(20), y.split(20), models.logistic(l2=0.01), **options)


@pytest.mark.parametrize("batch", [0, 8])
def test_free_step_matches_the_exact_product(batch):
    exact = MamlFL(lr=0.3, steps=4, alpha=0.2, hessian="exact", batch=batch)
    reference = fit(classes(), exact, rounds=5, evaluate_every=0).state.x
    for delta in (1e-3, 1e-5):
        free = fit(classes(), exact.replace(hessian="free", delta=delta), rounds=5, evaluate_every=0).state.x
        assert float((free - reference).norm() / reference.norm()) <= 1e-4
    first = fit(classes(), exact.replace(hessian="first-order"), rounds=5, evaluate_every=0).state.x
    assert float((first - reference).norm() / reference.norm()) > 1e-4


@pytest.mark.parametrize("hessian", ["free", "first-order", "exact"])
def test_without_looking_ahead_maml_is_fedavg(hessian):
    settings = {"lr": 0.3, "steps": 4, "batch": 0}
    average = fit(classes(), FedAvg(**settings), rounds=6, evaluate_every=0).state.x
    for alpha, gap in ((0.0, 1e-15), (1e-9, 1e-7)):
        found = fit(
            classes(), MamlFL(**settings, alpha=alpha, hessian=hessian), rounds=6, evaluate_every=0
        ).state.x
        assert float((found - average).norm() / average.norm()) <= gap


def test_steps_make_ftfa_the_plain_baseline():
    same = {"lr": 0.3, "steps": 2, "batch": 8, "tuning_lr": 0.1, "tuning_steps": 9}
    plain = fit(classes(), FineTuned(**same), rounds=4, evaluate_every=0).personal
    assert torch.equal(
        fit(classes(), FTFA(**same, tuning="steps"), rounds=4, evaluate_every=0).personal, plain
    )


def test_epochs_follow_the_rows_of_each_client():
    sizes = (4, 9, 30)
    xs = [torch.ones(n, 1, dtype=torch.float64) for n in sizes]
    ys = [torch.zeros(n, dtype=torch.float64) for n in sizes]
    fed = Federation.from_arrays(xs, ys, models.linear())
    algorithm = FTFA(batch=8, tuning_lr=0.5, tuning_epochs=2)
    # the gradient is x itself: every step halves it
    fed.enter_round(0, None)
    halved = fed.map(algorithm.deploy, x=torch.ones(1, dtype=torch.float64)).values[:, 0]
    assert halved.tolist() == [0.5 ** (2 * k) for k in (1, 2, 4)]


def test_exact_tuning_needs_least_squares():
    with pytest.raises(SettingError, match="least squares"):
        fit(classes(), FTFA(tuning="exact"), rounds=1)
    ridge = fit(classes(), RTFA(tuning="exact", lam=0.5), rounds=1)
    assert torch.isfinite(ridge.personal).all()


@pytest.mark.slow
def test_maml_trains_a_network():
    keys = randomness.key(6, torch.arange(60))
    x, y = randomness.normal(randomness.slots(keys, 3)).float(), torch.arange(60) % 2
    fed = Federation.from_arrays(x.split(20), y.split(20), models.mlp(hidden=(4,), stacked=True))
    runs = [
        fit(fed, MamlFL(alpha=0.1, lr=0.2, steps=3, hessian=kind, batch=8), rounds=3, evaluate_every=0)
        for kind in ("exact", "free")
    ]
    assert torch.allclose(runs[0].state.x, runs[1].state.x, atol=1e-4)


def test_a_minibatch_that_is_looked_at_again_is_drawn_once(monkeypatch):
    drawn, take = [], Rows.take

    def counted(self, rows, weight, keys):
        drawn.append(rows)
        return take(self, rows, weight, keys)

    monkeypatch.setattr(Rows, "take", counted)
    fed = federation()
    fit(fed, PFedMe(steps=4, inner_steps=5, batch=2), rounds=1, evaluate_every=0)
    assert len(drawn) == 4
    drawn.clear()
    fit(fed, MamlFL(steps=4, batch=2, tuning_epochs=0), rounds=1, evaluate_every=0)
    assert len(drawn) == 12  # a step, one from the place looked ahead, and a pair for the difference

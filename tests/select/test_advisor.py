"""The advisor against worlds whose truth is known, and what it says when it cannot know."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import coterie
from coterie import Federation, models
from coterie._core import randomness
from coterie._core.errors import SettingError
from coterie.models import heads
from coterie.select import survey
from coterie.select.advice import METHODS, algorithm, conclude
from coterie.select.advise import advise
from coterie.select.synthetic_worlds import judge, make_world, random_world, regret
from coterie.theory import filters, held_out

SHARED = Path(coterie.__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def simple(seed=0, **changes):
    settings = {"clients": 60, "features": 100, "gamma": 2.0, "sigma2": 0.5, "r2": 1.0, "centre2": 1.0}
    return make_world(np.random.default_rng(seed), **{**settings, **changes})


@pytest.mark.parametrize("rows", [3, 12])
def test_profile_is_the_residual_in_the_eigenbasis(rows):
    draw = np.random.default_rng(rows)
    x, e = torch.from_numpy(draw.normal(size=(rows, 5))), torch.from_numpy(draw.normal(size=rows))
    padded = torch.cat([x, torch.zeros(4, 5)]), torch.cat([e, torch.zeros(4)])
    found = held_out.profile(*padded, torch.tensor([float(rows)]))
    assert float(found.count.sum()) == rows
    assert float((found.count * found.square).sum()) == pytest.approx(float(e @ e))
    assert float((found.count * found.k * found.square).sum()) == pytest.approx(float(e @ x @ x.T @ e))
    assert float((found.count * found.k**2).sum()) == pytest.approx(float((x @ x.T).square().sum()))


@pytest.mark.parametrize("rows", [30, 150])
def test_predicted_error_is_the_true_one(rows):
    """With the true variances, smoothed GCV gives the test error of ridge around a centre."""
    draw = np.random.default_rng(1)
    d, r2, s2, lam = 60, 1.0, 0.5, torch.tensor([0.0, 0.05, 0.5, 5.0, math.inf], dtype=torch.float64)
    predicted, measured = [], []
    for _ in range(40):
        x = torch.from_numpy(draw.normal(size=(rows, d)))
        own = torch.from_numpy(draw.normal(size=d) * math.sqrt(r2 / d))
        y = x @ own + math.sqrt(s2) * torch.from_numpy(draw.normal(size=rows))
        seen = held_out.profile(x, y, torch.tensor([float(rows)]))
        predicted.append(held_out.errors(seen, r2 / d * seen.k + s2, lam))
        zero = torch.zeros(d, dtype=torch.float64)
        fits = [filters.personal(x, y, zero, filters.ridge(value)) for value in lam[1:-1].tolist()]
        fits = [filters.personal(x, y, zero, filters.interpolate), *fits, zero]
        measured.append(torch.stack([(fit - own).square().sum() + s2 for fit in fits]))
    ratio = torch.stack(predicted).mean(0) / torch.stack(measured).mean(0)
    assert ratio.tolist() == pytest.approx([1.0] * 5, rel=0.1)


def check_lambda(seeds, gap, excess, **changes):
    gaps, regrets = [], []
    for seed in seeds:
        world = simple(seed, **changes)
        advice = advise(world.federation())
        gaps += torch.log(advice.lam_shared / world.best_lambda).abs().tolist()
        regrets.append(regret(world, advice))
    assert np.median(gaps) <= gap
    assert np.mean(regrets) <= excess


@pytest.mark.slow
def test_homogeneous_clients_get_nearly_the_best_lambda():
    check_lambda(range(1), gap=0.4, excess=0.03, features=50)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gap", "excess", "changes"),
    [
        (0.15, 0.01, {}),
        (0.35, 0.02, {"r2": 0.05}),
        (0.6, 0.07, {"spread": 1.0, "row_spread": 0.5}),
        (math.inf, 0.10, {"covariance": "power", "aligned": True}),
    ],
    ids=["alike", "nearly identical", "spread", "aligned"],
)
def test_lambda_in_the_worlds_of_the_facts(gap, excess, changes):
    check_lambda(range(4), gap, excess, **changes)


@pytest.mark.slow
def test_estimates_of_noise_and_distance():
    advice = advise(simple(7, clients=40).federation())
    assert float(advice.sigma2.mean()) == pytest.approx(0.5, rel=0.25)
    assert float(advice.r2.mean()) == pytest.approx(1.1, rel=0.15)  # 1 and the error of the shared model
    assert float(advice.rho2.mean()) == pytest.approx(2.0, rel=0.15)
    assert float(advice.gamma.mean()) == 2.0
    low, high = advice.intervals["rtfa"].unbind(1)
    assert bool((low <= advice.risks["rtfa"]).all() and (advice.risks["rtfa"] <= high).all())


def summary(kind, seeds):
    scores = [judge(random_world(seed, kind))[0] for seed in seeds]
    names = ("exact", "within", "log_excess", "three", "lead")
    joined = {name: torch.cat([getattr(score, name) for score in scores]) for name in names}
    found = {name: float(joined[name].mean()) for name in names[:-1]}
    found["three_clear"] = float(joined["three"][joined["lead"] >= 0.2].mean())
    found["federation"] = float(np.mean([score.federation for score in scores]))
    found["near"] = float(np.mean([score.excess <= 0.1 for score in scores]))
    return found


@pytest.mark.quick("few")
@pytest.mark.parametrize("kind", [pytest.param("middling", marks=pytest.mark.slow), "wide", "few"])
def test_a_few_random_worlds(kind):
    found = summary(kind, range(900, 904))
    assert found["within"] >= 0.82
    assert found["log_excess"] <= 0.1


BARS = {"exact": 0.75, "within": 0.82, "federation": 0.90}
FLOORS = {  # wide and few do not reach all bars (docs/evidence/advisor.md): these keep what was measured
    "reference": BARS,
    "even": BARS,
    "middling": BARS,
    "wide": {**BARS, "federation": 0.86},
    "few": {"exact": 0.65, "within": 0.80, "federation": 0.75},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FLOORS)
def test_eighty_random_worlds(kind):
    found = summary(kind, range(5000, 5080))
    print(kind, {name: round(value, 3) for name, value in found.items()})
    assert all(found[name] >= bar for name, bar in FLOORS[kind].items()), found
    assert found["log_excess"] <= (0.065 if kind == "few" else 0.06)
    assert found["three_clear"] >= 0.88


def test_clear_cases():
    alike = advise(simple(r2=0.01, centre2=4.0, features=40, clients=30).federation())
    assert alike.method in ("rtfa", "fedavg")
    assert alike.sure
    strangers = advise(simple(centre2=0.0, r2=4.0, clients=20, features=40).federation())
    assert strangers.method == "ridge-local"
    assert strangers.sure
    assert "clients" in strangers.text() or "common" in strangers.text()


def test_it_says_when_it_cannot_tell():
    three = advise(simple(clients=3, gamma=1.0).federation())
    assert not three.sure
    assert three.verdict().startswith("I cannot tell")
    assert "too few" in three.text()


def few_rows(tmp_path):
    table = tmp_path / "few.csv"
    table.write_text("site,x,y\na,1,2\na,2,3\nb,3,4\nb,4,5\n")
    return Federation.from_table(table, "site", "y")


def no_relation(_):
    draw = np.random.default_rng(2)
    xs = [draw.normal(size=(4, 2)) for _ in range(6)]
    ys = [draw.normal(size=4) + 3 * draw.normal() for _ in xs]
    return Federation.from_arrays(xs, ys, model=models.linear())


@pytest.mark.parametrize("world", [few_rows, no_relation])
def test_training_alone_has_a_penalty_with_an_end(world, tmp_path):
    """An endless penalty around zero is no method, and it once turned into advice to share one model."""
    fed = world(tmp_path)
    advice = advise(fed, probe=0)
    assert {advice.method, *advice.methods} == {"ridge-local"}
    assert advice.lams.isfinite().all() and math.isfinite(advice.lam)
    coterie.fit(fed, advice.algorithm(fed), rounds=1)


def test_one_client_has_nobody_to_collaborate_with():
    with pytest.raises(SettingError, match="nobody"):
        advise(simple(clients=1).federation())


def test_advice_is_metered_and_leaves_the_federation_alone():
    fed = simple(clients=12, features=30).federation()
    advice = advise(fed)
    assert not fed.ledger.entries
    assert 0 < advice.floats_up < 200 * fed.d
    found = survey.Survey().carry_out(fresh := start(fed))
    phases = {entry.phase for entry in fresh.ledger.entries}
    assert phases == {
        "moments",
        "look_without_me",
        "sums",
        "weigh",
        "lean",
        "predict_exactly",
        "gains",
        "outlook",
    }
    assert fresh.ledger.total("floats_up", phase="moments") / fed.n == 30 * 31 / 2 + 30 + 1
    beyond = sum(fresh.ledger.total("floats_up", phase=phase) for phase in phases - {"moments"}) / fed.n
    assert beyond < 1600
    assert found.clients == 12


def test_halves_of_the_clients_where_matrices_would_be_too_large(monkeypatch):
    monkeypatch.setattr(survey, "MOST_COLUMNS", 20)
    fed = simple(clients=30, features=30, gamma=1.0, centre2=2.0).federation()
    found = survey.Survey().carry_out(fresh := start(fed))
    phases = {entry.phase for entry in fresh.ledger.entries}
    assert phases == {"slope", "look", "sums", "weigh", "lean", "predict", "outlook"}
    assert found.support > found.doubt
    assert not found.exact
    assert advise(fed).method == "rtfa"


def test_what_phases_send_is_what_they_declare(monkeypatch):
    worlds = [
        simple(clients=6, features=10),
        simple(clients=6, features=10, covariance="power", aligned=True),
    ]
    seen = set()
    for world, most in ((worlds[0], 300), (worlds[1], 300), (worlds[0], 5)):
        monkeypatch.setattr(survey, "MOST_COLUMNS", most)
        fed = start(world.federation())
        conclude(fed, survey.Survey().carry_out(fed))
        declared = survey.Survey().traffic_of(fed.model)
        for phase in {entry.phase for entry in fed.ledger.entries}:
            visits = fed.ledger.total("messages_up", phase=phase)
            for k, way in enumerate(("floats_down", "floats_up")):
                assert fed.ledger.total(way, phase=phase) == declared[phase][k] * visits, (phase, way)
            seen.add(phase)
    assert seen | {"predict_left_out"} == set(survey.Survey.reveals)


def start(fed):
    fed = fed.fresh()
    fed.enter_round(0, None)
    return fed


def test_the_same_over_nodes_that_speak_bytes():
    from coterie.deploy.loopback import LoopbackRuntime

    fed = simple(clients=8, features=12).federation()
    here, there = advise(fed), advise(LoopbackRuntime.split(fed, 3))
    assert here.method == there.method
    assert here.floats_up == there.floats_up
    assert torch.allclose(here.risks["rtfa"], there.risks["rtfa"], rtol=1e-6)


def classes(kinds, clients=12, rows=60, different=0.0, **options):
    draw = np.random.default_rng(3)
    weights = draw.normal(size=(kinds, 6))
    xs, ys = [], []
    for _ in range(clients):
        own = weights + different * draw.normal(size=weights.shape)
        x = draw.normal(size=(rows, 6))
        ys.append(torch.from_numpy((x @ own.T + draw.gumbel(size=(rows, kinds))).argmax(1)))
        xs.append(torch.from_numpy(x))
    model = models.logistic(l2=1e-3) if kinds == 2 else models.softmax(l2=1e-3)
    return Federation.from_arrays(xs, ys, options.pop("model", model), split=(0.6, 0.2, 0.2), **options)


@pytest.mark.parametrize("kinds", [2, 4])
def test_classes_are_linearised_and_probed(kinds):
    alike = advise(classes(kinds), probe=10)
    assert alike.method in ("fedavg", "rtfa", "ftfa")
    assert any("probe" in reason for reason in alike.why)
    apart = advise(classes(kinds, different=4.0, rows=120), probe=10)
    assert apart.method in ("local", "ridge-local", "rtfa")
    quiet = advise(classes(kinds), probe=0)
    assert not any("probe" in reason for reason in quiet.why)
    known = kinds == 2  # logistic worlds are calibrated, softmax ones are not
    assert bool(quiet.intervals["rtfa"].isnan().all()) != known and math.isnan(quiet.sharing) != known
    assert math.isnan(quiet.probability) and ("with probability" in quiet.verdict()) == known


def test_the_last_layer_of_a_network_is_surveyed_and_probed():
    fed = classes(3, clients=6, model=models.mlp(hidden=(8,), stacked=True), dtype=torch.float32)
    advice = advise(fed, probe=10)
    assert advice.method in METHODS
    assert torch.isfinite(advice.r2).all()
    assert advice.gamma.tolist() == pytest.approx([9 / 36] * 6)
    assert any("probe" in reason for reason in advice.why)
    assert advice.floats_up > 0
    with pytest.raises(SettingError, match="validation"):
        advise(fed, probe=0)


def test_features_are_what_reaches_the_last_layer():
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    model = models.mlp(hidden=(4,)).fit_to(x.flatten(0, 1), torch.arange(10) % 3)
    w = model.initial(0, torch.float32)
    phi, head = heads.features(model, w, x, 2), heads.head_of(model)
    last = torch.cat([w[-15:-3].view(3, 4), w[-3:, None]], 1)
    assert head is not None and head.d == 15
    assert torch.allclose(head.scores(last.flatten(), phi), model.scores(w.expand(2, -1), x), atol=1e-6)


def test_a_network_without_a_last_linear_layer_is_probed():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(6, 3))

        def forward(self, x):
            return x @ self.weight

    fed = classes(3, clients=6, model=models.network(Odd, stacked=True), dtype=torch.float32)
    advice = advise(fed, probe=10)
    assert advice.method in METHODS
    assert math.isnan(float(advice.sigma2[0]))


def test_linearised_rows_are_the_newton_problem():
    """Features and residuals reproduce gradient and curvature of the logistic loss."""
    draw = np.random.default_rng(5)
    x, w = torch.from_numpy(draw.normal(size=(20, 4))), torch.from_numpy(draw.normal(size=4))
    y, weight = (
        torch.from_numpy(draw.integers(0, 2, 20)).double(),
        torch.full((20,), 0.05, dtype=torch.float64),
    )
    model = models.logistic().fit_to(x, y)
    features, residual = heads.linearised(model, w, x, y, weight)
    slope = -(features.mT @ residual.unsqueeze(-1)).squeeze() / 20
    assert torch.allclose(slope, model.grad(w, x, y, weight), atol=1e-10)
    assert torch.allclose((features.mT @ features).squeeze() / 20, model.hessian(w, x, y, weight), atol=1e-10)


def test_recommended_method_can_be_fitted():
    fed = simple(clients=20, features=20, gamma=0.5).federation()
    advice = coterie.advise(fed)
    run = coterie.fit(fed, advice.algorithm(fed), rounds=100, evaluate_every=0)
    assert torch.isfinite(run.personal).all()
    for method in METHODS:
        assert coterie.fit(fed, algorithm(method, 0.5, fed), rounds=2, evaluate_every=0).personal.shape == (
            20,
            20,
        )


def test_command(command, tmp_path):
    done = command(
        "advise", "heart_disease", "--client", "hospital", "--target", "sick", "--json", tmp_path / "a.json"
    )
    assert done.code == 0
    assert "lambda" in done.out or "cannot tell" in done.out
    assert "floats up" in done.out
    import json

    found = json.loads((tmp_path / "a.json").read_text())
    assert {"method", "sure", "why", "change", "clients"} <= found.keys()
    assert len(found["clients"]) == 4
    assert any("probe" in reason for reason in found["why"])
    quick = ("--probe", 0, "--json", tmp_path / "quick.json")
    assert command("advise", "heart_disease", "--client", "hospital", "--target", "sick", *quick).code == 0
    assert not any("probe" in reason for reason in json.loads((tmp_path / "quick.json").read_text())["why"])


TABLES = {
    "heart disease": ("heart_disease", {"client": "hospital", "target": "sick"}),
    "MathAchieve": (
        "hierarchical/MathAchieve.csv",
        {"client": "School", "target": "MathAch", "drop": ["rownames"]},
    ),
    "Exam": (
        "hierarchical/Exam.csv",
        {"client": "school", "target": "normexam", "drop": ["rownames", "student"]},
    ),
    "InstEval": (
        "hierarchical/InstEval.csv",
        {"client": "d", "target": "y", "drop": ["rownames", "s"], "task": "regression"},
    ),
    "donations": (
        "donations/pva97nk.csv",
        {"client": "DemCluster", "target": "TARGET_B", "drop": ["ID", "TARGET_D"]},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_real_tables(name):
    """Never worse than the better of local and global by more than 2 % test error, over three splits."""
    path, columns = TABLES[name]
    if "/" in path and not (SHARED / path).exists():
        pytest.skip(f"needs {path} of ../shared/data")
    errors = {"local": [], "fedavg": [], "advice": []}
    for seed in range(3):
        fed = Federation.from_table(SHARED / path if "/" in path else path, seed=seed, **columns)
        advice = advise(fed)
        for key, method, lam in (
            ("local", "local", None),
            ("fedavg", "fedavg", None),
            ("advice", advice.method, advice.lam),
        ):
            run = coterie.fit(fed, algorithm(method, lam, fed), rounds=200, evaluate_every=0)
            errors[key].append(error_of(run))
    better = min(np.mean(errors["local"]), np.mean(errors["fedavg"]))
    slack = 1.02 * better if fed.model.task == "regression" else better + 0.02
    assert np.mean(errors["advice"]) <= slack, errors


def error_of(run):
    metric = "rmse" if run.fed.model.task == "regression" else "accuracy"
    value = float(run.score("test", metric).nanmean())
    return value if metric == "rmse" else 1 - value


def test_randomness_of_halves_is_the_seed():
    fed = simple(clients=10, features=8).federation()
    assert advise(fed).floats_up == advise(fed).floats_up
    assert randomness.permutation(randomness.key(fed.seed, "advisor"), 4).shape == (4,)

"""Differential privacy: noise and sensitivity by definition, accounting in closed form, and what costs nothing."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import pytest
import torch
from scipy.stats import norm

from coterie import Algorithm, Federation, State, fit, models, resume
from coterie._core.errors import RunError, SettingError
from coterie.algorithms import make
from coterie.engine import accounting
from coterie.engine.noise import Noise, fingerprint
from coterie.engine.privacy import BudgetSpent, ClientPrivacy, NoiseScale, Privacy, private_sum
from coterie.engine.protocol import Call
from coterie.engine.row_privacy import RowPrivacy, row_gradients
from coterie.engine.sums import HeldByClients, SumRequest, SumsOnly
from coterie.train import private
from coterie.train.uncertainty import load_errors

pytest.importorskip("dp_accounting")

BUDGET = Privacy(4.0, 1e-3)


def world(n=24, rows=40, d=4, apart=1.0, seed=0, split=(0.5, 0.0, 0.5), model=None):
    """Clients whose slopes are a common one plus their own."""
    g = torch.Generator().manual_seed(seed)
    slopes = torch.randn(d, generator=g) + apart * torch.randn(n, d, generator=g)
    x = torch.randn(n, rows, d, generator=g)
    y = ((x * slopes[:, None]).sum(-1) + 0.3 * torch.randn(n, rows, generator=g) > 0).long()
    options = {"split": split, "dtype": torch.float64}
    return Federation.from_arrays(list(x.double()), list(y), model or models.logistic(l2=1e-3), **options)


def exact_epsilon(noise: float, delta: float) -> float:
    """The privacy of one Gaussian sum in closed form (Balle, Wang, ICML 2018), by bisection."""

    def spent(e):
        return norm.cdf(0.5 / noise - e * noise) - math.exp(e) * norm.cdf(-0.5 / noise - e * noise)

    low, high = 0.0, 100.0
    for _ in range(100):
        low, high = ((low, (low + high) / 2)) if spent((low + high) / 2) < delta else ((low + high) / 2, high)
    return high


@pytest.mark.parametrize("noise,times", [(0.8, 1), (3.0, 1), (5.0, 30)])
def test_accounting_of_gaussian_sums_is_the_closed_form(noise, times):
    found = accounting.epsilon(noise, times, 1e-5)
    assert found == pytest.approx(exact_epsilon(noise / math.sqrt(times), 1e-5), rel=1e-4)
    assert accounting.noise_for(found, 1e-5, times) == pytest.approx(noise, rel=2e-3)


def test_sampling_rows_makes_the_same_noise_cheaper():
    whole, part = accounting.epsilon(2.0, 50, 1e-5), accounting.epsilon(2.0, 50, 1e-5, 0.05)
    assert part < 0.3 * whole
    target = accounting.noise_for(1.0, 1e-5, 50, 0.05)
    assert 0.99 < accounting.epsilon(target, 50, 1e-5, 0.05) <= 1.0


@pytest.mark.parametrize(
    "bad", [{"epsilon": 0}, {"epsilon": math.inf}, {"delta": 1.0}, {"unit": "all"}, {"clip": 0}]
)
def test_what_is_no_budget(bad):
    with pytest.raises(SettingError):
        Privacy(**{"epsilon": 1.0, **bad})


def test_noise_is_normal_and_its_own():
    noise = Noise(b"k" * 32)
    draws = noise.normal("use", 200_000)
    assert abs(float(draws.mean())) < 0.01 and float(draws.std()) == pytest.approx(1.0, abs=0.01)
    assert float((draws.abs() > 3).double().mean()) == pytest.approx(0.0027, rel=0.2)
    assert not torch.equal(draws[:9], Noise(b"l" * 32).normal("use", 9))
    assert fingerprint("a", torch.ones(2)) != fingerprint("a", torch.zeros(2))


@dataclass(frozen=True)
class Shift(Algorithm):
    """Returns a move of what it was sent (made for tests, 2026)."""

    starts_from = {"train": "x"}  # noqa: RUF012

    def train(self, client, x):
        return x


def place(values, x):
    call = Call(Shift(), "train", 1, 0, {"x": x}, {})
    return HeldByClients({"": values}, torch.arange(len(values)), torch.ones(len(values), 1), call)


def test_one_client_changes_a_sum_by_at_most_the_clip_norm():
    """The noise is the same in both, so the difference is what the sum itself gives away."""
    g = torch.Generator().manual_seed(1)
    x, moves = torch.randn(5, generator=g).double(), torch.randn(8, 5, generator=g).double()
    scale, request = NoiseScale.of(replace(BUDGET, rounds=3), 8), SumRequest("", True, clip=0.7)

    def total(values):
        return private_sum(place(values, x), request, scale, Noise(b"k" * 32))

    base = total(x + moves)
    for change in (1e-3, 1.0, 1e9):
        other = x + moves
        other[2] = x + change * moves[2]
        without = total(torch.cat([x + moves[:2], x.unsqueeze(0), x + moves[3:]]))
        assert float((total(other) - without)[:-1].norm()) <= 0.7 + 1e-9
        assert abs(float((total(other) - base)[-1])) <= 1 + 1e-9
    moved = private_sum(place(x + moves, x), request, replace(scale, values=0.0, count=0.0), Noise(b"k" * 32))
    length = moves.norm(dim=1, keepdim=True)
    torch.testing.assert_close(moved[:-1], (moves * (0.7 / length).clamp(max=1)).sum(0))
    assert float(moved[-1]) == float(((length <= 0.7).double() - 0.5).sum())


def test_parts_of_the_noise_add_up_to_what_is_paid_for():
    scale, request = NoiseScale.of(replace(BUDGET, rounds=3), 8), SumRequest("", True, clip=0.5)
    x = torch.zeros(20_000, dtype=torch.float64)
    parts = [private_sum(place(x.repeat(1, 1), x), request, scale, Noise(), among=6) for _ in range(6)]
    drawn = torch.stack(parts).sum(0)[:-1]
    assert float(drawn.std()) == pytest.approx(scale.values * 0.5, rel=0.03)
    assert (scale.values**-2 + (2 * scale.count) ** -2) ** -0.5 == pytest.approx(scale.whole)


def test_the_clip_norm_finds_the_median():
    fed = world(n=200, rows=8)
    run = fit(fed, make("fedavg", lr=0.1, steps=1, batch=0), rounds=60, privacy=Privacy(200.0, 1e-2))
    x = run.state.x
    moves = fed.map(make("fedavg", lr=0.1, steps=1, batch=0).train, x=x).values - x
    assert run.fed.privacy.clips["train"] == pytest.approx(float(moves.norm(dim=1).median()), rel=0.25)


def test_what_was_spent_is_at_most_what_was_promised_and_is_written(tmp_path):
    fed = world()
    for unit in ("client", "row"):
        run = fit(fed, "fedavg", rounds=4, privacy=replace(BUDGET, unit=unit), out=tmp_path / unit)
        spent = private.spent(run.fed)
        assert 3.9 < float(spent.max()) <= 4.0 and spent.shape == (24,)
        stored = json.loads((tmp_path / unit / "privacy.json").read_text())
        assert len(stored["spent"]) == 24 and stored["unit"] == unit
        assert "Privacy of every" in private.explain(run.fed)
        assert (
            run.history.at(run.deployed_round, "train", "loss") is None
        )  # of training rows nothing else leaves
    few = fit(fed, make("fedavg", participation=0.5), rounds=4, privacy=BUDGET)
    assert float(private.spent(few.fed).min()) < 4.0  # those who were asked less often paid less


@pytest.mark.parametrize("unit", ["client", "row"])
def test_nothing_reads_training_rows_once_more_without_noise(tmp_path, unit):
    """Models trained again, standard errors and drift would; a run without privacy writes the errors."""
    fed, budget = world(split=(0.6, 0.2, 0.2)), replace(BUDGET, unit=unit)
    with pytest.raises(SettingError, match="without noise"):
        fit(fed, "fedavg", rounds=2, privacy=budget, refit="all")
    for privacy in (budget, None):
        out = tmp_path / str(privacy is None)
        run = fit(fed, "fedavg", rounds=2, privacy=privacy, out=out)
        assert bool(load_errors(out)) == (privacy is None)
        assert not (out / "drift.json").exists() and run.trained_on == ("train",)


@pytest.mark.parametrize("unit", ["client", "row"])
def test_a_resumed_run_has_the_same_noise_and_then_nobody_has_the_key(tmp_path, unit, monkeypatch):
    fed, budget = world(n=6), replace(BUDGET, unit=unit)
    secret = b"s" * 32
    monkeypatch.setattr(private, "new_secret", lambda: secret)
    whole = fit(fed, "ditto", rounds=6, privacy=budget, out=tmp_path / "whole", checkpoint_every=2)
    assert not (tmp_path / "whole" / private.KEY).exists()

    def stop(t, rounds):
        if t == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(fed, "ditto", rounds=6, privacy=budget, out=tmp_path / "cut", checkpoint_every=2, watch=stop)
    key = tmp_path / "cut" / private.KEY
    assert key.read_bytes() == secret and key.stat().st_mode & 0o077 == 0
    run = resume(tmp_path / "cut", fed)
    assert torch.equal(run.personal, whole.personal) and not key.exists()
    assert torch.equal(private.spent(run.fed), private.spent(whole.fed))
    assert torch.equal(resume(tmp_path / "cut", fed).personal, whole.personal)  # complete: no noise is needed
    with pytest.raises(KeyboardInterrupt):
        fit(fed, "ditto", rounds=6, privacy=budget, out=tmp_path / "lost", checkpoint_every=2, watch=stop)
    (tmp_path / "lost" / private.KEY).unlink()
    with pytest.raises(RunError, match="noise"):
        resume(tmp_path / "lost", fed)


def test_two_runs_with_one_seed_have_different_noise():
    fed = world(n=6)
    one, two = (fit(fed, "fedavg", rounds=2, privacy=BUDGET).state.x for _ in range(2))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("model", [models.logistic(l2=0.1), models.mlp(hidden=(3,))])
def test_gradients_of_single_rows(model):
    fed = world(n=2, rows=6, model=model)
    rows = fed.runtime.rows("train")
    x = torch.stack([fed.initial_model() + 0.1 * k for k in range(len(rows.x))])
    found = row_gradients(fed.model, x, rows.x, rows.y)
    bare = torch.stack(
        [
            fed.model.grad(x[k], rows.x[k : k + 1], rows.y[k : k + 1], torch.ones(1).double())
            - fed.model.grad(x[k], rows.x[k : k + 1], rows.y[k : k + 1], torch.zeros(1).double())
            for k in range(len(x))
        ]
    )
    torch.testing.assert_close(found, bare)
    one, step = [part[:1] for part in (rows.x, rows.y)], 1e-6 * torch.eye(fed.d, dtype=torch.float64)

    def loss(w):  # of the row alone, without the penalty
        ones = torch.ones(1, dtype=torch.float64)
        return float(fed.model.loss(w, *one, ones) - fed.model.loss(w, *one, 0 * ones))

    slope = [(loss(x[0] + part) - loss(x[0] - part)) / 2e-6 for part in step]
    torch.testing.assert_close(found[0], torch.tensor(slope, dtype=torch.float64), rtol=1e-4, atol=1e-7)


def test_one_row_changes_a_gradient_by_at_most_the_clip_norm():
    fed = world(n=3, rows=10, split=(1.0, 0.0, 0.0))
    runtime = fed.runtime
    rows = runtime.rows("train")
    client = runtime.stack(0)
    x = torch.full((3, fed.d), 0.3, dtype=torch.float64)

    def gradient(changed):
        made = RowPrivacy(replace(BUDGET, unit="row", clip=0.2), changed, runtime.ids, 0, 5, Noise(b"k" * 32))
        return made.grad(client, x, "use")

    base = gradient(rows)
    for size in (0.0, 1.0, 1e6):  # the row counts nothing, as it is, and as much as it can
        inputs = rows.x.clone()
        inputs[4] *= size
        moved = (gradient(replace(rows, x=inputs)) - base) * 10
        assert float(moved[0].norm()) <= 2 * 0.2 + 1e-9 and float(moved[1:].norm()) == 0.0


def test_noise_of_row_gradients_is_what_is_paid_for():
    fed = world(n=1, rows=10, d=4000, split=(1.0, 0.0, 0.0))
    runtime = fed.runtime
    x = torch.zeros(1, fed.d, dtype=torch.float64)
    settings = replace(
        BUDGET, unit="row", clip=1e-9
    )  # so that nothing but noise is left, in units of the clip norm
    made = RowPrivacy(settings, runtime.rows("train"), runtime.ids, 0, 5, Noise())
    found = made.grad(runtime.stack(0), x, "use") * 10 / 1e-9
    assert float(found.std()) == pytest.approx(accounting.noise_for(4.0, 1e-3, 5), rel=0.05)
    sampled = RowPrivacy(settings, runtime.rows("train"), runtime.ids, 3, 5, Noise())
    assert float(sampled.scale[0]) < float(made.scale[0]) and float(sampled.rate[0]) == pytest.approx(0.3)


def test_the_personal_part_of_ditto_costs_nothing_and_stays():
    """Answers do not depend on the personal models, and the personal descent has no noise."""
    fed = world(n=5)
    ditto = make("ditto")
    run = fit(fed, ditto, rounds=3, privacy=replace(BUDGET, unit="row"))
    plain = fit(
        fed, make("fedavg", lr=ditto.lr, steps=ditto.steps), rounds=3, privacy=replace(BUDGET, unit="row")
    )
    assert torch.equal(run.fed.runtime.private.used, plain.fed.runtime.private.used)
    alone = fit(fed, make("ditto", lam=0.0), rounds=3, privacy=replace(BUDGET, unit="row"))
    exact = fit(fed, make("ditto", lam=0.0), rounds=3)
    assert torch.equal(alone.personal, exact.personal)  # nothing private was added to what stays
    free = fit(fed, "local", rounds=3, privacy=replace(BUDGET, unit="row"))
    assert torch.equal(free.personal, fit(fed, "local", rounds=3).personal)
    assert float(private.spent(free.fed).max()) == 0.0


@dataclass(frozen=True)
class Greedy(Algorithm):
    """Takes two sums in a round (made for tests, 2026)."""

    def start(self, fed):
        return State(x=fed.initial_model())

    def round(self, fed, s, t):
        fed.map(self.train, x=s.x).mean()
        return State(x=fed.map(self.train, x=s.x).mean())

    def train(self, client, x):
        return client.sgd(x, 0.1, 1)

    def deploy(self, client, x):
        return x

    def traffic(self, d):
        return {"train": (d, d)}


def test_nobody_pays_more_than_was_promised():
    with pytest.raises(BudgetSpent):
        fit(world(n=4), Greedy(), rounds=3, privacy=BUDGET)
    run = fit(
        world(n=4), Greedy(), rounds=3, privacy=replace(BUDGET, unit="row")
    )  # here the trial counts both
    assert float(private.spent(run.fed).max()) <= 4.0


def test_the_sums_that_were_planned_are_the_last():
    sums = ClientPrivacy(replace(BUDGET, rounds=2), 3)
    sums.used += torch.tensor([0, 1, 1])
    assert sums.request("train", SumRequest("x", uniform=True)).clip == BUDGET.clip
    sums.used += torch.tensor([0, 1, 0])  # one client was in both
    with pytest.raises(BudgetSpent, match="the 2 that were planned"):
        sums.request("train", SumRequest("x", uniform=True))


def test_what_was_spent_on_statistics_is_not_there_for_training():
    left = Privacy(4.0, 1e-5).after(0.25)
    assert (left.epsilon, left.delta) == (3.0, pytest.approx(0.75e-5))


@pytest.mark.parametrize(
    "name,unit", [("cobo", "client"), ("ifca", "client"), ("ifca", "row"), ("flix", "row")]
)
def test_methods_that_cannot_be_private_say_so(name, unit):
    with pytest.raises(SettingError, match=r"each client|gradients|clusters") as told:
        fit(world(n=4), name, rounds=2, privacy=replace(BUDGET, unit=unit))
    assert unit == "row" or isinstance(told.value, SumsOnly)


def test_ditto_beats_fedavg_at_the_same_price():
    """Clients differ; the shared model is noisy for both, and Ditto's personal part is free."""
    gains = []
    for seed in (11, 12, 13):
        fed = world(n=40, rows=80, apart=2.0, seed=seed)
        price = Privacy(1.0, 1e-3)
        shared = fit(fed, make("fedavg", lr=0.3), rounds=20, evaluate_every=0, privacy=price)
        personal = fit(fed, make("ditto", lr=0.3, lam=0.1), rounds=20, evaluate_every=0, privacy=price)
        gains.append(float((personal.score("test", "accuracy") - shared.score("test", "accuracy")).mean()))
    assert min(gains) > 0.1

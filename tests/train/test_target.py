"""Training that stops when it has proved an accuracy."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import coterie
from coterie import Federation, models
from coterie._core.errors import SettingError
from coterie.algorithms.flix import FLIX
from coterie.select.flix_runs import local_models, states
from coterie.select.plan import mixed_losses, plan
from coterie.train.fit import resume
from coterie.train.run import Run


def logistic(seed: int, n: int = 4, d: int = 3, rows: int = 12) -> Federation:
    draw = torch.Generator().manual_seed(seed)
    xs = [torch.randn(rows, d, generator=draw, dtype=torch.float64) for _ in range(n)]
    ys = [(x @ torch.randn(d, generator=draw, dtype=torch.float64) > 0).double() for x in xs]
    return Federation.from_arrays(xs, ys, models.logistic(l2=0.01 * 3 ** (seed % 4)))


def gap_of(fed: Federation, run: Run) -> float:
    """f~(x) - min f~ of a run, by Newton steps on the objective written out."""
    method, l2 = run.algorithm, float(fed.model.l2)
    own, rows = local_models(fed, method), [fed.runtime.train.of(k) for k in range(fed.n)]

    def value(x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for (inputs, y), mine in zip(rows, own, strict=True):
            w = method.alpha * x + (1 - method.alpha) * mine
            z = inputs @ w
            total = total + (torch.nn.functional.softplus(z) - y * z).mean() + l2 / 2 * w @ w
        return total / fed.n

    best = run.state.x
    for _ in range(15):
        slope = torch.autograd.functional.jacobian(value, best)
        best = best - torch.linalg.solve(torch.autograd.functional.hessian(value, best), slope)
    assert torch.autograd.functional.jacobian(value, best).norm() < 1e-10
    return float(value(run.state.x) - value(best))


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(60), marks=pytest.mark.slow)], ids=len)
def test_the_proof_holds_and_is_not_far_off(seeds):
    """No gap above its target, and the median gap is a tenth of it or more (0.05 with mu = l2 alone)."""
    ratios = []
    for seed in seeds:
        fed, target = logistic(seed), 10.0 ** -(2 + seed % 3)
        method = FLIX(alpha=(0.3, 0.7, 1.0)[seed % 3], local_tol=1e-10)
        run = coterie.fit(fed, method, 3000, evaluate_every=0, target=target)
        assert run.rounds < 3000 and method.certificate(run.state) <= target
        ratios.append(gap_of(fed, run) / target)
        assert ratios[-1] <= 1, seed
    if len(ratios) > 10:
        assert sorted(ratios)[len(ratios) // 2] >= 0.1, sorted(ratios)


def test_a_round_without_everybody_proves_nothing():
    """The last certificate is not that of a model that moved without some clients."""
    fed, method = logistic(1), FLIX(alpha=0.7)
    state = coterie.fit(fed, method, 3).state
    assert math.isfinite(method.certificate(state))
    away = fed.fresh(dropout=0.5)
    for t in range(4, 12):
        away.enter_round(t, state)
        state = method.round(away, state, t)
        assert state.whole == math.isfinite(method.certificate(state))
    assert not state.whole


def test_what_proofs_cost_is_counted():
    """Clients are asked for two numbers once the plain certificate is within ten times the target."""
    fed = logistic(1)
    run = coterie.fit(fed, FLIX(alpha=0.7), 500, target=1e-3)
    plain = coterie.fit(fed, FLIX(alpha=0.7), run.rounds)
    up = [one.fed.ledger.total("floats_up") for one in (run, plain)]
    down = [one.fed.ledger.total("floats_down") for one in (run, plain)]
    asked = (up[0] - up[1]) / (2 * fed.n)
    assert asked == int(asked) >= 1 and down[0] - down[1] == asked * fed.n * (2 * fed.d + 1)
    assert plain.algorithm.certificate(plain.state) > 1e-3 >= run.algorithm.certificate(run.state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "logistic", "softmax"])
def test_local_curvature_never_proves_too_much(kind):
    """Certificates of every round, each sharpened, against the minimum by many rounds."""
    for seed in range(6):
        fed = logistic(seed)
        xs, ys = zip(*(fed.runtime.train.of(k) for k in range(fed.n)), strict=True)
        made = {"linear": models.linear, "logistic": models.logistic, "softmax": models.softmax}[kind]
        more = {"classes": 3} if kind == "softmax" else {}
        labels = [
            y if kind == "linear" else (y + (x[:, 0] > 1) if kind == "softmax" else y).long()
            for x, y in zip(xs, ys, strict=True)
        ]
        fed = Federation.from_arrays(list(xs), labels, made(l2=0.03, **more), dtype=torch.float64)
        method = FLIX(alpha=(0.4, 1.0)[seed % 2], local_tol=1e-11)
        least, sharper = mixed_losses(fed, method, 600)[-1], 0
        for trial, s in states(fed, method, 15):
            plain = method.certificate(s)
            found = method.certificate(method.sharpen(trial, s, plain / 5))
            loss = float(trial.score(trial.personal(method, s), "train")["loss"].mean())
            assert loss - least <= found * (1 + 1e-9) + 1e-12
            sharper += found < 0.9 * plain < math.inf
        assert sharper >= 5


def test_it_stops_at_the_first_proof_with_the_same_models():
    fed = logistic(1)
    run = coterie.fit(fed, FLIX(alpha=0.7), 500, target=1e-3)
    again = coterie.fit(fed, FLIX(alpha=0.7), run.rounds)
    assert run.deployed_round == run.rounds < 500 and run.personal.equal(again.personal)
    before = coterie.fit(fed, FLIX(alpha=0.7), run.rounds - 1)
    assert before.algorithm.certificate(before.state) > 1e-3


def test_the_number_of_rounds_is_planned_again_as_rounds_come_in():
    fed, seen = logistic(2), []
    run = coterie.fit(
        fed, FLIX(alpha=0.7), 5000, target=1e-4, watch=lambda t, rounds: seen.append((t, rounds))
    )
    plans = [rounds for _, rounds in seen]
    assert plans[-1] == run.rounds and plans[0] > run.rounds and all(rounds <= 5000 for rounds in plans)
    assert sum(a >= b for a, b in itertools.pairwise(plans)) >= 0.9 * (len(plans) - 1)
    assert run.rounds <= min(plans)  # every plan was enough


def test_fewer_rounds_than_the_plan_needs():
    """The plan is for the worst case; the certificate sees what was reached."""
    fed = logistic(3)
    chosen = plan(fed, 1e-3, local_tol=1e-10)
    method = chosen.algorithm.replace(lr=0.0)
    run = coterie.fit(fed, method, chosen.rounds, target=1e-3)
    assert run.rounds < chosen.rounds and gap_of(fed, run) <= 1e-3


def test_a_run_that_cannot_prove_its_target_in_time_says_so():
    run = coterie.fit(logistic(1), FLIX(alpha=0.7), 3, target=1e-9)
    assert run.rounds == 3 and run.algorithm.certificate(run.state) > 1e-9


def test_an_interrupted_run_stops_at_the_same_round(tmp_path):
    fed = logistic(1)
    whole = coterie.fit(fed, FLIX(alpha=0.7), 500, target=1e-4)

    def stop(t: int, rounds: int) -> None:
        if t == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        coterie.fit(fed, FLIX(alpha=0.7), 500, tmp_path / "run", target=1e-4, checkpoint_every=2, watch=stop)
    rest = resume(tmp_path / "run", fed)
    assert rest.rounds == whole.rounds and rest.personal.equal(whole.personal)


def test_training_alone_needs_no_proof():
    run = coterie.fit(logistic(1), FLIX(alpha=0.0), 10, target=1e-6)
    assert run.rounds == 1 and run.algorithm.certificate(run.state) == 0.0


@pytest.mark.parametrize(
    ("method", "model", "why"),
    [
        ("ditto", models.logistic(l2=0.1), "ditto has no certificate"),
        (FLIX(solver="ef21", compressor="top-1"), models.logistic(l2=0.1), "needs solver = dgd"),
        (FLIX(lr=0.1), models.logistic(l2=0.1), "lr = 0"),
        (FLIX(), models.logistic(), "strongly convex"),
        (FLIX(), models.mlp(hidden=(3,)), "not convex"),
        ("auto", models.logistic(l2=0.1), "target for flix"),
    ],
)
def test_who_has_no_certificate_is_told_why(method, model, why):
    fed = logistic(0)
    xs, ys = zip(*(fed.runtime.train.of(k) for k in range(fed.n)), strict=True)
    fed = Federation.from_arrays(list(xs), [y.long() for y in ys], model)
    with pytest.raises(SettingError, match=why):
        coterie.fit(fed, method, 5, target=1e-3)


def test_on_the_command_line(command, tmp_path):
    asked = ("heart_disease", "--client", "hospital", "--target", "sick", "--l2", 0.1, "--algorithm", "flix")
    result = command("fit", *asked, "--rounds", 2000, "--accuracy", 1e-3, "--out", tmp_path / "run")
    assert result.code == 0, result.err
    assert "Proved after" in result.err + result.out
    short = command("fit", *asked, "--rounds", 2, "--accuracy", 1e-9, "--out", tmp_path / "short")
    assert short.code == 0 and "Not proved in 2 rounds" in " ".join((short.err + short.out).split())
    refused = command("fit", *asked[:5], "--algorithm", "ditto", "--accuracy", 0.1, "--out", tmp_path / "no")
    assert refused.code == 2 and "no certificate" in refused.err and not (tmp_path / "no").exists()

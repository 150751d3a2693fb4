"""How sure the advisor is: intervals that cover, probabilities that are kept, penalties that are not determined."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from benchmarks.advisor_calibration import _best, _covers, diagram, look, reliability, summary
from benchmarks.advisor_worlds import FRESH, KINDS, draw_world
from coterie.select import calibration
from coterie.select.advice import METHODS, SHARED, conclude
from coterie.select.advise import advise
from coterie.select.survey import Survey


@pytest.fixture(scope="module")
def judged():
    return [look(kind, FRESH.start) for kind in KINDS]


def test_intervals_are_never_empty_and_hold_what_is_predicted(judged):
    for one in judged:
        for name in METHODS:
            low, high = one.advice.intervals[name].unbind(1)
            assert bool((low < high).all()) and bool((low >= 0).all()), (one.world.kind, name)
            risks = one.advice.risks[name]
            assert bool((low <= risks + 1e-12).all() and (risks <= high).all()), (one.world.kind, name)


def test_probabilities_are_probabilities_and_are_said(judged):
    for one in judged:
        assert 0 < one.advice.probability < 1
        assert len(one.advice.client_probabilities) == len(one.risks)
        assert bool(((one.advice.client_probabilities > 0) & (one.advice.client_probabilities < 1)).all())
        assert f"probability {one.advice.probability:.2f}" in one.advice.verdict()
        assert one.advice.json()["probability"] == pytest.approx(one.advice.probability)


def test_more_evidence_is_more_probability(judged):
    found = judged[0].findings
    chances = [
        calibration.sharing(dataclasses.replace(found, support=z, doubt=1.0))
        for z in (-9.0, -2.0, 0.0, 2.0, 9.0)
    ]
    assert chances == sorted(chances) and chances[0] < 0.05 and chances[-1] > 0.95
    close, clear = (calibration.best_of_family(torch.tensor([1.0, second])) for second in (1.01, 2.0))
    assert close < clear


def test_a_client_is_sure_if_its_own_errors_and_the_federation_speak_for_the_method():
    allowed = torch.tensor([False, False, True, True, True])

    def sure(*predicted: float, family: float = 0.8) -> float:
        return calibration.client_probability(torch.tensor(predicted), allowed, family)

    usual = sure(2.0, 2.0, 1.2, 1.1, 1.0)
    assert (
        0 < sure(2.0, 2.0, 1.001, 1.1, 1.0) < usual < sure(2.0, 2.0, 3.0, 3.0, 1.0) < 1
    )  # lead in its family
    assert sure(2.0, 2.0, 1.2, 1.1, 1.0, family=0.5) < usual < sure(2.0, 2.0, 1.2, 1.1, 1.0, family=0.99)
    assert sure(0.5, 2.0, 1.2, 1.1, 1.0) < usual  # alone it would be better off
    inside, odds, ahead = calibration.client_evidence(torch.tensor([3.0, 2.0, 1.2, 1.1, 1.0]), allowed, 0.8)
    assert (odds, ahead) == pytest.approx((math.log(4), math.log(2)), rel=1e-6)
    assert inside == calibration.lead(torch.tensor([1.2, 1.1, 1.0]))


def test_a_flat_penalty_is_noticed(judged):
    one = judged[0]
    flat = dataclasses.replace(one.findings, curve=torch.ones_like(one.findings.curve))
    assert calibration.flat_range(flat, True) == (0.0, math.inf)
    steep, lam = one.findings.curve.clone(), one.findings.lam
    steep[0] = 1 + (lam.clamp(1e-9, 1e9).log() - 1).square()
    narrow = calibration.flat_range(dataclasses.replace(one.findings, curve=steep), True)
    assert 0.5 * math.e <= narrow[0] <= narrow[1] <= 2 * math.e
    none = torch.zeros(len(lam), len(lam), dtype=torch.float64)
    low, high = calibration.penalty_interval(lam, steep[0], none)
    assert low == high  # all clients agree


@pytest.mark.parametrize("kind", KINDS)
def test_the_interval_of_the_penalty_is_that_of_drawing_clients_with_replacement(kind):
    """Means and products of the clients' curves say what the curves themselves would."""
    fed = draw_world(kind, DEVELOP_SEED).federation().fresh()
    fed.enter_round(0, None)
    found = Survey().carry_out(fed)
    advice = conclude(fed, found)
    share = advice.method in SHARED
    curve = found.prospects.curve[:, 0 if share else 1]
    draw = torch.Generator().manual_seed(0)
    taken = torch.randint(len(curve), (1000, len(curve)), generator=draw)
    best = found.lam[curve[taken].mean(1).argmin(-1)].sort().values
    for mine, theirs in zip(advice.lam_interval, (float(best[50]), float(best[949])), strict=True):
        assert abs(_place(found.lam, mine) - _place(found.lam, theirs)) <= 6, (advice.lam_interval, theirs)


def _place(lam, value):
    return int((lam <= value).sum())


def test_shifted_features_and_far_clients_are_noticed():
    world = draw_world("covariate-shifted", DEVELOP_SEED)
    assert any("vary differently" in reason for reason in advise(world.federation()).why)
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(60, 5, generator=draw, dtype=torch.float64) for _ in range(12)]
    off = [torch.full((5,), 10.0 if k == 3 else 0.3, dtype=torch.float64) for k in range(12)]
    ys = [
        x @ (torch.ones(5, dtype=torch.float64) + t * torch.randn(5, generator=draw, dtype=torch.float64))
        + torch.randn(60, generator=draw, dtype=torch.float64)
        for x, t in zip(xs, off, strict=True)
    ]
    world = dataclasses.replace(world, kind="gaussian", xs=xs, ys=ys)
    reasons = advise(world.federation()).why
    assert any("as far from the shared model" in reason for reason in reasons)
    assert not any("vary differently" in reason for reason in reasons)


DEVELOP_SEED = 1


def test_the_judge_counts_what_it_should(judged):
    one = judged[0]
    wide = {name: torch.tensor([[0.0, math.inf]]).expand(len(one.risks), 2) for name in METHODS}
    own = dataclasses.replace(one.advice.own, intervals=wide)
    sure = dataclasses.replace(one, advice=dataclasses.replace(one.advice, own=own))
    assert all(_covers(sure, k).all() for k in range(5))
    bins = reliability([one] * 6)["federation"]
    assert len(bins) == 1 and bins[0]["count"] == 6
    assert diagram(reliability([one] * 6)).count("<circle") >= 1
    right = summary(judged)["all"]["best named"]
    named = [one.mean[METHODS.index(one.advice.method)] <= one.mean.min() + 1e-9 for one in judged]
    assert right == pytest.approx(np.mean(named))
    local, ftfa = (dataclasses.replace(one.advice, method=name) for name in ("local", "ftfa"))
    alike = dataclasses.replace(one, risks=torch.tensor([[1.0, 2.0, 2.0, 1.0 + 1e-12, 2.0]]))
    assert all(_best(dataclasses.replace(alike, advice=advice), advice.method) for advice in (local, ftfa))


@pytest.mark.slow
def test_a_sample_of_the_fresh_worlds():
    """The committed result has all of them."""
    found = summary([look(kind, seed) for kind in KINDS for seed in FRESH[:8]])["all"]
    assert 0.83 <= found["covered"] <= 0.96
    assert found["best named"] >= 0.78 and abs(found["best named"] - found["mean stated probability"]) <= 0.12
    assert found["extra error, 90th percentile"] <= 0.025
    assert np.isfinite(found["extra error beyond noise, 90th percentile"])

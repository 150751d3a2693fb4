"""Membership inference on the hospitals: who was trained on shows without noise, and much less with it."""

from __future__ import annotations

import pytest
import torch

from coterie import Federation, fit, models
from coterie.algorithms import make
from coterie.engine.privacy import Privacy

pytestmark = pytest.mark.slow
RUNS, TARGETS = 24, 60


def confidence(model, x: torch.Tensor, rows: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 - p)) of the true class of each row, LiRA's statistic."""
    score = model.scores(x, rows).view(len(rows), -1)[:, 0]
    return torch.where(y > 0.5, score, -score)


def advantage(privacy: Privacy | None) -> float:
    """Return the mean of |true - false positive rate| of a likelihood-ratio attack on the shared model (Carlini et
    al., IEEE S&P 2022): half of the runs have a row, half have not, and the attacker knows both distributions."""
    pytest.importorskip("dp_accounting")
    table = Federation.from_table("heart_disease", "hospital", "sick", split=(1.0, 0.0, 0.0))
    rows = table.runtime.rows("train")
    x, y = rows.x, rows.y
    g = torch.Generator().manual_seed(0)
    wild = y[:TARGETS].clone()
    wild = 1 - wild  # rows with the wrong label stand out: the worst case for those who are in
    inputs, labels = x.clone(), y.clone()
    labels[:TARGETS] = wild
    inputs[:TARGETS] *= 2
    member = torch.rand(RUNS, TARGETS, generator=g) < 0.5
    seen = torch.zeros(RUNS, TARGETS)
    method = make("fedavg", lr=1.0, steps=10, batch=0)
    for k in range(RUNS):
        kept = torch.cat(
            [member[k], torch.zeros(60, dtype=torch.bool)]
        )  # a small client, so that rows matter
        mine, theirs = inputs[: len(kept)][kept], labels[: len(kept)][kept]
        others = [(inputs[a : a + 30], labels[a : a + 30]) for a in (200, 300, 400)]
        xs, ys = zip((mine, theirs), *others, strict=True)
        fed = Federation.from_arrays(xs, ys, models.logistic(l2=1e-3), dtype=torch.float64, seed=k)
        run = fit(fed, method, rounds=20, evaluate_every=0, privacy=privacy)
        seen[k] = confidence(fed.model, run.state.x, inputs[:TARGETS], labels[:TARGETS]).float()
    gaps = []
    for t in range(TARGETS):
        ins, outs = seen[member[:, t], t], seen[~member[:, t], t]
        if min(len(ins), len(outs)) < 4:
            continue
        half = len(ins) // 2, len(outs) // 2  # learn on one half, attack the other
        centre = [ins[: half[0]].mean(), outs[: half[1]].mean()]
        spread = torch.cat([ins[: half[0]] - centre[0], outs[: half[1]] - centre[1]]).std().clamp(min=1e-6)

        def guess(value, centre=centre, spread=spread):
            return ((value - centre[1]) / spread) ** 2 > ((value - centre[0]) / spread) ** 2

        hits, alarms = guess(ins[half[0] :]).float().mean(), guess(outs[half[1] :]).float().mean()
        gaps.append(float(hits - alarms))
    return sum(gaps) / len(gaps)


def test_noise_hides_who_was_trained_on():
    exact, noisy = advantage(None), advantage(Privacy(1.0, 1e-3, "row"))
    assert exact > 0.15  # the attack works
    assert noisy < 0.1 and noisy < exact / 2  # and learns little of what was protected

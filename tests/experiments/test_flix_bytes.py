"""Bytes to accuracy of FLIX's solvers: the counts are the ledger's, and the plan's formula agrees."""

import math
from types import SimpleNamespace

import pytest
import torch

from coterie import Federation, models
from coterie.algorithms.flix import FLIX
from coterie.experiments import flix_bytes
from coterie.experiments.flix_logistic import Problem
from coterie.select.flix_runs import local_models
from coterie.select.plan import cost


@pytest.fixture
def problem(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(40, 10, generator=draw, dtype=torch.float64) for _ in range(6)]
    ys = [(x @ torch.randn(10, generator=draw, dtype=torch.float64) > 0).double() for x in xs]
    fed = Federation.from_arrays(xs, ys, models.logistic(l2=0.1))
    own = local_models(fed, FLIX(local_tol=1e-10))
    made = Problem(fed, own, torch.zeros(fed.d, dtype=torch.float64), FLIX(alpha=1.0).mixture(fed))
    monkeypatch.setattr(Problem, "make", lambda *_: made)
    return made


@pytest.mark.slow
def test_all_eight_solvers_are_counted_by_the_ledger(problem):
    settings = {"data": "mushrooms", "alpha": 0.5, "keep": 0.2}
    found = flix_bytes.bytes_to_accuracy(
        SimpleNamespace(plans=[SimpleNamespace(settings=settings, rounds=60)]), 0
    )
    lines = found["plots"]["bytes"]["panels"][0]["curves"]
    assert set(lines) == {"one-shot", "dgd", "dcgd", "diana", "ef21", "scaffnew", "sgd", "adam"}
    for name, (sent, gaps) in lines.items():
        assert sent == sorted(sent) and all(0 < gap <= 2 for gap in gaps), name
    dgd = FLIX(alpha=0.5, start_at="average")
    sent, gaps = lines["dgd"]
    rounds = next(k for k, gap in enumerate(gaps) if gap <= 1e-2)
    assert found["dgd MB to 0.01"] == pytest.approx(cost(dgd, problem.fed, rounds) / 1e6)
    assert found["scaffnew saves MB to 0.01"] == pytest.approx(
        found["dgd MB to 0.01"] / found["scaffnew MB to 0.01"]
    )
    assert found["dgd last gap"] < 1e-3 and math.isfinite(found["diana MB up to 0.01"])

"""The benchmark of certificates counts what it should."""

import pytest

from benchmarks import certificates


@pytest.mark.parametrize("seed", range(3), ids=certificates.KINDS)
def test_a_problem_of_each_kind_is_proved_and_not_violated(seed):
    first = certificates.FIRST - certificates.FIRST % 3 + 3
    found = certificates.look(first + seed)
    assert found["kind"] == certificates.KINDS[seed]
    assert -certificates.ROUNDING <= found["gap"] <= found["bound"] + certificates.ROUNDING
    assert found["bound"] <= found["target"]


def test_violations_are_counted():
    good = {"kind": "logistic", "seed": 1, "target": 1.0, "bound": 0.5, "gap": 0.25, "rounds": 3}
    bad = {**good, "gap": 0.75}
    worst = {**good, "kind": "softmax", "gap": 2.0}
    open_ = {**good, "kind": "least squares", "bound": 1.5}
    page = certificates.summary([good, bad, worst, open_, {**open_, "bound": 0.5}])
    assert "| logistic | 2 | 1 | 0 | 0 | 1.00 | 0.50 | 3 |" in page
    assert "| softmax | 1 | 1 | 1 | 0 |" in page and "| least squares | 2 | 0 | 0 | 1 |" in page

"""What a phase can ask of its client: gradients on the same rows again, curvature of single rows."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from coterie import Algorithm, Federation, State, models

RNG = np.random.default_rng(5)
XS = [RNG.normal(size=(n, 3)) for n in (1, 4, 9)]
YS = [RNG.integers(2, size=len(x)) for x in XS]


@dataclass(frozen=True)
class Probe(Algorithm):
    """Looks at gradients and curvature (2022)."""

    def start(self, fed):
        return State()

    def look(self, client):
        x = client.initial_model() + 1
        first, again, fresh = client.grad(x), client.grad(x, again=True), client.grad(x)
        return {"first": first, "again": again, "fresh": fresh, "rows": client.row_smoothness()}


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_same_rows_again_and_curvature_of_a_row(loop, reduction):
    model = models.logistic(l2=0.1, reduction=reduction)
    fed = Federation.from_arrays(XS, YS, model, loop=loop)
    replies = fed.map(Probe(batch=2).look)
    assert torch.equal(replies["first"], replies["again"])
    assert not torch.equal(replies["first"][2], replies["fresh"][2])
    for i, x in enumerate(XS):
        largest = 0.25 * (x**2).sum(1).max() + 0.1
        scale = len(x) if reduction == "sum" else 1
        assert abs(float(replies["rows"][i]) / (scale * largest) - 1) < 1e-9

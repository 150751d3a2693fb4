"""The survey computes in float64, whatever the precision of the rows."""

import pytest
import torch

from coterie import models
from coterie.engine.federation import Federation
from coterie.select.advise import advise


@pytest.mark.parametrize("kind", ["linear", "logistic", "softmax"])
def test_rows_in_single_precision_get_the_same_advice(kind):
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(40, 4, generator=draw) for _ in range(6)]
    scores = [x @ torch.ones(4) + torch.randn(40, generator=draw) for x in xs]
    classes = [(score > 0).long() + (score > 1).long() * (kind == "softmax") for score in scores]
    ys = scores if kind == "linear" else classes
    model = getattr(models, kind)(l2=1e-3)
    single, double = (
        advise(Federation.from_arrays(xs, ys, model, split=(0.6, 0.2, 0.2), dtype=dtype), probe=0)
        for dtype in (torch.float32, torch.float64)
    )
    assert single.verdict().partition(" with")[0] == double.verdict().partition(" with")[0]
    assert torch.allclose(single.sigma2.double(), double.sigma2, rtol=1e-2, atol=1e-4)

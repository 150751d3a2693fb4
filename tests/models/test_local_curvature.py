"""Lower bounds of second derivatives within a radius, against the second derivatives there."""

import pytest
import torch

from coterie import models
from coterie.models.local_curvature import least_hessian


@pytest.mark.parametrize("kind", ["linear", "logistic", "softmax"])
def test_no_point_of_the_ball_curves_less(kind):
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    closest = []
    for trial in range(60):
        x, radius = normal(9, 3), 10.0 ** float(torch.rand((), generator=draw) * 3 - 2)
        y = (
            normal(9)
            if kind == "linear"
            else torch.randint(0, 3 if kind == "softmax" else 2, (9,), generator=draw)
        )
        made = {"linear": models.linear, "logistic": models.logistic, "softmax": models.softmax}[kind]
        model = made(l2=0.02, **({"classes": 3} if kind == "softmax" else {})).fit_to(x, y)
        weight = torch.full((9,), 1 / 9, dtype=torch.float64)
        w, y = 2 * normal(model.d), y.to(torch.float64) if kind == "logistic" else y
        low = least_hessian(model, w, torch.tensor([radius], dtype=torch.float64), x, y, weight)
        for _ in range(20):
            step = normal(model.d)
            away = w + step * (radius * (0.0 if trial == 0 else 1.0) / step.norm())
            gap = torch.linalg.eigvalsh(model.hessian(away, x, y, weight) - low)
            assert gap[0] >= -1e-12
            closest.append(float(gap[-1] / torch.linalg.eigvalsh(low)[-1]))
    assert min(closest) < 0.05  # near w the bound is close

"""Several models on the same rows score them as one after the other does."""

from __future__ import annotations

import pytest
import torch

from coterie import models
from coterie.models.base import Model
from coterie.models.metrics import LOSS, find
from coterie.models.metrics.over_rows import row_losses


def problem(model: Model) -> tuple[Model, tuple[torch.Tensor, ...]]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, 7, 3, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 2, (4, 7), generator=draw)
    targets = y.double() if model.name in ("linear", "poisson") else y
    fitted = model.fit_to(x.flatten(0, 1), targets.flatten())
    w = torch.randn(4, 5, fitted.d, generator=draw, dtype=torch.float64)
    rows = fitted.prepare(x.flatten(0, 1)).view(4, 7, -1)
    weight = torch.rand(4, 7, generator=draw, dtype=torch.float64)
    return fitted, (w, rows, targets, weight / weight.sum(1, keepdim=True))


@pytest.mark.parametrize(
    "model",
    [
        models.linear(intercept=True),
        models.logistic(l2=0.1),
        models.softmax(classes=3, intercept=True),
        models.poisson(),
        models.mlp((4,), classes=3),
    ],
    ids=lambda model: model.name,
)
def test_each_is_one_after_the_other(model: Model) -> None:
    fitted, (w, *rows) = problem(model)
    metrics = [LOSS] if fitted.task == "regression" else [LOSS, find("accuracy")]
    found = fitted.measure_each(w, *rows, metrics)
    losses = row_losses(fitted, w, *rows)
    for k in range(w.shape[1]):
        alone = fitted.measure(w[:, k], *rows, metrics)
        for metric in metrics:
            torch.testing.assert_close(found[metric.name][:, k], alone[metric.name], rtol=1e-12, atol=1e-13)
        own = (losses[:, k] * rows[2]).sum(-1, keepdim=True)
        torch.testing.assert_close(own, alone[LOSS.name], rtol=1e-12, atol=1e-13)

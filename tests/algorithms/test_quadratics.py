"""Steps of hierarchical models go downhill."""

from __future__ import annotations

import torch

from coterie.algorithms.quadratics import downhill


def test_a_step_that_overshoots_is_halved_until_nobody_is_worse() -> None:
    x = torch.tensor([[1.0], [1.0], [0.0]], dtype=torch.float64)
    aim = torch.tensor([[0.0], [-7.0], [0.0]], dtype=torch.float64)  # x^2 rises from 1 to 49 at the second
    found = downhill(lambda w: w.square(), x, aim)
    assert found.flatten().tolist() == [0.0, -1.0, 0.0]  # a quarter of the way is as good as the start

"""Weights of averaged models: near the best ones on a grid, and those of clients near the shared ones."""

from __future__ import annotations

import itertools

import pytest
import torch

from coterie.theory.stacking import LEAST, STEPS, best_strength, client_weights, greedy_weights, row_losses


def rows(classes: bool, count: int = 400, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randn(count, generator=draw, dtype=torch.float64)
    wrong = torch.randn(3, count, generator=draw, dtype=torch.float64) * torch.tensor([[0.5], [0.7], [2.0]])
    return (torch.sigmoid(1 + wrong), None) if classes else (y + wrong, y)


@pytest.mark.parametrize("classes", [False, True])
def test_greedy_weights_are_near_the_best_of_a_grid_and_never_worse_than_one_model(classes: bool) -> None:
    values, y = rows(classes)
    grid = [
        torch.tensor([a, b, 20 - a - b], dtype=torch.float64) / 20
        for a, b in itertools.product(range(21), repeat=2)
        if a + b <= 20
    ]
    best = min(float(row_losses(w @ values, y).mean()) for w in grid)
    found = greedy_weights(values, y)
    loss = float(row_losses(found @ values, y).mean())
    single = float(row_losses(values, y).mean(-1).min())
    assert loss < best + 0.05 * (single - best) and loss < single
    assert float(found.sum()) == pytest.approx(1) and bool(((found == 0) | (found >= LEAST)).all())
    assert STEPS >= 1 / LEAST


def test_a_client_with_few_rows_stays_near_the_shared_weights() -> None:
    """The same evidence per row moves a client with 200 rows far and one with 2 rows little, and none without rows."""
    client = torch.tensor([0] * 200 + [1] * 2)
    y = torch.zeros(len(client), dtype=torch.float64)
    values = torch.stack([torch.full_like(y, 0.2), torch.full_like(y, 1.0)])
    shared = torch.tensor([0.5, 0.5], dtype=torch.float64)
    found = client_weights(shared, values, y, client, 3, strength=3.0)
    assert found[0, 0] > 0.95 and 0.5 < found[1, 0] < 0.7 and found[2, 0] == pytest.approx(0.5)
    assert torch.equal(client_weights(shared, values, y, client, 3, 0.0)[0], shared)


def test_own_evidence_counts_where_clients_differ_and_not_where_they_do_not() -> None:
    draw = torch.Generator().manual_seed(4)
    client, part = torch.arange(12).repeat_interleave(40), torch.arange(480) % 2
    y = torch.randn(480, generator=draw, dtype=torch.float64)
    noise = 0.5 * torch.randn(2, 480, generator=draw, dtype=torch.float64)
    shared = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert best_strength(shared, y + noise, y, client, part, 12) <= 1.0
    bias = torch.stack([(client % 2).double(), 1 - (client % 2).double()])
    assert best_strength(shared, y + noise + 2 * bias, y, client, part, 12) >= 3.0

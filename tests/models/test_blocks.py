"""Rows that come sorted say as much about chance as rows that do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import coterie
from coterie.models import blocks

CLASSES = 6


def distance(w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return ((w.unsqueeze(-2) - x) * weight.unsqueeze(-1)).sum(-2)


def sorted_rows(clients: int, rows: int, d: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that differ between classes much and inside them little, sorted by class."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (clients, rows), generator=draw).sort(-1).values
    centres = torch.randn(CLASSES, d, generator=draw, dtype=torch.float64)
    x = centres[labels] + 0.1 * torch.randn(clients, rows, d, generator=draw, dtype=torch.float64)
    return x, labels, torch.full((clients, rows), 1 / rows, dtype=torch.float64)


def test_the_noise_of_sorted_rows_is_that_of_their_draw() -> None:
    rows, w = sorted_rows(500, 480, d=30), torch.zeros(500, 30, dtype=torch.float64)
    found, noise, _ = blocks.mean_and_noise(distance, w, *blocks.drawn_rows(*rows, 480))
    assert float(noise.mean()) == pytest.approx(float(found.var(0).sum()), rel=0.3)
    assert torch.allclose(found, distance(w, *rows))


def test_rows_are_drawn_from_the_whole_file_and_never_from_padding() -> None:
    x, y, weight = sorted_rows(3, 600)
    weight[1, 200:] = 0
    _, few, kept = blocks.drawn_rows(x, y, weight, 100)
    assert few[0].unique().tolist() == list(range(CLASSES))
    assert bool((kept > 0).all()) and torch.allclose(kept.sum(-1), weight.sum(-1))
    alone = blocks.drawn_rows(x[1, :200], y[1, :200], weight[1, :200], 100)
    assert torch.equal(alone[1], few[1])


@pytest.mark.parametrize("elements", [1, 3 * blocks.BLOCKS])
def test_a_stack_in_pieces_has_the_same_noise(monkeypatch, elements: int) -> None:
    rows, w = sorted_rows(7, 48), torch.zeros(7, 1, dtype=torch.float64)
    whole = blocks.mean_and_noise(distance, w, *rows)
    monkeypatch.setattr(blocks, "ELEMENTS", elements)
    for mine, theirs in zip(blocks.mean_and_noise(distance, w, *rows), whole, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("seed", range(4))
def test_clients_whose_rows_are_sorted_by_class_stay_with_their_kind(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    centres, xs, ys = torch.randn(CLASSES, 4, generator=draw), [], []
    for client in range(4):
        labels = torch.randint(0, CLASSES, (700,), generator=draw).sort().values
        xs.append(centres[labels] + 0.1 * torch.randn(700, 4, generator=draw))
        ys.append((labels + client // 2) % CLASSES)
    fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.softmax(), split=(1.0, 0.0, 0.0))
    run = coterie.fit(fed, coterie.algorithms.CoBo(start_links="all"), rounds=4)  # by looks at gradients
    linked = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)) - torch.eye(4)
    assert torch.equal((run.state.weights > 0).float(), linked)

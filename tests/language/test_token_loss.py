"""The loss of every token from hidden states, in pieces."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from coterie.models.token_loss import _by_element, _in_place, token_losses


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_token_losses_in_pieces(piece: int) -> None:
    """Losses and gradient of the plain cross-entropy, however the tokens are cut; both forms of a piece agree."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 5, dtype=torch.float64, generator=generator)
    weight = torch.randn(11, 5, dtype=torch.float64, generator=generator)
    targets, given = torch.arange(20) % 11, torch.rand(20, dtype=torch.float64, generator=generator)
    ways = (
        lambda h: functional.cross_entropy(h @ weight.t(), targets, reduction="none"),
        lambda h: token_losses(h, weight, targets, piece),
    )
    found = []
    for way in ways:
        leaf = hidden.clone().requires_grad_()
        losses = way(leaf)
        found.append((losses.detach(), torch.autograd.grad(losses @ given, leaf)[0]))
    for expected, ours in zip(*found, strict=True):
        assert torch.allclose(expected, ours, rtol=1e-12, atol=1e-14)
    forms = [form(hidden, weight, targets, torch.float64) for form in (_in_place, _by_element)]
    assert all(torch.allclose(*pair, rtol=1e-12, atol=1e-14) for pair in zip(*forms, strict=True))

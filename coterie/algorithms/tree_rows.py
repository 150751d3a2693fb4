"""What a client of boosted trees remembers of its rows, and what it computes from them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coterie.engine.client import Client
from coterie.models.histograms import assign
from coterie.models.trees import Trees

PROFILE_PULL = 10.0  # curvature, for squared loss rows, by which a profile is shrunken


def trees_of(client: Client) -> Trees:
    """Return the client's model."""
    assert isinstance(client.model, Trees)
    return client.model


def for_all(value: Tensor, client: Client) -> Tensor:
    """Return what was sent to everybody without the axis of clients."""
    return value[0] if client.lead else value


def target_sums(client: Client) -> Tensor:
    """Return the sums of the targets (of each class) and the number of rows, [..., classes + 1]."""
    _, target, weight = client.features(client.initial_model())
    here, classes = (weight > 0).to(weight.dtype), trees_of(client).classes
    hits = (
        nn.functional.one_hot(target.long(), classes).to(here) if classes else target.to(here).unsqueeze(-1)
    )
    return torch.cat([(hits * here.unsqueeze(-1)).sum(-2), here.sum(-1, keepdim=True)], -1)


def keep_rows(
    client: Client, split: str, bins: Tensor, target: Tensor, weight: Tensor, scores: Tensor
) -> None:
    """Keep the binned rows of a split and their scores."""
    keep = client.keep
    if split == "train":
        keep.bins, keep.target, keep.weight, keep.scores = bins, target, weight, scores.contiguous()
        keep.pairs = pairs_of(client, scores.select(-3, 0), target, weight)
    else:
        keep.held_bins, keep.held_target, keep.held_weight = bins, target, weight
        keep.held_scores = scores.contiguous()


def profile(client: Client, base: Tensor) -> Tensor:
    """Return what tells a client apart, [..., C]: its residual -G / (H + 10) at the scores [C] before any tree."""
    _, target, weight = client.features(client.initial_model())
    scores = base.expand(*target.shape, -1)
    first, second = pairs_of(client, scores, target, (weight > 0).to(base)).sum(-3).unbind(-1)
    return -first / (second + PROFILE_PULL)


def with_profile(rows: Tensor, mine: Tensor) -> Tensor:
    """Return rows [..., B, features] with the profile [..., C] of their client as further columns."""
    return torch.cat([rows, mine.unsqueeze(-2).expand(*rows.shape[:-1], -1).to(rows)], -1)


def leaves_of(bins: Tensor, splits: Tensor, categorical: Tensor, missing: int) -> Tensor:
    """Return the leaf of each row in the trees of this round, int32 [..., B, trees]; `missing` is a bin."""
    found = assign(bins.flatten(0, -2), splits, categorical.to(bins.device), missing)
    return found.view(*bins.shape[:-1], -1)


def pairs_of(client: Client, scores: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Return both derivatives of each row, [..., B, C, 2]."""
    pair = torch.stack(trees_of(client).loss_of.derivatives(scores, target), -1)
    return pair * weight.unsqueeze(-1).unsqueeze(-1)


def moves(values: Tensor, leaf: Tensor) -> Tensor:
    """Return the values [..., C, L] of the leaves [..., B, C]."""
    return values.gather(-1, leaf.mT).mT


def random_sign(client: Client) -> Tensor:
    """Return a random sign for the next trees, [..., 1]."""
    return torch.where(client.uniform("sign") < 0.5, -1.0, 1.0)

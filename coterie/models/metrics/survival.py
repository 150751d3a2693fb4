"""Metrics of models that predict survival times."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.models.metrics.metric import Metric, ScoredRows
from coterie.models.risk_sets import concordance_counts


def _pairs(rows: ScoredRows) -> Tensor:
    """Return concordant and comparable pairs of a client, divided by its rows."""
    concordant, comparable = concordance_counts(rows.scores.squeeze(-1), rows.targets, rows.weight)
    size = (rows.weight > 0).sum(-1, keepdim=True).clamp_min(1)
    return torch.stack([concordant, comparable], -1) / size


def _share(sums: Tensor) -> Tensor:
    concordant, comparable = sums.unbind(-1)
    return torch.where(comparable > 0, concordant / comparable, torch.nan).unsqueeze(-1)


CONCORDANCE = Metric(
    "concordance",
    sums=_pairs,
    finish=_share,
    higher_is_better=True,
    tasks=("survival",),
    title="concordance (Harrell's C)",
    low=0.0,
    high=1.0,
    undefined="there is no pair of rows of which the earlier one has an event",
)

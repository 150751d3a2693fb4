"""Metrics: objects that give per-client values and pooled values from the same sums over rows."""

from __future__ import annotations

from coterie.models.metrics.metric import TASKS, Metric, ScoredRows
from coterie.models.metrics.over_rows import client_sums, row_values
from coterie.models.metrics.registry import LOSS, find, lookup, main_metric, names, register, resolve
from coterie.models.metrics.regression import quantile_loss

__all__ = [
    "LOSS",
    "TASKS",
    "Metric",
    "ScoredRows",
    "client_sums",
    "find",
    "lookup",
    "main_metric",
    "names",
    "quantile_loss",
    "register",
    "resolve",
    "row_values",
]

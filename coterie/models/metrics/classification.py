"""Metrics of models that tell classes apart."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.models.metrics.metric import CLASSES, Metric, ScoredRows

AUC_BINS = 1023  # an odd number, so that even odds lie in the middle of a bin
AUC_CENTRE = 4.0  # log-odds at which half of the bins on either side are used up
ECE_BINS = 15


def _auc_bins(probabilities: Tensor) -> Tensor:
    """Return the bin of each probability, in the order of the probabilities.

    Bins are equal parts of z / (|z| + 4) with z the log-odds: 1/128 wide in z at even odds, 1/32 at a probability of
    0.98 or 0.02. Equal parts of the probability would put all rows of a rare class into a few bins.
    """
    z = torch.logit(probabilities, eps=1e-15)
    return ((z / (z.abs() + AUC_CENTRE) + 1) / 2 * AUC_BINS).floor().nan_to_num(0).long()


def _auc_sums(rows: ScoredRows) -> Tensor:
    """Return histograms of each class's probability, for rows of other classes and of that class."""
    likely = rows.probabilities[..., 1:] if rows.task == "binary" else rows.probabilities
    count = likely.shape[-1]
    which = torch.arange(count, device=likely.device)
    own = rows.labels.unsqueeze(-1) == (1 if rows.task == "binary" else which)
    place = _auc_bins(likely) + AUC_BINS * (own + 2 * which)
    weight = torch.where(likely.isnan(), torch.nan, rows.weight.unsqueeze(-1))
    return rows.histogram(place.flatten(-2), weight.flatten(-2), 2 * AUC_BINS * count)


def _auc(sums: Tensor) -> Tensor:
    """Return the share of pairs in the right order, ties counted by half, the mean over classes that have pairs."""
    count = sums.shape[-1] // (2 * AUC_BINS)
    others, own = sums.reshape(*sums.shape[:-1], count, 2, AUC_BINS).unbind(-2)
    below = others.cumsum(-1) - others / 2
    pairs = others.sum(-1) * own.sum(-1)
    shares = torch.where(pairs == 0, torch.nan, (own * below).sum(-1) / pairs)
    return _mean_where_defined(shares, pairs == 0)


def _mean_where_defined(values: Tensor, undefined: Tensor) -> Tensor:
    """Return the mean over the last axis of what is defined, [..., 1]; other NaN stay NaN."""
    kept = torch.where(undefined, 0, values).sum(-1, keepdim=True)
    return kept / (~undefined).sum(-1, keepdim=True)


def _by_class(rows: ScoredRows, label: Tensor, value: Tensor) -> Tensor:
    """Return the weighted sum of `value` over the rows of each class, [..., C]."""
    return rows.histogram(label, value * rows.weight, rows.classes)


def _balanced_sums(rows: ScoredRows) -> Tensor:
    right = _by_class(rows, rows.labels, rows.correct)
    return torch.cat([right, _by_class(rows, rows.labels, torch.ones_like(rows.correct))], -1)


def _balanced(sums: Tensor) -> Tensor:
    right, all_ = sums.chunk(2, -1)
    return _mean_where_defined(right / all_, all_ == 0)


def _f1_sums(rows: ScoredRows) -> Tensor:
    """Return, for each class, twice the rows rightly called so, and the rows called so or of the class."""
    one = torch.ones_like(rows.correct)
    right = 2 * _by_class(rows, rows.labels, rows.correct)
    named = _by_class(rows, rows.labels, one) + _by_class(rows, rows.predicted, one)
    first = 1 if rows.task == "binary" else 0
    return torch.cat([right[..., first:], named[..., first:]], -1)


def _brier(rows: ScoredRows) -> Tensor:
    missed = rows.probabilities - torch.nn.functional.one_hot(rows.labels, rows.classes)
    square = missed.square().sum(-1)
    return rows.mean(square / 2 if rows.task == "binary" else square)


def _ece_sums(rows: ScoredRows) -> Tensor:
    """Return confidence minus accuracy of the rows in each bin of the predicted class's probability."""
    sure = rows.probabilities.gather(-1, rows.predicted.unsqueeze(-1)).squeeze(-1)
    place = (sure * ECE_BINS).ceil().nan_to_num(1).long() - 1
    return rows.histogram(place, (sure - rows.correct) * rows.weight, ECE_BINS)


ACCURACY = Metric(
    "accuracy",
    sums=lambda rows: rows.mean(rows.correct),
    higher_is_better=True,
    tasks=CLASSES,
    low=0.0,
    high=1.0,
    percent=True,
)
BALANCED_ACCURACY = Metric(
    "balanced-accuracy",
    sums=_balanced_sums,
    finish=_balanced,
    higher_is_better=True,
    tasks=CLASSES,
    title="balanced accuracy",
    low=0.0,
    high=1.0,
    percent=True,
)
AUC = Metric(
    "auc",
    sums=_auc_sums,
    finish=_auc,
    higher_is_better=True,
    tasks=CLASSES,
    title="area under the ROC curve",
    low=0.0,
    high=1.0,
    undefined="all rows are of one class",
)
LOG_LOSS = Metric(
    "log-loss",
    sums=lambda rows: rows.mean(rows.row_loss.double()),
    tasks=CLASSES,
    low=0.0,
)
BRIER = Metric("brier", sums=_brier, tasks=CLASSES, title="Brier score", low=0.0, high=2.0)
ECE = Metric(
    "ece",
    sums=_ece_sums,
    finish=lambda sums: sums.abs().sum(-1, keepdim=True),
    tasks=CLASSES,
    title="expected calibration error",
    low=0.0,
    high=1.0,
)
F1 = Metric(
    "f1",
    sums=_f1_sums,
    finish=_balanced,
    higher_is_better=True,
    tasks=CLASSES,
    title="F1 score",
    low=0.0,
    high=1.0,
    undefined="binary: class 1 neither occurs nor is predicted",
)

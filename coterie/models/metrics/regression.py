"""Metrics of models that predict numbers."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.models.metrics.metric import Metric, ScoredRows

REGRESSION = ("regression",)
CONSTANT = 1e-12  # a variance below this share of the mean square is rounding
QUANTILE = "quantile-"


def _r2_sums(rows: ScoredRows) -> Tensor:
    y, error = rows.targets.double(), rows.error.double()
    return rows.mean(torch.ones_like(y), y, y * y, error * error)


def _r2(sums: Tensor) -> Tensor:
    total, y, square, error = sums.unbind(-1)  # weights in single precision add up to one only nearly
    mean, square, error = y / total, square / total, error / total
    variance = square - mean * mean
    value = torch.where(variance <= CONSTANT * square, torch.nan, 1 - error / variance)
    return value.unsqueeze(-1)


RMSE = Metric(
    "rmse",
    sums=lambda rows: rows.mean(rows.error * rows.error),
    finish=torch.sqrt,
    tasks=REGRESSION,
    title="root mean squared error",
    low=0.0,
    scales_with_target=True,
)
MAE = Metric(
    "mae",
    sums=lambda rows: rows.mean(rows.error.double().abs()),
    tasks=REGRESSION,
    title="mean absolute error",
    low=0.0,
    scales_with_target=True,
)
R2 = Metric(
    "r2",
    sums=_r2_sums,
    finish=_r2,
    higher_is_better=True,
    tasks=REGRESSION,
    title="coefficient of determination",
    high=1.0,
    undefined="all targets are equal",
)


@functools.cache
def quantile_loss(level: float) -> Metric:
    """Return the pinball loss of predictions of a quantile.

    Parameters
    ----------
    level
        Level of the quantile, above 0 and below 1.

    Returns
    -------
    Metric
        Its name is 'quantile-' and the level. It is the mean of `level * e` where e = target - prediction is positive
        and of `(level - 1) * e` where it is negative.

    Examples
    --------
    >>> quantile_loss(0.9).value("regression", torch.tensor([[1.0], [3.0]]), torch.tensor([2.0, 2.0]))
    0.5
    """
    if not 0.0 < level < 1.0:
        raise SettingError(f"{QUANTILE}{level}: the level of a quantile is above 0 and below 1")

    def sums(rows: ScoredRows) -> Tensor:
        error = -rows.error.double()
        return rows.mean(torch.maximum(level * error, (level - 1) * error))

    return Metric(
        f"{QUANTILE}{level}",
        sums=sums,
        tasks=REGRESSION,
        title=f"pinball loss of the {level} quantile",
        low=0.0,
        scales_with_target=True,
    )

"""Values of single rows held out, and the metric by which methods are chosen on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from coterie.models.base import Model
from coterie.models.metrics import LOSS, Metric, find


@dataclass(frozen=True)
class HeldOutRows:
    """The client and the value in each metric of every row held out, [rows] each."""

    client: Tensor
    values: dict[str, Tensor]

    def cost(self, metric: Metric, judge: Metric, clients: int) -> float:
        """Return the judge's mean over clients, so that lower is better, from the values in a metric."""
        who = self.client.numpy()
        with np.errstate(all="ignore"):
            means = np.bincount(who, self.values[metric.name].numpy(), clients) / np.bincount(
                who, minlength=clients
            )
        return judge.cost(float(np.nanmean(np.sqrt(means) if judge.is_root else means)))


def choosing_metric(judge: Metric, model: Model) -> Metric:
    """Return the metric whose values of single rows methods are chosen by: for the loss of numbers, squared errors.

    Methods may train models whose losses have scales of their own; errors in the target's units are of one kind.
    """
    squares = judge.name == LOSS.name and model.task == "regression" and not model.target_in_units
    return find("rmse") if squares else judge

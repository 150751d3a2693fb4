"""Metrics: find them by name, and add your own.

A metric reduces the rows of each client to a few sums and turns sums into a value. The value of one client, the value
over the rows of all clients and the value that machines elsewhere compute all come from the same sums.

>>> from coterie import metrics
>>> metrics.names("regression")
['loss', 'rmse', 'mae', 'r2', 'quantile-0.5']
>>> auc = metrics.find("auc")
>>> auc.direction, auc.tasks
('higher is better', ('binary', 'multiclass'))
>>> import torch
>>> auc.value("binary", torch.tensor([[0.3], [-1.0], [2.0], [0.1]]), torch.tensor([1, 0, 1, 1]))
1.0

A metric of your own is a `Metric`, used wherever a name is taken. This one is the share of predictions that are off by
more than one unit of the (encoded) target:

>>> far = metrics.Metric(
...     "far-off",
...     sums=lambda rows: rows.mean((rows.error.abs() > 1).double()),
...     tasks=("regression",),
...     low=0.0,
...     high=1.0,
...     percent=True,
... )
>>> far.value("regression", torch.tensor([[0.0], [3.0]]), torch.tensor([0.5, 0.5]))
0.5
"""

from __future__ import annotations

from coterie.models.metrics import Metric, ScoredRows, find, main_metric, names, quantile_loss, register

__all__ = ["Metric", "ScoredRows", "find", "main_metric", "names", "quantile_loss", "register"]

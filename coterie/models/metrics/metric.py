"""What a metric is: per-client sums over rows, and the value that follows from them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from coterie._core.errors import DataError, SettingError, nearest
from coterie.models.risk_sets import row_losses

TASKS = ("regression", "binary", "multiclass", "language", "survival")
CLASSES = ("binary", "multiclass")
ROUNDING = 1e-6  # by which a value may lie outside its range
RESERVED = ("rows",)  # the name of the row counts that travel beside the sums


@dataclass(frozen=True)
class ScoredRows:
    """Rows of a stack of clients with the scores of their models, as a metric sees them.

    Leading axes `...` are the clients. Rows of clients of different sizes are padded to B; padding has weight 0.

    Parameters
    ----------
    task
        'regression', 'binary', 'multiclass', 'language' or 'survival'.
    scores
        Outputs before the link, [..., B, outputs]: one column for regression, binary and
        survival, else one per class. For 'language' B is 1 and the score is the mean loss of the client's tokens.
    targets
        Numbers, labels 0..C-1, or times with their sign (plus: an event), [..., B].
    weight
        Row weights, [..., B], which sum to one for a client with rows.
    losses
        Losses of the rows, [..., B], where they are not those of the task.

    Examples
    --------
    >>> rows = ScoredRows("binary", torch.tensor([[2.0], [-1.0]]), torch.tensor([1, 1]), torch.full((2,), 0.5))
    >>> rows.predicted
    tensor([1, 0])
    >>> rows.mean(rows.correct)
    tensor([0.5000])
    """

    task: str
    scores: Tensor
    targets: Tensor
    weight: Tensor
    losses: Tensor | None = None

    def mean(self, *values: Tensor) -> Tensor:
        """Return the weighted mean over rows of each of k values [..., B], together [..., k]."""
        means = [(value * self.weight).sum(-1, keepdim=True) for value in values]
        return means[0] if len(means) == 1 else torch.cat(means, -1)

    def histogram(self, bins: Tensor, value: Tensor, count: int) -> Tensor:
        """Return the sum of the values [..., N] that lie in each of `count` bins, [..., count].

        Weights are not applied. A NaN value makes its bin NaN.
        """
        empty = torch.zeros(*bins.shape[:-1], count, dtype=torch.float64, device=bins.device)
        return empty.scatter_add_(-1, bins.clamp(0, count - 1), value.double())

    @functools.cached_property
    def error(self) -> Tensor:
        """Prediction minus target of a regression, [..., B]."""
        return self.scores.squeeze(-1) - self.targets

    @functools.cached_property
    def row_loss(self) -> Tensor:
        """Half the squared error, or the log-loss of the right class, [..., B], unless the model has its own loss."""
        if self.losses is not None:
            return self.losses
        if self.task == "regression":
            return 0.5 * self.error * self.error
        if self.task == "language":
            return self.scores.squeeze(-1)
        if self.task == "survival":
            return row_losses(self.scores.squeeze(-1), self.targets, self.weight)
        if self.task == "binary":
            z = self.scores.squeeze(-1)
            return functional.softplus(z) - z * self.targets
        chosen = self.scores.gather(-1, self.labels.unsqueeze(-1)).squeeze(-1)
        return torch.logsumexp(self.scores, -1) - chosen

    @property
    def classes(self) -> int:
        """Number of classes."""
        return 2 if self.task == "binary" else self.scores.shape[-1]

    @functools.cached_property
    def labels(self) -> Tensor:
        """Right class of each row, [..., B]."""
        return (self.targets > 0.5).long() if self.task == "binary" else self.targets.long()

    @functools.cached_property
    def predicted(self) -> Tensor:
        """Most likely class of each row, [..., B]."""
        return (self.scores.squeeze(-1) > 0).long() if self.task == "binary" else self.scores.argmax(-1)

    @functools.cached_property
    def correct(self) -> Tensor:
        """1 where the most likely class is the right one, else 0, [..., B]."""
        if self.task == "binary":
            right = (self.scores.squeeze(-1) > 0) == (self.targets > 0.5)
        else:
            right = self.predicted == self.labels
        return right.to(self.scores.dtype)

    @functools.cached_property
    def probabilities(self) -> Tensor:
        """Probability of each class in double precision, [..., B, C]."""
        scores = self.scores.double()
        if self.task == "binary":
            return torch.cat([torch.sigmoid(-scores), torch.sigmoid(scores)], -1)
        return torch.softmax(scores, -1)


def itself(sums: Tensor) -> Tensor:
    """Return the sums: the metric is a mean over rows."""
    return sums


@dataclass(frozen=True)
class Metric:
    """A metric that is computed from sums over rows.

    `sums` reduces the rows of each client to k numbers that are weighted means over rows; `finish` turns them into the
    value. A client's value is `finish(sums)`. The value over all rows of all clients is `pooled`: `finish` of the
    clients' sums, averaged by their numbers of rows. So rows never have to be in one place.

    Parameters
    ----------
    name
        Letters, digits, `.`, `_` and `-`, such as 'auc'.
    sums
        Function of `ScoredRows` that returns [..., k]. k may depend on the task and the number of classes only.
    finish
        Function of sums [..., k] that returns values [..., 1], NaN where the metric is not defined.
    higher_is_better
        Direction of the metric.
    tasks
        Tasks it applies to.
    title
        Name for readers; the name if not given.
    low, high
        Range of the value.
    undefined
        When the value is NaN, in words; empty if it never is.
    scales_with_target
        Whether the value is in the units of the target.
    percent
        Whether the value is a share that reports show in per cent.

    Examples
    --------
    >>> bias = Metric("bias", sums=lambda rows: rows.mean(rows.error), finish=torch.abs, tasks=("regression",))
    >>> bias.value("regression", torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 1.0]))
    1.0
    """

    name: str
    sums: Callable[[ScoredRows], Tensor]
    finish: Callable[[Tensor], Tensor] = itself
    higher_is_better: bool = False
    tasks: tuple[str, ...] = TASKS
    title: str = ""
    low: float = -math.inf
    high: float = math.inf
    undefined: str = ""
    scales_with_target: bool = False
    percent: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", self.name) or self.name in RESERVED:
            raise SettingError(
                f"a metric cannot be called {self.name!r}: begin with a letter, go on with letters, digits, '.', '_', "
                f"'-', and avoid {', '.join(RESERVED)}"
            )
        for task in self.tasks:
            if task not in TASKS:
                raise SettingError(f"metric {self.name}: no task {task!r}.{nearest(task, TASKS)}")
        if not self.title:
            object.__setattr__(self, "title", self.name)

    @property
    def direction(self) -> str:
        """'higher is better' or 'lower is better'."""
        return "higher is better" if self.higher_is_better else "lower is better"

    @property
    def sign(self) -> float:
        """1 if higher is better, else -1: `sign` times a difference is a gain."""
        return 1.0 if self.higher_is_better else -1.0

    @property
    def is_mean(self) -> bool:
        """Whether the value is a mean over rows or its square root, so that rows can be compared one by one."""
        return self.finish is itself or self.is_root

    @property
    def is_root(self) -> bool:
        """Whether the value is the square root of a mean over rows."""
        return self.finish is torch.sqrt

    def by_row(self, rows: ScoredRows) -> Tensor:
        """Return the value of every row by itself, [..., B], squared where the metric is a root; needs `is_mean`."""
        alone = torch.ones_like(rows.weight).unsqueeze(-1)
        coupled = rows.losses is not None or rows.task == "survival"
        losses = rows.row_loss.unsqueeze(-1) if coupled else None
        single = ScoredRows(rows.task, rows.scores.unsqueeze(-2), rows.targets.unsqueeze(-1), alone, losses)
        return self.sums(single).squeeze(-1)

    def cost(self, value: float) -> float:
        """Return the value so that lower is better."""
        return -value if self.higher_is_better else value

    def pooled(self, sums: Tensor, rows: Tensor) -> Tensor:
        """Return the value over the rows of all clients.

        Parameters
        ----------
        sums
            Sums of n clients, [n, k].
        rows
            Numbers of rows, [n, 1]. A client without rows, or with NaN among its sums, does not count.

        Returns
        -------
        Tensor
            The value, [1]; NaN if no client counts.
        """
        counts = (rows > 0) & ~sums.isnan().any(-1, keepdim=True)
        share = torch.where(counts, rows, 0).double()
        kept = torch.where(counts, sums.double(), 0)
        value = self.finish((kept * share).sum(0) / share.sum())
        return torch.where(counts.any(), value, torch.nan)

    def in_range(self, sums: Tensor) -> Tensor:
        """Return which sums give a value between `low` and `high`, or none, [..., 1]."""
        value = self.finish(sums)
        return value.isnan() | ((value >= self.low - ROUNDING) & (value <= self.high + ROUNDING))

    def undefined_error(self, split: str) -> DataError:
        """Return the error for a split on whose rows the metric is not defined for any client."""
        why = f" ({self.undefined})" if self.undefined else ""
        return DataError(
            f"{self.name} is not defined on the {split} rows of any client{why}; choose another metric, or give "
            "clients more rows"
        )

    def value(self, task: str, scores: Tensor, targets: Tensor, weight: Tensor | None = None) -> float:
        """Return the value for the rows of one client.

        Parameters
        ----------
        task
            'regression', 'binary', 'multiclass', 'language' or 'survival'.
        scores
            Outputs before the link, [B, outputs].
        targets
            Numbers or labels, [B].
        weight
            Row weights, [B]; equal ones if not given.

        Returns
        -------
        float
            The value; NaN where the metric is not defined.
        """
        weight = torch.ones(len(targets), dtype=torch.float64) if weight is None else weight
        rows = ScoredRows(task, scores, targets, weight / weight.sum())
        return float(self.finish(self.sums(rows)))

    def no_rows(self, task: str, outputs: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the sums [k] of a client without rows, for models with so many outputs."""
        scores, nothing = torch.zeros(1, outputs, dtype=dtype), torch.zeros(1, dtype=dtype)
        return self.sums(ScoredRows(task, scores, nothing, nothing))

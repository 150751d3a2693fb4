"""Cox regression of survival times: the baseline hazard is every client's own, so each client is a stratum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from coterie._core.errors import DataError
from coterie.models.glm import Glm
from coterie.models.metrics import Metric, ScoredRows
from coterie.models.risk_sets import RiskCurvature, RiskSets, row_losses, slopes
from coterie.models.targets import check_column


@dataclass(frozen=True)
class Cox(Glm):
    """Cox regression: the hazard of a row is h_i(t) exp(x'w), with any baseline h_i of its client i.

    The loss is minus the logarithm of the partial likelihood (Cox, 1975; ties by Breslow), over risk sets of the
    client's own rows. It is divided by the number of events, taken over all clients (`scale` rows to an event), unless
    rows are summed. There is no intercept: the baseline holds it.
    """

    scale: float = 1.0

    name: ClassVar[str] = "cox"
    curvature: ClassVar[float] = 1.0
    has_hessian: ClassVar[bool] = False  # of single rows, which is what methods ask for
    whole_clients: ClassVar[bool] = True

    @property
    def task(self) -> str:
        return "survival"

    @property
    def target_in_units(self) -> bool:
        return True

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        check_column(y)
        if bool((y == 0).any()):
            raise DataError(
                f"Target of row {int((y == 0).nonzero()[0])} is 0. Times are above 0: +t for an event at t, -t for a "
                "row without one until t."
            )
        if self.features is not None:  # newcomers of a run have its scale
            return super().fit_to(x, y)
        events = int((y > 0).sum())
        if not events:
            raise DataError("No row has an event, so there is nothing to learn about survival.")
        scale = len(y) / events if self.reduction == "mean" else 1.0
        return replace(super().fit_to(x, y), scale=scale)

    def loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        value = self.scale * (row_losses(self._z(w, x), y, weight) * weight).sum(-1, keepdim=True)
        return value + (0.5 * self.l2) * w.square().sum(-1, keepdim=True)

    def grad(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        slope = self.scale * slopes(self._z(w, x), y, weight)
        return (slope.unsqueeze(-2) @ x).squeeze(-2) + self.l2 * w

    def hvp(self, w: Tensor, v: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        bent = self.scale * RiskCurvature.at(self._z(w, x), y, weight).bend(self._z(v, x))
        return (bent.unsqueeze(-2) @ x).squeeze(-2) + self.l2 * v

    def hessian(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        matrix = self.scale * RiskCurvature.at(self._z(w, x), y, weight).matrix(x)
        matrix.diagonal(dim1=-2, dim2=-1).add_(self.l2)
        return matrix

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the largest curvature at w, an estimate: that of other points may be larger."""
        values: Tensor = torch.linalg.eigvalsh(self.hessian(w, x, y, weight))
        return values[..., -1:].to(w.dtype)

    def measure(
        self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, metrics: Sequence[Metric]
    ) -> dict[str, Tensor]:
        z = self._z(w, x)
        rows = ScoredRows(self.task, z.unsqueeze(-1), y, weight, self.scale * row_losses(z, y, weight))
        return {metric.name: metric.sums(rows) for metric in metrics}

    def _z(self, w: Tensor, x: Tensor) -> Tensor:
        """Return the logarithm of each row's hazard, less its client's baseline, [..., B]."""
        return (x @ w.unsqueeze(-1)).squeeze(-1)

    def _margins(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return how far a row with an event is below the highest score at risk, and above the lowest, [..., 2, B]."""
        sets = RiskSets.of(y, torch.ones_like(y))
        z = sets.sort(scores.squeeze(-2))
        highest, lowest = (part.values.gather(-1, sets.last) for part in (z.cummax(-1), z.cummin(-1)))
        margins = torch.stack([z - highest, z - lowest], -2) * (sets.event > 0).unsqueeze(-2)
        return torch.stack([sets.back(part) for part in margins.unbind(-2)], -2)


def cox(l2: float = 0.0, reduction: str = "mean") -> Cox:
    """Return Cox regression for survival times, stratified by client.

    Parameters
    ----------
    l2
        Strength of the penalty l2/2 |w|^2.
    reduction
        Divide a client's loss by its rows, times the number of rows to an event over all clients ("mean"), or not
        ("sum").

    Returns
    -------
    Cox
        A model whose score is the logarithm of the relative hazard. Targets are signed times: +t for an event at t,
        -t for a row that was last seen at t without one.

    Examples
    --------
    >>> import torch, coterie
    >>> x, y = torch.tensor([[1.0], [0.0], [1.0], [0.0]]), torch.tensor([1.0, 2.0, 3.0, -4.0])
    >>> model = coterie.models.cox().fit_to(x, y)
    >>> w = model.solve(torch.zeros(1), x, y, torch.full((4,), 0.25), tol=1e-9)
    >>> round(float(w.exp()), 2)  # the hazard ratio
    2.56
    """
    return Cox(l2, False, reduction)

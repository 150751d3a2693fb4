"""Ordered classes: the cumulative logit (proportional odds) model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie._core.errors import SettingError
from coterie.models.extended_glm import ExtendedGlm
from coterie.models.targets import count_classes


class OrdinalPredictor(nn.Module):
    """Probabilities of ordered classes, from raw inputs."""

    def __init__(self, weight: Tensor, bias: Tensor, cuts: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
        self.cuts = nn.Parameter(cuts.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = x.flatten(1).to(self.weight.dtype) @ self.weight + self.bias
        above = torch.sigmoid(z.unsqueeze(-1) - self.cuts)
        ends = torch.ones_like(above[:, :1])
        return torch.cat([ends, above], -1) - torch.cat([above, 0 * ends], -1)


@dataclass(frozen=True)
class Ordinal(ExtendedGlm):
    """Ordered classes 0..C-1: P(y > c) = logistic(x'w - k_c), k_0 = 0, k_c = k_(c-1) + exp(gap_c)."""

    classes: int | None = None

    name: ClassVar[str] = "ordinal"

    @property
    def outputs(self) -> int:
        if self.classes is None:
            raise SettingError("ordinal() does not know its classes yet; call fit_to(x, y) first.")
        return self.classes

    @property
    def extra_names(self) -> tuple[str, ...]:
        return tuple(f"log gap {k}" for k in range(1, self.outputs - 1))

    @property
    def task(self) -> str:
        return "multiclass"

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        return replace(super().fit_to(x, y), classes=max(2, count_classes(y, self.classes)))

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        """Return the logarithms of the classes' probabilities, [..., B, C]."""
        z, extras = self._split(w, x)
        classes = [-self.row_loss(z, extras, torch.full_like(z, float(c))) for c in range(self.outputs)]
        return torch.stack(classes, -1)

    def row_loss(self, z: Tensor, extras: Tensor, y: Tensor) -> Tensor:
        """Return -log P(y); P = F(z - low) F(high - z) (1 - exp(low - high)) for the logistic F."""
        label, top = y.long(), self.outputs - 1
        gaps = extras.clamp(min=-20.0).exp()
        cuts = torch.cat([torch.zeros_like(z).unsqueeze(-2), gaps.cumsum(-2)], -2)
        low = cuts.gather(-2, (label - 1).clamp(min=0).unsqueeze(-2)).squeeze(-2)
        high = cuts.gather(-2, label.clamp(max=top - 1).unsqueeze(-2)).squeeze(-2)
        above = torch.where(label > 0, functional.softplus(low - z), 0.0)
        below = torch.where(label < top, functional.softplus(z - high), 0.0)
        inside = (label > 0) & (label < top)
        width = torch.where(inside, high - low, 1.0)
        return above + below - torch.where(inside, torch.log(-torch.expm1(-width)), 0.0)

    def module(self, w: Tensor) -> nn.Module:
        w = w.detach()
        last = self.columns - self.intercept
        bias = w[last : self.columns] if self.intercept else w.new_zeros(1)
        gaps = w[self.columns :].clamp(min=-20.0).exp()
        return OrdinalPredictor(w[:last], bias, torch.cat([w.new_zeros(1), gaps.cumsum(0)]))


def ordinal(
    l2: float = 0.0, intercept: bool = True, reduction: str = "mean", classes: int | None = None
) -> Ordinal:
    """Return the cumulative logit model for ordered classes 0..C-1.

    Parameters
    ----------
    l2
        Strength of the penalty l2/2 |w|^2; intercept and cut points are not penalised.
    intercept
        Add an intercept. Without one the first cut point is at 0 for all.
    reduction
        Combine the losses of a client's rows by their "mean" or their "sum".
    classes
        Number of classes C; needed if the largest label may be missing from the data.

    Returns
    -------
    Ordinal
        A model whose last C - 2 parameters are the logarithms of the distances between cut points.

    Examples
    --------
    >>> import torch, coterie
    >>> x, y = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([0, 1, 2])
    >>> model = coterie.models.ordinal().fit_to(x, y)
    >>> model.d, model.module(torch.zeros(3))(x).sum(-1).tolist()
    (3, [1.0, 1.0, 1.0])
    """
    return Ordinal(l2, intercept, reduction, classes=classes)

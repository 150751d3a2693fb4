"""Counts: Poisson and negative binomial regression with a logarithmic link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from coterie._core.errors import CoterieError, DataError
from coterie.models.extended_glm import ExtendedGlm
from coterie.models.glm import Glm, gram_eigenvalues
from coterie.models.predictor import LinearPredictor
from coterie.models.targets import check_column


class CountPredictor(nn.Module):
    """Expected counts exp(x'w) of raw inputs."""

    def __init__(self, linear: LinearPredictor) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x)
        return scores.exp()


def _check_counts(y: Tensor) -> None:
    """Raise an error unless targets are whole numbers, 0 or more."""
    check_column(y)
    wrong = (y < 0) | (y != y.round())
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise DataError(
            f"Target of row {row} is {y[row].item():g}, which is no count. Counts are 0, 1, 2, ...; "
            "for other quantities use models.linear()."
        )


@dataclass(frozen=True)
class Poisson(Glm):
    """Poisson regression: exp(z) - y z + log y! with z = x'w and counts y."""

    name: ClassVar[str] = "poisson"
    curvature: ClassVar[float] = 1.0

    @property
    def task(self) -> str:
        return "regression"

    @property
    def target_in_units(self) -> bool:
        return True

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        _check_counts(y)
        return super().fit_to(x, y)

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        """Return expected counts, [..., B, 1]."""
        return super().scores(w, x).exp()

    def hessian(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        mean = (self._table(w) @ x.mT).exp()
        matrix = (x.mT * (mean * weight.unsqueeze(-2))) @ x
        matrix.diagonal(dim1=-2, dim2=-1).add_(self._penalty_diagonal(w))
        return matrix

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the largest curvature at w, an estimate: there is no bound for all w."""
        mean = (self._table(w) @ x.mT).squeeze(-2).exp()
        return (gram_eigenvalues(x, weight * mean)[..., -1:] + self.l2).to(w.dtype)

    def module(self, w: Tensor) -> nn.Module:
        linear = super().module(w)
        assert isinstance(linear, LinearPredictor)
        return CountPredictor(linear)

    def _row_losses(self, scores: Tensor, y: Tensor) -> Tensor:
        z, y = scores.squeeze(-2), y.to(scores.dtype)
        return z.exp() - y * z + torch.lgamma(y + 1)

    @staticmethod
    def _residuals(scores: Tensor, y: Tensor) -> Tensor:
        return scores.exp_().sub_(y.unsqueeze(-2))

    def _bend(self, scores: Tensor, change: Tensor) -> Tensor:
        return scores.exp() * change

    def _margins(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return margins that no direction raises unless the loss falls along it without end."""
        return torch.where(y.unsqueeze(-2) == 0, -scores, -scores.abs())

    def _check_classes_present(self, y: Tensor, weight: Tensor) -> None:
        counted = ((y > 0) & (weight > 0)).any(-1)
        if not bool(counted.all()):
            client = int((~counted).nonzero()[0])
            raise CoterieError(
                f"{self.name}: all counts of client {client} of the stack are 0, so its best intercept is minus "
                "infinity. Use intercept=False together with l2 > 0, or leave that client out."
            )


@dataclass(frozen=True)
class NegativeBinomial(ExtendedGlm):
    """Counts with variance m + a m^2 around the mean m = exp(x'w); the last parameter is log a."""

    name: ClassVar[str] = "negative_binomial"

    @property
    def task(self) -> str:
        return "regression"

    @property
    def target_in_units(self) -> bool:
        return True

    @property
    def extras(self) -> int:
        return 1

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        _check_counts(y)
        return super().fit_to(x, y)

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        """Return expected counts, [..., B, 1]."""
        return super().scores(w, x).exp()

    def row_loss(self, z: Tensor, extras: Tensor, y: Tensor) -> Tensor:
        log_a = extras[..., 0, :].clamp(min=-20.0)
        shape, spread = (-log_a).exp(), torch.nn.functional.softplus(z + log_a)
        ways = torch.lgamma(y + shape) - torch.lgamma(shape) - torch.lgamma(y + 1)
        return (y + shape) * spread - y * (z + log_a) - ways

    def module(self, w: Tensor) -> nn.Module:
        bias = w[self.columns - 1].reshape(1) if self.intercept else None
        weight = w[: self.columns - self.intercept].unsqueeze(0)
        return CountPredictor(LinearPredictor(weight.detach(), bias, self.task))


def poisson(l2: float = 0.0, intercept: bool = False, reduction: str = "mean") -> Poisson:
    """Return Poisson regression for counts 0, 1, 2, ...

    Parameters
    ----------
    l2
        Strength of the penalty l2/2 |w|^2; the intercept is not penalised.
    intercept
        Add an intercept.
    reduction
        Combine the losses of a client's rows by their "mean" or their "sum".

    Returns
    -------
    Poisson
        A model whose scores are expected counts.

    Examples
    --------
    >>> import torch, coterie
    >>> x, y = torch.ones(3, 1, dtype=torch.float64), torch.tensor([0.0, 1.0, 5.0])
    >>> model = coterie.models.poisson().fit_to(x, y)
    >>> w = model.solve(torch.zeros(1), x, y, torch.full((3,), 1 / 3), tol=1e-9)
    >>> round(float(w.exp()), 6)
    2.0
    """
    return Poisson(l2, intercept, reduction)


def negative_binomial(l2: float = 0.0, intercept: bool = False, reduction: str = "mean") -> NegativeBinomial:
    """Return negative binomial regression for counts that vary more than Poisson's.

    Parameters
    ----------
    l2
        Strength of the penalty l2/2 |w|^2; intercept and dispersion are not penalised.
    intercept
        Add an intercept.
    reduction
        Combine the losses of a client's rows by their "mean" or their "sum".

    Returns
    -------
    NegativeBinomial
        A model whose scores are expected counts; its last parameter is the logarithm of the dispersion a in the
        variance m + a m^2.

    Examples
    --------
    >>> import torch, coterie
    >>> x, y = torch.ones(4, 2), torch.tensor([0.0, 1.0, 1.0, 5.0])
    >>> model = coterie.models.negative_binomial(intercept=True).fit_to(x, y)
    >>> model.d, model.groups["extras"].tolist()
    (4, [False, False, False, True])
    """
    return NegativeBinomial(l2, intercept, reduction)

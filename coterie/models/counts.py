"""Counts and amounts: Poisson, negative binomial and Tweedie regression with a logarithmic link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from coterie._core.errors import CoterieError, DataError, SettingError
from coterie.models.extended_glm import ExtendedGlm
from coterie.models.glm import Glm, gram_eigenvalues
from coterie.models.metrics import Metric, ScoredRows
from coterie.models.objectives import TWEEDIE_POWER, poisson_loss, tweedie_derivatives, tweedie_loss
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
class LogLink(Glm):
    """A quantity of 0 or more whose mean is exp(z), z = x'w; validation rows are judged by the loss that is trained."""

    curvature: ClassVar[float] = 1.0

    @property
    def task(self) -> str:
        return "regression"

    @property
    def target_in_units(self) -> bool:
        return True

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        """Return expected values, [..., B, 1]."""
        return super().scores(w, x).exp()

    def judged(self, margins: Tensor, y: Tensor) -> Tensor:
        """Return the losses [..., B] of margins [..., B, 1], without what depends on the targets alone."""
        raise NotImplementedError

    def measure(
        self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, metrics: Sequence[Metric]
    ) -> dict[str, Tensor]:
        margins = super().scores(w, x)
        rows = ScoredRows(self.task, margins.exp(), y, weight, self.judged(margins, y.to(margins.dtype)))
        return {metric.name: metric.sums(rows) for metric in metrics}

    def hessian(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        matrix = (x.mT * self._bent(w, x, y, weight).unsqueeze(-2)) @ x
        matrix.diagonal(dim1=-2, dim2=-1).add_(self._penalty_diagonal(w))
        return matrix

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the largest curvature at w, an estimate: there is no bound for all w."""
        return (gram_eigenvalues(x, self._bent(w, x, y, weight))[..., -1:] + self.l2).to(w.dtype)

    def module(self, w: Tensor) -> nn.Module:
        linear = super().module(w)
        assert isinstance(linear, LinearPredictor)
        return CountPredictor(linear)

    def _bent(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the second derivative of each row's loss times its weight, [..., B]."""
        scores = self._table(w) @ x.mT
        return weight * self._bend(scores, y, torch.ones_like(scores)).squeeze(-2)

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
class Poisson(LogLink):
    """Poisson regression: exp(z) - y z + log y! with z = x'w and counts y."""

    name: ClassVar[str] = "poisson"

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        _check_counts(y)
        return super().fit_to(x, y)

    def judged(self, margins: Tensor, y: Tensor) -> Tensor:
        return poisson_loss(margins, y)

    def _row_losses(self, scores: Tensor, y: Tensor) -> Tensor:
        z, y = scores.squeeze(-2), y.to(scores.dtype)
        return z.exp() - y * z + torch.lgamma(y + 1)

    @staticmethod
    def _residuals(scores: Tensor, y: Tensor) -> Tensor:
        return scores.exp_().sub_(y.unsqueeze(-2))

    def _bend(self, scores: Tensor, y: Tensor, change: Tensor) -> Tensor:
        return scores.exp() * change


@dataclass(frozen=True)
class Tweedie(LogLink):
    """Tweedie regression: exp((2 - p) z)/(2 - p) - y exp((1 - p) z)/(1 - p), with variance mean^p."""

    power: float = field(default=TWEEDIE_POWER, kw_only=True)

    name: ClassVar[str] = "tweedie"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 < self.power < 2:
            raise SettingError(
                f"tweedie: power = {self.power:g} is not between 1 and 2; models.poisson() has power 1"
            )

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        check_column(y)
        if bool((y < 0).any()):
            row = int((y < 0).nonzero()[0])
            raise DataError(f"Target of row {row} is {y[row].item():g}; amounts are 0 or more.")
        return super().fit_to(x, y)

    def judged(self, margins: Tensor, y: Tensor) -> Tensor:
        return tweedie_loss(margins, y, self.power)

    def _row_losses(self, scores: Tensor, y: Tensor) -> Tensor:
        return tweedie_loss(scores.mT, y.to(scores.dtype), self.power)

    def _residuals(self, scores: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return tweedie_derivatives(scores.mT, y.to(scores.dtype), self.power)[0].mT

    def _bend(self, scores: Tensor, y: Tensor, change: Tensor) -> Tensor:
        return tweedie_derivatives(scores.mT, y.to(scores.dtype), self.power)[1].mT * change


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
    def extra_names(self) -> tuple[str, ...]:
        return ("log dispersion",)

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


def tweedie(
    l2: float = 0.0, intercept: bool = False, reduction: str = "mean", power: float = TWEEDIE_POWER
) -> Tweedie:
    """Return Tweedie regression for amounts of 0 or more with many zeros, such as claims of insured people.

    Parameters
    ----------
    l2
        Strength of the penalty l2/2 |w|^2; the intercept is not penalised.
    intercept
        Add an intercept.
    reduction
        Combine the losses of a client's rows by their "mean" or their "sum".
    power
        p of the variance mean^p, between 1 (Poisson) and 2 (gamma).

    Returns
    -------
    Tweedie
        A model whose scores are expected amounts.

    Examples
    --------
    >>> import torch, coterie
    >>> x, y = torch.ones(3, 1, dtype=torch.float64), torch.tensor([0.0, 1.0, 5.0])
    >>> model = coterie.models.tweedie(power=1.7).fit_to(x, y)
    >>> w = model.solve(torch.zeros(1), x, y, torch.full((3,), 1 / 3), tol=1e-9)
    >>> round(float(w.exp()), 6)
    2.0
    """
    return Tweedie(l2, intercept, reduction, power=power)

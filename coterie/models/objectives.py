"""Losses of a score: the value, first and second derivative of each row, and the best constant score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

TWEEDIE_POWER = 1.5  # variance = mean ** power: between Poisson (1) and gamma (2)
FEWEST = 1e-12  # a share or mean below it counts as this, so that its logarithm is finite


@dataclass(frozen=True)
class Objective:
    """Loss of scores [..., B, outputs] against targets [..., B].

    Attributes
    ----------
    name : str
        Such as "poisson".
    loss : callable
        (scores, y) -> losses, [..., B].
    derivatives : callable
        (scores, y) -> first and second derivative in each score, [..., B, outputs] each; the second is positive.
    constant : callable
        Mean of the targets (of each class, for classes) [outputs] -> the best constant scores [outputs].
    inverse_link : callable
        Scores -> predicted means, for losses of a quantity.
    """

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]
    derivatives: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    constant: Callable[[Tensor], Tensor]
    inverse_link: Callable[[Tensor], Tensor]


def _itself(scores: Tensor) -> Tensor:
    return scores


def _squared_loss(scores: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (scores.squeeze(-1) - y).square()


def _squared(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return scores - y.unsqueeze(-1), torch.ones_like(scores)


def _logistic_loss(scores: Tensor, y: Tensor) -> Tensor:
    z = scores.squeeze(-1)
    return functional.softplus(z * (1 - 2 * y.to(z.dtype)), threshold=50.0)


def _logistic(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    likely = torch.sigmoid(scores)
    return likely - y.to(scores.dtype).unsqueeze(-1), likely * (1 - likely)


def _logit(mean: Tensor) -> Tensor:
    return torch.logit(mean.clamp(FEWEST, 1 - FEWEST))


def _softmax_loss(scores: Tensor, y: Tensor) -> Tensor:
    return torch.logsumexp(scores, -1) - scores.gather(-1, y.long().unsqueeze(-1)).squeeze(-1)


def _softmax(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return p - [y = c] and p (1 - p) C/(C - 1), the diagonal of the Hessian on scores that sum to zero."""
    likely = torch.softmax(scores, -1)
    classes = scores.shape[-1]
    hit = functional.one_hot(y.long(), classes).to(scores.dtype)
    return likely - hit, likely * (1 - likely) * (classes / (classes - 1))


def poisson_loss(scores: Tensor, y: Tensor) -> Tensor:
    """Return the Poisson loss [..., B] of scores [..., B, 1]: half the deviance, up to a constant in the targets."""
    z = scores.squeeze(-1)
    return z.exp() - y * z


def _poisson(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    mean = scores.exp()
    return mean - y.unsqueeze(-1), mean


def tweedie_loss(scores: Tensor, y: Tensor, power: float = TWEEDIE_POWER) -> Tensor:
    """Return the Tweedie loss [..., B] of scores [..., B, 1]: half the deviance, up to a constant in the targets."""
    z, p = scores.squeeze(-1), power
    return torch.exp((2 - p) * z) / (2 - p) - y * torch.exp((1 - p) * z) / (1 - p)


def tweedie_derivatives(scores: Tensor, y: Tensor, power: float = TWEEDIE_POWER) -> tuple[Tensor, Tensor]:
    """Return the first and second derivative of the Tweedie loss in scores [..., B, 1]."""
    p, y = power, y.unsqueeze(-1)
    up, down = torch.exp((2 - p) * scores), torch.exp((1 - p) * scores)
    return up - y * down, (2 - p) * up - (1 - p) * y * down


def _log(mean: Tensor) -> Tensor:
    return mean.clamp(min=FEWEST).log()


OBJECTIVES = {
    "regression": Objective("regression", _squared_loss, _squared, _itself, _itself),
    "binary": Objective("binary", _logistic_loss, _logistic, _logit, _itself),
    "multiclass": Objective("multiclass", _softmax_loss, _softmax, _log, _itself),
    "poisson": Objective("poisson", poisson_loss, _poisson, _log, torch.exp),
    "tweedie": Objective("tweedie", tweedie_loss, tweedie_derivatives, _log, torch.exp),
}
COUNTS = (
    "poisson",
    "tweedie",
)  # losses of quantities that are never negative, with the score on the log scale

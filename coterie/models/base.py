"""What a model is to the engine: a loss over one flat parameter vector, for a stack of clients.

Shapes, with any number of leading axes: parameters `w` [..., d], inputs `x` [..., B, *features],
targets `y` [..., B], row weights `weight` [..., B] (zero for padding). Losses come back as [..., 1].
The weights carry the reduction: 1/B each for a mean, 1 each for a sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from coterie.errors import SettingError
from coterie.models.metrics import from_scores


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product over the last axis, which stays as an axis of length one."""
    return (a * b).sum(-1, keepdim=True)


def norm(a: Tensor) -> Tensor:
    """Euclidean length over the last axis, which stays as an axis of length one."""
    return torch.linalg.vector_norm(a, dim=-1, keepdim=True)


@dataclass(frozen=True)
class Model:
    """Base of all models. Subclasses are frozen settings; `fit_to` returns one that knows its shapes."""

    @property
    def d(self) -> int:
        """Number of trainable parameters."""
        raise NotImplementedError

    @property
    def task(self) -> str:
        """'regression', 'binary', 'multiclass' or 'language': decides metrics and predictions."""
        raise NotImplementedError

    @property
    def reduction(self) -> str:
        """'mean' or 'sum' of the row losses of a client."""
        return "mean"

    def measured(self) -> dict[str, str]:
        """Choices made by measuring speed, which a checkpoint keeps so that a resumed run repeats them."""
        return {}

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        """A copy that knows the shape of the inputs and, for classes, how many there are."""
        raise NotImplementedError

    def prepare(self, x: Tensor) -> Tensor:
        """Inputs as the engine stores them (for instance with a column of ones for the intercept)."""
        return x

    def initial(self, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Starting point [d], a function of the seed only."""
        return torch.zeros(self.d, dtype=dtype, device=device)

    def loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Weighted sum of row losses plus the regulariser, [..., 1]."""
        raise NotImplementedError

    def grad(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Gradient of `loss` in `w`, [..., d]."""
        raise NotImplementedError

    def hvp(self, w: Tensor, v: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Second derivative of `loss` at `w` times v, [..., d]."""
        raise NotImplementedError

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        """What the model says before any link: [..., B, outputs]."""
        raise NotImplementedError

    def measure(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """Loss without the regulariser and the main metric, each [..., 1], under weights that sum to one."""
        return from_scores(self.task, self.scores(w, x), y, weight)

    def takes_turns(self, w: Tensor, shape: tuple[int, ...]) -> bool:
        """Whether a stack `w` [k, d] with rows [B, ...] of this shape is best trained by turns, with `descend`."""
        return False

    def descend(
        self, w: Tensor, batches: Iterable[Any], lr: float, pull: float = 0.0, towards: Tensor | None = None
    ) -> Tensor:
        """`w` [d] after a step w <- w - lr (grad(w) + pull (w - towards)) on each of these batches."""
        raise NotImplementedError

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Largest curvature of `loss`, [..., 1]: a bound for convex models, an estimate at `w` otherwise."""
        raise NotImplementedError

    def convexity(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Smallest curvature of `loss`, [..., 1] (zero where nothing better is known)."""
        return torch.zeros_like(weight[..., :1])

    def solve(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, tol: float, pull: float = 0.0) -> Tensor:
        """Minimiser, started at w, of loss + pull/2 |. - w|^2, to gradient norm tol."""
        raise NotImplementedError

    closed_form: ClassVar[bool] = False
    """Gradients are a few tensor operations, without autograd and without anything that is remembered."""

    has_statistics: ClassVar[bool] = False

    def statistics(self, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """Sums over rows from which loss, gradient and minimiser follow, where there are such (least squares)."""
        raise NotImplementedError

    def loss_from(self, stats: tuple[Tensor, ...], w: Tensor) -> Tensor:
        """`loss` from the statistics."""
        raise NotImplementedError

    def grad_from(self, stats: tuple[Tensor, ...], w: Tensor) -> Tensor:
        """`grad` from the statistics."""
        raise NotImplementedError

    def solve_from(self, stats: tuple[Tensor, ...], w: Tensor, pull: float = 0.0) -> Tensor:
        """`solve` from the statistics."""
        raise NotImplementedError

    def module(self, w: Tensor) -> nn.Module:
        """The model with parameters `w` [d] as an nn.Module from raw inputs to predictions."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Settings and shapes as JSON values, enough for `coterie.models.from_description`."""
        raise SettingError(f"{type(self).__name__} cannot be saved: it has no description")

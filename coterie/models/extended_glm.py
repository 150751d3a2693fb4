"""Generalised linear models with parameters beside the linear predictor, such as a dispersion or cut points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.models.base import dot
from coterie.models.glm import Glm
from coterie.models.groups import ParameterGroups
from coterie.models.solve import prox_lbfgs

_STEPS = 500


@dataclass(frozen=True)
class ExtendedGlm(Glm):
    """Model with parameters [weights, intercept, extras]: row loss l(z, extras, y) with z = x'w.

    Subclasses write `row_loss`; its derivatives come from automatic differentiation over rows.
    """

    curvature: ClassVar[float] = 1.0
    closed_form: ClassVar[bool] = False

    @property
    def extra_names(self) -> tuple[str, ...]:
        """Names of the parameters beside the weights and the intercept."""
        raise NotImplementedError

    @property
    def extras(self) -> int:
        """Number of these parameters."""
        return len(self.extra_names)

    def row_loss(self, z: Tensor, extras: Tensor, y: Tensor) -> Tensor:
        """Return the losses [..., B] of predictors z [..., B], with the extras of each row [..., E, B]."""
        raise NotImplementedError

    @property
    def d(self) -> int:
        return self.columns + self.extras

    @property
    def groups(self) -> ParameterGroups:
        """All parameters are the head; "weights", "intercept" and "extras" tell them apart."""
        whole, last = [slice(0, self.d)], self.columns - self.intercept
        parts = {"all": whole, "head": whole, "body": [], "buffers": [], "weights": [slice(0, last)]}
        named = {"intercept": [slice(last, self.columns)], "extras": [slice(self.columns, self.d)]}
        return ParameterGroups(self.d, {**parts, **named})

    def loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        z, extras = self._split(w, x)
        value = dot(self.row_loss(z, extras, y.to(z.dtype)), weight)
        return value + (0.5 * self.l2) * self._penalised(w).square().sum((-2, -1)).unsqueeze(-1)

    def grad(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        first, _ = self._derivatives(w, x, y, second=False)
        weighted = first * weight.unsqueeze(-2)
        gradient = torch.cat([(weighted[..., :1, :] @ x).squeeze(-2), weighted[..., 1:, :].sum(-1)], -1)
        return gradient + self._penalty_diagonal(w) * w

    def hessian(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        _, second = self._derivatives(w, x, y, second=True)
        second = second * weight[..., None, None, :]
        corner = (x.mT * second[..., 0, :1, :]) @ x
        side = second[..., 0, 1:, :] @ x
        low = torch.cat([side, second[..., 1:, 1:, :].sum(-1)], -1)
        matrix = torch.cat([torch.cat([corner, side.mT], -1), low], -2)
        return matrix + torch.diag_embed(self._penalty_diagonal(w))

    def hvp(self, w: Tensor, v: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return (self.hessian(w, x, y, weight) @ v.unsqueeze(-1)).squeeze(-1)

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the largest curvature at w, an estimate: there is no bound for all w."""
        values: Tensor = torch.linalg.eigvalsh(self.hessian(w, x, y, weight).double())
        return values.abs().amax(-1, keepdim=True).to(w.dtype)

    def convexity(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return torch.zeros_like(weight[..., :1], dtype=w.dtype)

    def solve(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, tol: float, prox: float = 0.0) -> Tensor:
        """Return a stationary point by L-BFGS, searched from w: extras without a best value stop where they are."""
        data = (x.double(), y.double(), weight.double())
        return prox_lbfgs(self.loss, self.grad, w.double(), data, tol, prox, _STEPS).to(w.dtype)

    def design(self, x: Tensor) -> Tensor:
        """Return rows as the matrices [..., B, 1 + E, d] that map w to a row's predictor and the extras."""
        found = x.new_zeros(*x.shape[:-1], 1 + self.extras, self.d)
        found[..., 0, : self.columns] = x
        found[..., 1:, self.columns :] = torch.eye(self.extras, dtype=x.dtype, device=x.device)
        return found

    def row_derivatives(self, scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = self.row_loss(
            scores[..., 0, :], scores[..., 1:, :], y.to(scores.dtype).expand(scores[..., 0, :].shape)
        )
        return loss, *self._at(scores, y)

    def predictor_derivatives(self, z: Tensor, extras: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses [..., B] and their first two derivatives in z [..., B], given the extras [..., E, 1]."""
        with torch.inference_mode(False), torch.enable_grad():
            point = z.detach().clone().requires_grad_()
            extras = extras.detach().clone().expand(*extras.shape[:-1], z.shape[-1])
            loss = self.row_loss(point, extras, y.to(z.dtype).clone())
            (first,) = torch.autograd.grad(loss.sum(), point, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), point)
        return loss.detach(), first.detach(), second

    def _split(self, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return predictors z [..., B] and the extras as they are for each row [..., E, B]."""
        z = (self._table(w) @ x.mT).squeeze(-2)
        extras = w[..., self.columns :].unsqueeze(-1)
        return z, extras.expand(*torch.broadcast_shapes(extras.shape[:-1], (*z.shape[:-1], 1)), z.shape[-1])

    def _table(self, w: Tensor) -> Tensor:
        return w[..., : self.columns].unsqueeze(-2)

    def _penalised(self, w: Tensor) -> Tensor:
        return w[..., : self.columns - self.intercept].unsqueeze(-2)

    def _derivatives(self, w: Tensor, x: Tensor, y: Tensor, *, second: bool) -> tuple[Tensor, Tensor]:
        """Return first [..., 1 + E, B] and second [..., 1 + E, 1 + E, B] derivatives of each row's loss."""
        z, extras = self._split(w, x)
        return self._at(torch.cat([z.unsqueeze(-2), extras], -2), y, second=second)

    def _at(self, point: Tensor, y: Tensor, *, second: bool = True) -> tuple[Tensor, Tensor]:
        """Return the derivatives of row losses at predictors and extras [..., 1 + E, B]."""
        y = y.to(point.dtype).expand(point[..., 0, :].shape)
        with torch.inference_mode(False), torch.enable_grad():
            point = point.detach().clone().requires_grad_()
            value = self.row_loss(point[..., 0, :], point[..., 1:, :], y).sum()
            (first,) = torch.autograd.grad(value, point, create_graph=second)
            if not second:
                return first, first
            rows = [
                torch.autograd.grad(first[..., k, :].sum(), point, retain_graph=True)[0]
                for k in range(first.shape[-2])
            ]
        return first.detach(), torch.stack(rows, -3)

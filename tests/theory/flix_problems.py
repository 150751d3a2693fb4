"""Random problems for the theorems on FLIX, and its solvers written out for many draws of the compressors at once."""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor

from coterie.theory.flix import Mixture

DRAWS = 64


class Problem:
    """Clients with losses mean phi(a x - b) + l2/2 |x|^2; phi is half a square, softplus, or t^2 / (1 + t^2)."""

    def __init__(
        self, seed: int, kind: str = "logistic", l2: float | None = None, equal: bool = False
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        n, d, rows = (
            int(torch.randint(low, high, (), generator=draw)) for low, high in ((2, 8), (2, 6), (8, 20))
        )
        scale = torch.exp(torch.randn(n, 1, 1, generator=draw, dtype=torch.float64))
        self.kind, self.n, self.d = kind, n, d
        self.a = scale * torch.randn(n, rows, d, generator=draw, dtype=torch.float64)
        self.b = torch.randn(n, rows, generator=draw, dtype=torch.float64)
        if kind == "logistic":  # labels -1 and 1 are multiplied in
            self.a, self.b = self.a * self.b.sign().unsqueeze(-1), torch.zeros_like(self.b)
        self.l2 = (0.05 * 3 ** (seed % 4) if l2 is None else l2) if kind != "robust" else 0.0
        self.alpha = 0.1 + 0.9 * torch.rand(1 if equal else n, generator=draw, dtype=torch.float64).expand(n)
        self.x0 = torch.randn(d, generator=draw, dtype=torch.float64)
        grams = torch.linalg.eigvalsh(self.a.mT @ self.a / rows)
        bend = {"ridge": 1.0, "logistic": 0.25, "robust": 2.0}[kind]
        low = grams[:, 0] if kind == "ridge" else torch.zeros(n, dtype=torch.float64)
        self.mixture = Mixture(self.alpha, bend * grams[:, -1] + self.l2, low + self.l2)
        self.own = self._stationary()

    def losses(self, w: Tensor) -> Tensor:
        """f_i(w_i), [..., n] for w [..., n, d]."""
        t = torch.einsum("nkd,...nd->...nk", self.a, w) - self.b
        phi = {
            "ridge": lambda t: t.square() / 2,
            "logistic": lambda t: torch.nn.functional.softplus(-t),
            "robust": lambda t: t.square() / (1 + t.square()),
        }[self.kind](t)
        return phi.mean(-1) + 0.5 * self.l2 * w.square().sum(-1)

    def grads(self, w: Tensor) -> Tensor:
        """Gradients of f_i at w_i, [..., n, d]."""
        t = torch.einsum("nkd,...nd->...nk", self.a, w) - self.b
        slope = {
            "ridge": lambda t: t,
            "logistic": lambda t: torch.sigmoid(t) - 1,
            "robust": lambda t: 2 * t / (1 + t.square()).square(),
        }[self.kind](t)
        return torch.einsum("nkd,...nk->...nd", self.a, slope) / self.a.shape[1] + self.l2 * w

    def mixed(self, x: Tensor) -> Tensor:
        """T_i(x), [..., n, d] for x [..., d]."""
        alpha = self.alpha.unsqueeze(-1)
        return alpha * x.unsqueeze(-2) + (1 - alpha) * self.own

    def value(self, x: Tensor) -> Tensor:
        """f~(x)."""
        return self.losses(self.mixed(x)).mean(-1)

    def slopes(self, x: Tensor) -> Tensor:
        """G_i(x), [..., n, d]."""
        return self.alpha.unsqueeze(-1) * self.grads(self.mixed(x))

    def bends(self, w: Tensor) -> Tensor:
        """Hessians of f_i at w_i, [n, d, d]; for the loss that is not convex a majorant of them."""
        t = torch.einsum("nkd,nd->nk", self.a, w) - self.b
        bend = {
            "ridge": torch.ones_like,
            "logistic": lambda t: torch.sigmoid(t) * torch.sigmoid(-t),
            "robust": lambda t: 2 / (1 + t.square()).square(),
        }[self.kind](t)
        eye = torch.eye(self.d, dtype=torch.float64)
        return torch.einsum("nkd,nk,nke->nde", self.a, bend, self.a) / self.a.shape[1] + self.l2 * eye

    def hessian(self, x: Tensor) -> Tensor:
        """Hessian of f~ at x, [d, d]."""
        return (self.alpha.square()[:, None, None] * self.bends(self.mixed(x))).mean(0)

    @functools.cached_property
    def minimiser(self) -> Tensor:
        """x*, by damped Newton steps."""
        x = self.mixture.average(self.own)
        for _ in range(100):
            step = torch.linalg.solve(self.hessian(x), self.slopes(x).mean(-2))
            size = 1.0
            while self.value(x - size * step) > self.value(x) and size > 1e-9:
                size /= 2
            x = x - size * step
            if step.norm() < 1e-13:
                break
        return x

    def at(self, alpha: float) -> Problem:
        """The same clients with another alpha, the same for all."""
        other = copy.copy(self)
        other.__dict__.pop("minimiser", None)
        other.alpha = torch.full_like(self.alpha, alpha)
        other.mixture = Mixture(other.alpha, self.mixture.smoothness, self.mixture.convexity)
        return other

    def _stationary(self) -> Tensor:
        """x_i, [n, d], by damped Newton steps; majorants need no damping."""
        x = torch.zeros(self.n, self.d, dtype=torch.float64)
        for _ in range(30):
            step = torch.linalg.solve(self.bends(x), self.grads(x).unsqueeze(-1)).squeeze(-1)
            size = torch.ones(self.n, 1, dtype=torch.float64)
            for _ in range(30):
                worse = (self.losses(x - size * step) > self.losses(x)).unsqueeze(-1)
                if not worse.any():
                    break
                size = torch.where(worse, size / 2, size)
            x = x - size * step
            if step.abs().max() < 1e-12:
                break
        return x


@functools.cache
def problem(seed: int, kind: str, l2: float | None = None, equal: bool = False) -> Problem:
    """A problem that tests share."""
    return Problem(seed, kind, l2, equal)


def rand_k(values: Tensor, kept: Tensor, draw: torch.Generator) -> Tensor:
    """Rand-k of client i with kept[i] coordinates, for values [..., n, d]; omega_i = d / kept_i - 1."""
    d = values.shape[-1]
    order = torch.rand(values.shape, generator=draw, dtype=values.dtype).argsort(-1).argsort(-1)
    return torch.where(order < kept.unsqueeze(-1), values * d / kept.unsqueeze(-1), 0.0)


def dcgd(task: Problem, kept: Tensor, lr: float, rounds: int, seed: int) -> Tensor:
    """DRAWS runs of DCGD, [rounds + 1, DRAWS, d]."""
    draw, x = torch.Generator().manual_seed(seed), task.x0.expand(DRAWS, -1)
    found = [x]
    for _ in range(rounds):
        x = x - lr * rand_k(task.slopes(x), kept, draw).mean(-2)
        found.append(x)
    return torch.stack(found)


def diana(
    task: Problem, kept: Tensor, lr: float, rounds: int, seed: int, zero: bool = False
) -> tuple[Tensor, Tensor]:
    """DRAWS runs of DIANA, [rounds + 1, DRAWS, d], and their shifts, [rounds + 1, DRAWS, n, d]."""
    draw, x = torch.Generator().manual_seed(seed), task.x0.expand(DRAWS, -1)
    h, beta = task.slopes(x) * (0.0 if zero else 1.0), (kept / task.d).unsqueeze(-1)  # 1 / (1 + omega_i)
    found, shifts = [x], [h]
    for _ in range(rounds):
        sent = rand_k(task.slopes(x) - h, kept, draw)
        x, h = x - lr * (h.mean(-2) + sent.mean(-2)), h + beta * sent
        found.append(x)
        shifts.append(h)
    return torch.stack(found), torch.stack(shifts)

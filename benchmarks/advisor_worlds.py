"""Six kinds of linear worlds, and a logistic one, on which the advisor's certainty is judged.

They were fixed, with their seeds, before the advisor was changed: DEVELOP may be looked at, FRESH only to report.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie import Federation, models
from coterie.select.advice import METHODS, Advice
from coterie.theory import filters

KINDS = ("gaussian", "heavy-tailed", "grouped", "covariate-shifted", "sparse", "unequal-noise")
DEVELOP = range(0, 40)  # of each kind
FRESH = range(1000, 1060)  # of each kind
NOISES = 24  # noise draws that estimate a variance
UNPENALISED = 1e-6  # so that rows which a plane separates have a fit
TEST_ROWS = 1500  # of a client of a logistic world


@dataclass(frozen=True)
class KnownWorld:
    """Rows of every client, its true parameters and noise, and the root of its features' covariance."""

    kind: str
    xs: list[Tensor]
    ys: list[Tensor]
    truth: Tensor  # [n, d]
    noise: Tensor  # [n], standard deviations
    roots: list[Tensor]  # features are normal times this, [d, d]

    def federation(self) -> Federation:
        """The federation with a linear, or logistic, model."""
        if self.kind == "logistic":
            return Federation.from_arrays(
                self.xs, self.ys, models.logistic(), dtype=torch.float64, split=(0.75, 0.25, 0.0)
            )
        return Federation.from_arrays(self.xs, self.ys, models.linear(), dtype=torch.float64)

    def risks(self, alone: Tensor, shared: Tensor) -> Tensor:
        """Squared error beyond the noise of every method with these penalties [n], given the inputs, [n, methods].

        In a logistic world: twice the divergence from the true probabilities on fresh rows, which is the squared error
        of the linearised problem where fits are good.
        """
        if self.kind == "logistic":
            return self._logistic_risks(alone, shared)
        draw = torch.Generator().manual_seed(0)
        ys = [
            torch.cat([(x @ t)[:, None], s * torch.randn(len(x), NOISES, generator=draw, dtype=x.dtype)], 1)
            for x, t, s in zip(self.xs, self.truth, self.noise, strict=True)
        ]
        centre = filters.centre(self.xs, ys, filters.average())
        zero, found = torch.zeros_like(centre), []
        for k, (x, y) in enumerate(zip(self.xs, ys, strict=True)):
            fits = [
                filters.personal(x, y, zero, filters.interpolate),
                _ridge(x, y, zero, float(alone[k])),
                centre,
                filters.personal(x, y, centre, filters.interpolate),
                _ridge(x, y, centre, float(shared[k])),
            ]
            found.append([self._risk(k, one) for one in fits])
        return torch.tensor(found)

    def _logistic_risks(self, alone: Tensor, shared: Tensor) -> Tensor:
        fed = self.federation()
        rows = [fed.runtime.splits["train"].of(k) for k in range(fed.n)]
        centre = _logistic_fit(
            torch.cat([x for x, _ in rows]),
            torch.cat([y for _, y in rows]),
            torch.zeros_like(self.truth[0]),
            UNPENALISED,
        )
        draw, found = torch.Generator().manual_seed(0), []
        for k, (x, y) in enumerate(rows):
            zero = torch.zeros_like(centre)
            fits = [
                _logistic_fit(x, y, zero, UNPENALISED),
                _logistic_fit(x, y, zero, float(alone[k])),
                centre,
                _logistic_fit(x, y, centre, UNPENALISED),
                _logistic_fit(x, y, centre, float(shared[k])),
            ]
            fresh = torch.randn(TEST_ROWS, len(zero), generator=draw, dtype=x.dtype) @ self.roots[k].mT
            found.append([_divergence(fresh @ self.truth[k], fresh @ fit) for fit in fits])
        return torch.tensor(found)

    def advised_risks(self, advice: Advice) -> Tensor:
        """`risks` at the advised penalties."""
        return self.risks(advice.lam_alone, advice.lam_shared)

    def _risk(self, k: int, fit: Tensor) -> float:
        gap = torch.cat([fit[:, :1] - self.truth[k][:, None], fit[:, 1:]], 1)
        sizes = (self.roots[k].mT @ gap).square().sum(0)
        return float(sizes[0] + sizes[1:].mean())


def draw_world(kind: str, seed: int) -> KnownWorld:
    """Draw a world; sizes and levels are log-uniform: 5 to 40 clients, 8 to 60 features, 0.3 to 4 features per row."""
    draw = np.random.default_rng([seed, (*KINDS, "logistic").index(kind)])

    def between(low: float, high: float) -> float:
        return float(np.exp(draw.uniform(math.log(low), math.log(high))))

    n, d, gamma = round(between(5, 40)), round(between(8, 60)), between(0.3, 4)
    if kind == "logistic":
        n, d, gamma = round(between(6, 24)), round(between(4, 16)), between(0.1, 0.6)
    sigma2, r2, centre2 = between(0.1, 4), between(0.05, 4), between(0.05, 4)
    base = _root(draw, d)
    own = _deviations(draw, kind, n, d, r2)
    centre = draw.normal(size=d) * (draw.random(d) < 0.2 if kind == "sparse" else 1.0)
    centre *= math.sqrt(centre2) / max(np.linalg.norm(centre), 1e-9)
    spread = {"unequal-noise": 1.5, "heavy-tailed": 0.5}.get(kind, 0.0)
    noise = np.sqrt(sigma2 * np.exp(spread * draw.normal(size=n)))
    xs, ys, roots = [], [], []
    for k in range(n):
        rows = max(4, round(d / gamma * math.exp(0.4 * draw.normal())))
        root = base
        if kind == "covariate-shifted":
            scale = np.exp(0.7 * draw.normal(size=d))
            root = base * (scale / math.sqrt((scale**2).mean()))[None, :]
        x = draw.normal(size=(rows, d)) @ root.T
        signal = x @ (centre + own[k])
        if kind == "logistic":
            y = (draw.random(rows) < 1 / (1 + np.exp(-2 * signal))).astype(float)
        else:
            shock = (
                draw.standard_t(5, size=rows) * math.sqrt(3 / 5)
                if kind == "heavy-tailed"
                else draw.normal(size=rows)
            )
            y = signal + noise[k] * shock
        xs.append(torch.from_numpy(x))
        ys.append(torch.from_numpy(y))
        roots.append(torch.from_numpy(root))
    truth = torch.from_numpy((centre + own) * (2 if kind == "logistic" else 1))
    if kind == "logistic":
        noise = np.ones(n)  # of the linearised problem
    return KnownWorld(kind, xs, ys, truth, torch.from_numpy(noise), roots)


def _deviations(draw: np.random.Generator, kind: str, n: int, d: int, r2: float) -> np.ndarray:
    """The clients' distances from the centre, [n, d], of mean squared length about r2."""
    own = draw.normal(size=(n, d)) / math.sqrt(d)
    if kind == "heavy-tailed":
        own *= np.sqrt(3 / draw.chisquare(3, size=(n, 1))) / math.sqrt(3)
    elif kind == "grouped":
        groups = draw.normal(size=(int(draw.integers(2, 6)), d)) / math.sqrt(d)
        share = draw.uniform(0.5, 0.95)
        own = math.sqrt(share) * groups[draw.integers(len(groups), size=n)] + math.sqrt(1 - share) * own
    elif kind == "sparse":
        own *= (draw.random((n, d)) < 0.1) / math.sqrt(0.1)
    return math.sqrt(r2) * own


def _root(draw: np.random.Generator, d: int) -> np.ndarray:
    """Root of the features' covariance: identity, AR, or eigenvalues that decay as a power; mean eigenvalue 1."""
    kind = draw.choice(["identity", "ar", "power"])
    if kind == "identity":
        return np.eye(d)
    if kind == "ar":
        lag = np.abs(np.subtract.outer(np.arange(d), np.arange(d)))
        return np.linalg.cholesky(draw.uniform(0.3, 0.8) ** lag)
    values = np.arange(1, d + 1) ** -draw.uniform(0.3, 1.0)
    axes = np.linalg.qr(draw.normal(size=(d, d)))[0]
    return np.asarray(axes * np.sqrt(values * d / values.sum()))


def _ridge(x: Tensor, y: Tensor, middle: Tensor, lam: float) -> Tensor:
    return middle if math.isinf(lam) else filters.personal(x, y, middle, filters.ridge(lam))


def _logistic_fit(x: Tensor, y: Tensor, middle: Tensor, lam: float) -> Tensor:
    """Minimise the mean log-loss plus lam/2 |w - middle|^2 by Newton's method, with halved steps where it rises."""
    if math.isinf(lam):
        return middle
    lam = max(lam, UNPENALISED)

    def loss(w: Tensor) -> float:
        score = x @ w
        return float(
            (torch.nn.functional.softplus(score) - y * score).mean() + lam / 2 * (w - middle).square().sum()
        )

    w = middle.clone()
    for _ in range(50):
        likely = torch.sigmoid(x @ w)
        slope = x.mT @ (likely - y) / len(y) + lam * (w - middle)
        curve = (x.mT * (likely * (1 - likely))) @ x / len(y) + lam * torch.eye(len(w), dtype=x.dtype)
        step, before, size = torch.linalg.solve(curve, slope), loss(w), 1.0
        while loss(w - size * step) > before and size > 1e-6:
            size /= 2
        w = w - size * step
        if float(slope.norm()) < 1e-9:
            break
    return w


def _divergence(true: Tensor, fitted: Tensor) -> float:
    """Twice the mean divergence between the probabilities of two scores."""
    likely, softplus = torch.sigmoid(true), torch.nn.functional.softplus
    return float(2 * (softplus(fitted) - softplus(true) - likely * (fitted - true)).mean())


assert METHODS == ("local", "ridge-local", "fedavg", "ftfa", "rtfa")  # the order of `risks`

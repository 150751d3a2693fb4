"""Run FLIX on one logistic regression with many alphas and Rand-k at once, each as a column of one matrix.

A figure has dozens of runs that differ in two numbers. The stacked runs share the clients' rows and the random choices
of a round. Their iterates are those of `coterie.algorithms.FLIX` run one by one (tested).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie._core import randomness
from coterie.engine.encoding import encoding_keys
from coterie.engine.federation import Federation
from coterie.theory import flix_steps
from coterie.theory.flix import Mixture

Array = np.ndarray[Any, np.dtype[np.float64]]
PHASES = {"dcgd": "slope", "diana": "shifted_slope"}  # the phase whose reply FLIX compresses


@dataclass(frozen=True)
class Lane:
    """One run of the stack; k = d sends uncompressed vectors, which makes either solver gradient descent."""

    alpha: float
    k: int


@dataclass(frozen=True)
class StackedRuns:
    """All runs after `round` rounds: deployed model x, f~ and squared gradient norm there, [runs, ...]."""

    round: int
    x: Array
    loss: Array
    squared_grad: Array


class Stack:
    """The clients' rows as one block-diagonal sparse matrix, and their local models [n, d]."""

    def __init__(self, fed: Federation, own: Tensor, constants: Mixture) -> None:
        from scipy.sparse import block_diag, csr_matrix

        rows = [fed.runtime.rows("train").of(k) for k in range(fed.n)]
        self.fed, self.own, self.constants = fed, own.double().numpy(), constants
        self.rows = csr_matrix(block_diag([csr_matrix(x.double().numpy()) for x, _ in rows]))
        self.columns = csr_matrix(self.rows.T)
        self.y = torch.cat([y.double() for _, y in rows]).numpy()[:, None]
        sizes = np.array([len(y) for _, y in rows])
        self.weight = np.repeat(1.0 / sizes, sizes)[:, None]
        self.l2 = float(fed.model.l2)  # type: ignore[attr-defined]

    def run(
        self, solver: str, lanes: Sequence[Lane], x0: Tensor, rounds: int, every: int = 10
    ) -> Iterator[StackedRuns]:
        """Run DCGD or DIANA (with shifts started at the gradients) from x0, with step sizes from theory.

        Without strong convexity, runs that compress take a quarter of the step and deploy the mean of the iterates.
        """
        d = self.fed.d
        alpha = np.array([lane.alpha for lane in lanes])
        kept = np.array([lane.k for lane in lanes])
        flat = (kept < d) & (self.l2 == 0)
        lr = np.array([self._lr(solver, lane) for lane in lanes]) / np.where(flat, 4.0, 1.0)
        x = np.repeat(x0.double().numpy()[:, None], len(lanes), 1)
        mean, beta = x.copy(), kept / d
        g = self._gradients(alpha, x)
        h = g.copy()  # DIANA's h_i
        for t in range(rounds + 1):
            if t % every == 0 or t == rounds:
                deployed = np.where(flat, mean, x)
                gradients = self._gradients(alpha, deployed) if flat.any() else g
                yield StackedRuns(
                    t, deployed.T, self.losses(alpha, deployed), np.square(gradients.mean(0)).sum(0)
                )
            if t == rounds:
                return
            mask = self._rank(solver, t + 1)[:, :, None] < kept
            if solver == "diana":
                sent = np.where(mask, (g - h) / beta, 0.0)
                estimate = h.mean(0) + sent.mean(0)
                h += beta * sent
            else:
                estimate = np.where(mask, g / beta, 0.0).mean(0)
            x = x - lr * estimate
            mean = (t * mean + x) / (t + 1)
            g = self._gradients(alpha, x)

    def losses(self, alpha: Array, x: Array) -> Array:
        """Return f~ [runs] at x [d, runs]."""
        w, z = self._scores(alpha, x)
        rows = np.maximum(z, 0.0) + np.log1p(np.exp(-np.abs(z))) - self.y * z
        total: Array = (self.weight * rows).sum(0) + 0.5 * self.l2 * np.square(w).sum((0, 1))
        return total / len(w)

    def _lr(self, solver: str, lane: Lane) -> float:
        """Return the step size of a run."""
        mixture = Mixture.equal(lane.alpha, self.constants.smoothness, self.constants.convexity)
        return flix_steps.step(solver, mixture, self.fed.d / lane.k - 1.0)

    def _gradients(self, alpha: Array, x: Array) -> Array:
        """Return G_i [n, d, runs] at x [d, runs]."""
        from scipy.special import expit

        w, z = self._scores(alpha, x)
        residual = expit(z, out=z)
        residual -= self.y
        residual *= self.weight
        gradients: Array = (self.columns @ residual).reshape(w.shape)
        gradients += self.l2 * w
        gradients *= alpha
        return gradients

    def _scores(self, alpha: Array, x: Array) -> tuple[Array, Array]:
        """Return the mixtures [n, d, runs] and their scores of every row [rows, runs]."""
        w = alpha * x + (1 - alpha) * self.own[:, :, None]
        return w, self.rows @ w.reshape(self.own.size, -1)

    def _rank(self, solver: str, t: int) -> Array:
        """Return the rank of each coordinate by its hash [n, d]; Rand-k keeps those below k."""
        call = 1 if solver == "diana" and t == 1 else 0  # FLIX first asks for the shifts
        keys = randomness.fold(randomness.key(self.fed.seed, PHASES[solver], t, call), self.fed.everyone)
        order = randomness.slots(encoding_keys(keys, 0), self.fed.d).argsort(-1)
        return order.argsort(-1).numpy()

"""Many runs of FLIX on one logistic regression at once: every alpha and every Rand-k as a column of one matrix.

A figure has dozens of runs that differ in two numbers. Side by side they share the rows of the clients and the
random choices of a round, and take the iterates that `coterie.algorithms.FLIX` takes one run at a time (tested).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.federation import randomness
from coterie.federation.federation import Federation
from coterie.federation.parcels import parcel_keys
from coterie.theory import flix as theory
from coterie.theory.flix import Mixture

Array = np.ndarray[Any, np.dtype[np.float64]]
PHASES = {"dcgd": "slope", "diana": "shifted_slope"}  # the phase whose reply FLIX compresses


@dataclass(frozen=True)
class Lane:
    """One run of the stack; k = d sends whole vectors, which makes either solver gradient descent."""

    alpha: float
    k: int


@dataclass(frozen=True)
class Step:
    """All runs after `round` rounds: x, the model deployed, f~ and the squared gradient norm there; [runs, ...]."""

    round: int
    x: Array
    loss: Array
    slope: Array


class Stack:
    """The clients' rows as one block-diagonal sparse matrix, and their local models [n, d]."""

    def __init__(self, fed: Federation, own: Tensor, constants: Mixture) -> None:
        from scipy.sparse import block_diag, csr_matrix

        rows = [fed.runtime.train.of(k) for k in range(fed.n)]
        self.fed, self.own, self.constants = fed, own.double().numpy(), constants
        self.rows = csr_matrix(block_diag([csr_matrix(x.double().numpy()) for x, _ in rows]))
        self.columns = csr_matrix(self.rows.T)
        self.y = torch.cat([y.double() for _, y in rows]).numpy()[:, None]
        sizes = np.array([len(y) for _, y in rows])
        self.weight = np.repeat(1.0 / sizes, sizes)[:, None]
        self.l2 = float(fed.model.l2)  # type: ignore[attr-defined]

    def run(
        self, solver: str, lanes: Sequence[Lane], x0: Tensor, rounds: int, every: int = 10
    ) -> Iterator[Step]:
        """DCGD or DIANA (its shifts started at the gradients) from x0, at the step sizes of theory.

        Without strong convexity those that compress take a quarter of the step and deploy the mean of the iterates.
        """
        d = self.fed.d
        alpha = np.array([lane.alpha for lane in lanes])
        kept = np.array([lane.k for lane in lanes])
        flat = (kept < d) & (self.l2 == 0)
        lr = np.array([self._lr(solver, lane) for lane in lanes]) / np.where(flat, 4.0, 1.0)
        x = np.repeat(x0.double().numpy()[:, None], len(lanes), 1)
        mean, beta = x.copy(), kept / d
        g = self._slopes(alpha, x)
        h = g.copy()  # DIANA's h_i
        for t in range(rounds + 1):
            if t % every == 0 or t == rounds:
                deployed = np.where(flat, mean, x)
                slopes = self._slopes(alpha, deployed) if flat.any() else g
                yield Step(t, deployed.T, self.losses(alpha, deployed), np.square(slopes.mean(0)).sum(0))
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
            g = self._slopes(alpha, x)

    def losses(self, alpha: Array, x: Array) -> Array:
        """f~ [runs] at x [d, runs]."""
        w, z = self._scores(alpha, x)
        rows = np.maximum(z, 0.0) + np.log1p(np.exp(-np.abs(z))) - self.y * z
        return ((self.weight * rows).sum(0) + 0.5 * self.l2 * np.square(w).sum((0, 1))) / len(w)

    def _lr(self, solver: str, lane: Lane) -> float:
        mixture = Mixture.equal(lane.alpha, self.constants.smoothness, self.constants.convexity)
        return theory.step(solver, mixture, self.fed.d / lane.k - 1.0)

    def _slopes(self, alpha: Array, x: Array) -> Array:
        """G_i [n, d, runs] at x [d, runs]."""
        from scipy.special import expit

        w, z = self._scores(alpha, x)
        residual = expit(z, out=z)
        residual -= self.y
        residual *= self.weight
        slopes = (self.columns @ residual).reshape(w.shape)
        slopes += self.l2 * w
        slopes *= alpha
        return slopes

    def _scores(self, alpha: Array, x: Array) -> tuple[Array, Array]:
        """The mixtures [n, d, runs] and what they make of every row, [rows, runs]."""
        w = alpha * x + (1 - alpha) * self.own[:, :, None]
        return w, self.rows @ w.reshape(self.own.size, -1)

    def _rank(self, solver: str, t: int) -> Array:
        """The place of each coordinate in the order of its hash, [n, d]; Rand-k keeps those below k."""
        call = 1 if solver == "diana" and t == 1 else 0  # FLIX first asks for the shifts
        keys = randomness.fold(randomness.key(self.fed.seed, PHASES[solver], t, call), self.fed.everyone)
        order = randomness.slots(parcel_keys(keys, 0), self.fed.d).argsort(-1)
        return order.argsort(-1).numpy()

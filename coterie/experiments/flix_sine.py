"""Experiment flix/sine: figure 4 of the FLIX paper, where the stopping rule decides which alpha wins."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie import models
from coterie._core import randomness
from coterie.algorithms.base import setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.experiments.spec import Experiment
from coterie.models.base import norm
from coterie.select.flix_runs import local_models, states
from coterie.select.plan import MonitoredFLIX

TRAIN, TEST = 50, 2000
HALVINGS = 30  # of the step in a line search, at most


@dataclass(frozen=True)
class LineSearch(MonitoredFLIX):
    """FLIX by gradient descent with Armijo line search, local and shared (Gasanov et al., AISTATS 2022)."""

    stop: float = setting(1e-3, "gradient norm at which the shared model stops", above=0)

    def start(self, fed: Federation) -> State:
        """Start with step size 1."""
        return super().start(fed).replace(rate=1.0, done=False)

    def round(self, fed: Federation, s: State, t: int) -> State:
        """Take one step with line search, or none once the gradient is small."""
        if s.done or self.alpha == 0.0:
            return s
        g = fed.map(self.slope, x=s.x).mean(uniform=True)
        size = float(g @ g)
        if math.sqrt(size) <= self.stop:
            return s.replace(done=True)
        now, rate = self._objective(fed, s.x), 2.0 * s.rate
        for _ in range(HALVINGS):
            if self._objective(fed, s.x - rate * g) <= now - 0.5 * rate * size:
                return s.replace(x=s.x - rate * g, rate=rate)
            rate /= 2
        return s.replace(done=True)

    def _objective(self, fed: Federation, x: Tensor) -> float:
        """Return f~(x)."""
        return float(fed.map(self.mixed_loss, x=x).mean(uniform=True))

    def _solve(self, client: Client, x: Tensor) -> Tensor:
        """Run local gradient descent until each client's gradient norm is below local_tol."""
        rate, active = torch.ones_like(x[..., :1]), torch.ones_like(x[..., :1], dtype=torch.bool)
        for _ in range(self.local_steps):
            g = client.full_grad(x)
            active = active & (norm(g) > self.local_tol)
            if not active.any():
                break
            rate, now = 2.0 * rate, client.loss(x)
            for _ in range(HALVINGS):
                fine = client.loss(x - rate * g) <= now - 0.5 * rate * norm(g).square()
                if (fine | ~active).all():
                    break
                rate = torch.where(fine | ~active, rate, rate / 2)
            x = torch.where(active & fine, x - rate * g, x)
        return x


def federation(sizes: tuple[int, ...], seed: int) -> Federation:
    """Build clients that observe a_j sin(x + b_j) at 50 points of [-5, 5], and at 2,000 more for testing."""
    n, pairs = sum(sizes), len(sizes)
    draws = randomness.uniform(randomness.slots(randomness.key(seed, "sine pairs", torch.arange(pairs)), 2))
    amplitude, phase = 0.1 + 0.4 * draws[:, 0], 2 * math.pi * draws[:, 1]
    member = torch.repeat_interleave(torch.arange(pairs), torch.tensor(sizes))
    x = (
        10
        * randomness.uniform(randomness.slots(randomness.key(seed, "sine x", torch.arange(n)), TRAIN + TEST))
        - 5
    )
    y = amplitude[member, None] * torch.sin(x + phase[member, None])
    rows = TRAIN + TEST
    return Federation.from_arrays(
        list(x.float().unsqueeze(-1)),
        list(y.float()),
        models.mlp(hidden=(40, 40), activation="tanh", loss="mse", stacked=True),
        clusters=member,
        split=(TRAIN / rows, 0.0, TEST / rows),
        seed=seed,
    )


def sine(experiment: Experiment, seed: int) -> dict[str, float]:
    """Return the test error for every alpha, with the paper's stopping rule and with a tighter one.

    Settings: sizes (clients per pair a_j, b_j), alphas, steps (of the shared model, at most), local_tol, local_steps.
    """
    plan = experiment.plans[0]
    asked: dict[str, Any] = {"local_tol": 1e-2, "local_steps": 500, **plan.settings}
    fed = federation(tuple(asked["sizes"]), seed)
    local = LineSearch(alpha=0.5, local_tol=asked["local_tol"], local_steps=asked["local_steps"])
    own = local_models(fed, local)
    found: dict[str, float] = {}
    for name, stop in (("loose", 1e-2), ("tight", 1e-3)):
        errors = {a: _error(fed, own, a, stop, asked["steps"]) for a in (0.0, *asked["alphas"], 1.0)}
        inside = min(error for a, error in errors.items() if 0 < a < 1)
        found |= {f"{name}_{a:g}": error for a, error in errors.items()}
        found[f"{name}_best_alpha"] = min(errors, key=lambda a: errors[a])
        found[f"{name}_inside_over_local"] = inside / errors[0.0]
        found[f"{name}_inside_over_shared"] = inside / errors[1.0]
    return found


def _error(fed: Federation, own: Tensor, alpha: float, stop: float, steps: int) -> float:
    """Return the mean squared test error of the deployed mixtures for given local models."""
    algorithm = LineSearch(alpha=alpha, stop=stop, solver="sgd", lr=1.0, batch=0)
    rounds = states(fed, algorithm, steps if alpha > 0 else 0, own)
    trial, s = next(rounds)
    while not s.done and (after := next(rounds, None)):
        trial, s = after
    return 2.0 * float(trial.evaluate(algorithm, s, "test")["loss"].mean())

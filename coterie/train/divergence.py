"""Notice a run that diverged, and say which step size would not have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie._core.errors import CoterieError, Diverged
from coterie.algorithms import Algorithm
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.models.glm import Glm

WORSE = 10.0  # times the loss before training
USUAL = (
    2.0  # a mean loss below this is not looked at again: standardised targets start at 0.5, C classes at ln C
)
TOLERATED = 0.5  # share of the clients that may diverge without ending the run

_checked: ContextVar[bool] = ContextVar("checked", default=True)


@contextmanager
def divergence_ignored() -> Iterator[None]:
    """Let runs inside the block diverge, for checks of a method that are not about its step size."""
    before = _checked.set(False)
    try:
        yield
    finally:
        _checked.reset(before)


@dataclass(frozen=True)
class Curvature(Algorithm):
    """Asks every client for the largest curvature of its loss."""

    def measure(self, client: Client) -> Tensor:
        """Return the smoothness constant."""
        return client.smoothness()


def largest_curvature(fed: Federation) -> float:
    """Return the largest smoothness constant among the clients, who send one number each."""
    trial = fed.fresh(dropout=0.0, byzantine={})
    trial.enter_round(0, None)
    replies = trial.map(Curvature().measure)
    return float(replies.values.max()) if len(replies) == fed.n else math.inf


def diverged_clients(fed: Federation, loss: Tensor) -> Tensor:
    """Return which clients' models are far worse on training rows than the model they started from.

    Parameters
    ----------
    fed
        The federation; training rows are scored once more only where a loss is suspicious.
    loss
        Mean training loss of each deployed model, [n]; NaN for a client without rows, or one that diverged.

    Returns
    -------
    Tensor
        bool [n].
    """
    trained = fed.rows["train"].cpu() > 0
    loss = loss.cpu().double()
    if bool((loss[trained] < USUAL).all()):
        return torch.zeros(fed.n, dtype=torch.bool)
    start = fed.score(fed.initial_model().expand(fed.n, -1), "train")["loss"].cpu().double()
    typical = start[trained & start.isfinite()].mean()
    return trained & ~(loss <= WORSE * start.nan_to_num(0.0).clamp(min=typical))


def require_convergence(fed: Federation, algorithm: Algorithm, loss: Tensor, rounds: int) -> list[str]:
    """Raise `Diverged` if the models of most clients diverged; return the names of those that did.

    Parameters
    ----------
    fed
        The federation.
    algorithm
        What was run.
    loss
        Mean training loss of each deployed model, [n].
    rounds
        Rounds that were run.
    """
    if fed.models_stay or rounds == 0 or not _checked.get():
        return []
    worse = diverged_clients(fed, loss)
    count, trained = int(worse.sum()), int((fed.rows["train"] > 0).sum())
    if count > TOLERATED * trained:
        known = loss[worse.to(loss.device)]
        known = known[known.isfinite()]
        value = f"{float(known.mean()):.3g}" if len(known) else "not finite"
        raise Diverged(
            f"{algorithm.name} diverged: after {rounds} rounds the training loss of {count} of {trained} clients is "
            f"{value}, more than {WORSE:.0f} times that of the untrained model. {_remedy(fed, algorithm)}"
        )
    return [name for name, bad in zip(fed.names, worse.tolist(), strict=True) if bad]


def _remedy(fed: Federation, algorithm: Algorithm) -> str:
    """Name the step size that the curvature allows, where that is known."""
    usual = "Take a smaller step size, a tenth to begin with, or rescale the columns."
    if not isinstance(fed.model, Glm):
        return usual
    try:
        curvature = largest_curvature(fed)
        if not math.isfinite(curvature):
            return usual
        allowed = algorithm.allowed_steps(fed, curvature)
    except CoterieError:
        return usual
    settings = algorithm.settings()
    large = {
        name: _rounded_down(step) for name, step in allowed.items() if (settings.get(name) or 0.0) > step
    }
    if not large:
        return usual
    advice = ", ".join(
        f"{name} = {settings[name]:g} is too large, at most {step:g} is allowed"
        for name, step in large.items()
    )
    options = " ".join(f"--set {name}={step:g}" for name, step in large.items())
    return f"The curvature of the losses is up to {curvature:.3g}: {advice}. Try {options}"


def _rounded_down(step: float) -> float:
    """Return a step size with two significant digits that is not larger.

    >>> _rounded_down(0.6666)
    0.66
    """
    digits = 1 - math.floor(math.log10(step))
    return round(math.floor(step * 10.0**digits) / 10.0**digits, max(0, digits))

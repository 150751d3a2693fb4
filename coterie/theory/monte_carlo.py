"""Simulate bias and variance of every estimator, to compare with `coterie.theory.risk`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.theory import flix_risk, risk
from coterie.theory.filters import apply
from coterie.theory.ridge_limits import Risk
from coterie.theory.spectrum import Spectrum

NOISES = 8
STOPPED = 10  # personal steps of "ditto-steps"
ESTIMATORS = (
    "fedavg",
    "local",
    "ridge-local*",
    "ftfa",
    "maml-fl",
    "rtfa",
    "pfedme",
    "rtfa*",
    "pfedme*",
)
BEYOND = ("fomaml-fl", "flix", "flix-ftfa", "ditto", "ditto-steps")
"""Estimators that the paper does not have; Ditto's shared model takes `World.local_steps` steps in a round."""


@dataclass(frozen=True)
class World:
    """A population of clients of the linear model.

    Parameters
    ----------
    features
        Number of features.
    rows
        Rows per client.
    clients
        Clients the centre is learned from.
    r2
        Squared distance of the clients' parameters from the centre.
    rho2
        Squared length of the clients' parameters.
    sigma2
        Variance of the noise.
    correlation
        AR(1) correlation of neighbouring features.
    lam
        Penalty of `rtfa` and `pfedme`; the starred estimators take the best.
    alpha
        MAML's inner step.
    local_steps, local_lr
        Local steps of Ditto's shared model in a round.

    Examples
    --------
    >>> from coterie.theory.monte_carlo import World
    >>> world = World(features=40, rows=20, clients=100)
    >>> world.gamma, round(world.predicted()["ftfa"].risk, 3)
    (2.0, 0.768)
    """

    features: int = 400
    rows: int = 200
    clients: int = 1600
    r2: float = 1.0
    rho2: float = 2.0
    sigma2: float = 0.25
    correlation: float = 0.0
    lam: float = 1.5
    alpha: float = 0.1
    local_steps: int = 3
    local_lr: float = 0.1

    @property
    def gamma(self) -> float:
        """Features per row."""
        return self.features / self.rows

    def covariance(self) -> Tensor:
        """Return the covariance of the features, [features, features]."""
        place = torch.arange(self.features, dtype=torch.float64)
        return self.correlation ** (place[:, None] - place).abs()

    def penalties(self) -> dict[str, float]:
        """Return the best penalty alone and around the centre, and the given one."""
        return {
            "alone": self.sigma2 * self.gamma / self.rho2,
            "best": self.sigma2 * self.gamma / self.r2,
            "given": self.lam,
        }

    def predicted(self, clients: bool = True) -> dict[str, Risk]:
        """Return the risk that theory predicts for every estimator.

        Parameters
        ----------
        clients
            Whether to include the error of a centre learned from this many clients.

        Returns
        -------
        dict of Risk
            By estimator.
        """
        values = torch.linalg.eigvalsh(self.covariance()).numpy() if self.correlation else None
        common: dict[str, Any] = {"gamma": self.gamma, "sigma2": self.sigma2}
        common["spectrum"] = None if values is None else Spectrum.of(values)
        finite = {"clients": self.clients if clients else None}
        shared = {**common, "r2": self.r2, **finite}
        mixed = {**shared, "rho2": self.rho2}
        local: dict[str, Any] = {"local_steps": self.local_steps, "local_lr": self.local_lr}
        found = {
            "fedavg": risk.fedavg(**shared),
            "local": risk.local(**common, rho2=self.rho2),
            "ridge-local*": risk.ridge_local(**common, rho2=self.rho2),
            "ftfa": risk.ftfa(**shared),
            "maml-fl": risk.maml_fl(**shared, alpha=self.alpha),
            "rtfa": risk.rtfa(**shared, lam=self.lam),
            "pfedme": risk.pfedme(**shared, lam=self.lam),
            "rtfa*": risk.rtfa(**shared),
            "pfedme*": risk.pfedme(**shared),
            "fomaml-fl": risk.maml_fl(**shared, alpha=self.alpha, first_order=True),
            "flix": flix_risk.flix(**mixed, alpha=self.mixing("local")),
            "flix-ftfa": flix_risk.flix(**mixed, alpha=self.mixing("ftfa"), own="ftfa"),
            "ditto": risk.ditto(**shared, **local, lam=self.lam),
        }
        if values is None:
            stop: dict[str, Any] = {"steps": STOPPED, "lr": self.local_lr}
            found["ditto-steps"] = risk.ditto(**shared, **local, lam=self.lam, **stop)
        return found

    def mixing(self, own: str) -> float:
        """Return the best alpha of FLIX with many clients and independent features."""
        numbers = {"gamma": self.gamma, "r2": self.r2, "rho2": self.rho2, "sigma2": self.sigma2}
        return float(flix_risk.best_alpha(**numbers, own=own))


@dataclass(frozen=True)
class Simulated:
    """Means over clients and their standard errors, which account for the draw of the centre that all share."""

    bias: float
    variance: float
    bias_error: float
    variance_error: float


def simulate(world: World, judged: int = 30, seed: int = 0) -> dict[str, Simulated]:
    """Draw the world, fit every estimator, and score clients that had no part in the centre.

    Estimators are linear in y, so the signal and a few draws of the noise are fitted as columns: the error of the
    first is the bias, the size of the others the variance.

    Parameters
    ----------
    world
        The population.
    judged
        Number of clients to score.
    seed
        Seed of the draws.

    Returns
    -------
    dict of Simulated
        By estimator, one of `ESTIMATORS` or `BEYOND`.

    Examples
    --------
    >>> from coterie.theory.monte_carlo import World, simulate
    >>> found = simulate(World(features=40, rows=20, clients=100), judged=10)["ftfa"]
    >>> 0.3 < found.bias < 0.7
    True
    """
    draw = torch.Generator().manual_seed(seed)
    covariance = world.covariance()
    root = torch.linalg.cholesky(covariance).T if world.correlation else None
    middle = _unit(torch.randn(world.features, generator=draw, dtype=torch.float64))
    penalty = world.penalties()
    sums = {name: _Centre(world.features) for name in ("average", "maml", "fomaml", "steps", "given", "best")}
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    for k in range(judged + world.clients):
        x, truth, y = _client(world, middle, root, draw)
        if k < judged:
            kept.append((x, truth, y))
            continue
        gram = x @ x.T / world.rows
        sums["average"].add(x, y, x)
        bent = x - world.alpha * (gram @ x)
        sums["maml"].add(bent, y - world.alpha * (gram @ y), bent)
        sums["fomaml"].add(x, y, bent)
        sums["steps"].add(x, y, _stepped(gram, x, world))
        for name in ("given", "best"):
            factor = torch.linalg.cholesky(gram + penalty[name] * torch.eye(world.rows, dtype=torch.float64))
            half = torch.linalg.solve_triangular(factor, x, upper=False)
            sums[name].add(half, torch.linalg.solve_triangular(factor, y, upper=False), half)
    centres = {name: part.solve() for name, part in sums.items()}
    common = math.sqrt(2 / world.features) * _sizes(
        centres["average"], math.sqrt(world.rho2 - world.r2) * middle, covariance
    )
    errors: dict[str, list[Tensor]] = {name: [] for name in (*ESTIMATORS, *BEYOND)}
    for x, truth, y in kept:
        for name, model in _models(x, y, centres, penalty, world).items():
            errors[name].append(_sizes(model, truth, covariance))
    shared = {name: torch.zeros(2) if "local" in name else common for name in errors}
    return {name: _summary(torch.stack(pairs), shared[name]) for name, pairs in errors.items()}


def _sizes(model: Tensor, truth: Tensor, covariance: Tensor) -> Tensor:
    """Return the squared prediction error of the signal column and the mean squared size of the noise columns."""
    gap = torch.cat([model[:, :1] - truth[:, None], model[:, 1:]], 1)
    sizes = (gap * (covariance @ gap)).sum(0)
    return torch.stack([sizes[0], sizes[1:].mean()])


class _Centre:
    """Sums of Y'Y and Y'(targets) over filtered clients Y."""

    def __init__(self, d: int) -> None:
        self.matrix = torch.zeros(d, d, dtype=torch.float64)
        self.side = torch.zeros(d, 1 + NOISES, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor, left: Tensor) -> None:
        self.matrix.addmm_(left.T, x)
        self.side.addmm_(left.T, y)

    def solve(self) -> Tensor:
        solution: Tensor = torch.linalg.solve(self.matrix, self.side)
        return solution


def _client(
    world: World, middle: Tensor, root: Tensor | None, draw: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, true parameters, and targets in columns: signal and draws of the noise."""
    own = torch.randn(world.features, generator=draw, dtype=torch.float64)
    own = _unit(own - (own @ middle) * middle)
    truth = math.sqrt(world.rho2 - world.r2) * middle + math.sqrt(world.r2) * own
    x = torch.randn(world.rows, world.features, generator=draw, dtype=torch.float64)
    x = x if root is None else x @ root
    noise = math.sqrt(world.sigma2) * torch.randn(world.rows, NOISES, generator=draw, dtype=torch.float64)
    return x, truth, torch.cat([(x @ truth)[:, None], noise], 1)


def _stepped(gram: Tensor, x: Tensor, world: World) -> Tensor:
    """Return sum over k < local_steps of (1 - lr XX'/n)^k X, FedAvg's filter after several local steps."""
    left = torch.zeros_like(x)
    for _ in range(world.local_steps):
        left = x + left - world.local_lr * (gram @ left)
    return left


def _models(
    x: Tensor, y: Tensor, centres: dict[str, Tensor], penalty: dict[str, float], world: World
) -> dict[str, Tensor]:
    """Return every estimator of one client, [d, columns]."""
    zero = torch.zeros_like(centres["average"])

    def tuned(middle: Tensor, lam: float) -> Tensor:
        return middle + apply(x, y - x @ middle, lambda s: 1 / (s + lam))

    def stopped(s: Tensor) -> Tensor:
        """Return the filter of STOPPED steps on the loss with a ridge around the start."""
        bent = s + penalty["given"]
        return (1 - (1 - world.local_lr * bent) ** STOPPED) / bent

    average, alone, both = centres["average"], world.mixing("local"), world.mixing("ftfa")
    return {
        "fedavg": average,
        "local": tuned(zero, 0.0),
        "ridge-local*": tuned(zero, penalty["alone"]),
        "ftfa": tuned(average, 0.0),
        "maml-fl": tuned(centres["maml"], 0.0),
        "rtfa": tuned(average, penalty["given"]),
        "pfedme": tuned(centres["given"], penalty["given"]),
        "rtfa*": tuned(average, penalty["best"]),
        "pfedme*": tuned(centres["best"], penalty["best"]),
        "fomaml-fl": tuned(centres["fomaml"], 0.0),
        "flix": alone * average + (1 - alone) * tuned(zero, 0.0),
        "flix-ftfa": both * average + (1 - both) * tuned(average, 0.0),
        "ditto": tuned(centres["steps"], penalty["given"]),
        "ditto-steps": centres["steps"] + apply(x, y - x @ centres["steps"], stopped),
    }


def _summary(pairs: Tensor, common: Tensor) -> Simulated:
    bias, variance = pairs.mean(0).tolist()
    bias_error, variance_error = torch.hypot(pairs.std(0) / math.sqrt(len(pairs)), common.to(pairs)).tolist()
    return Simulated(bias, variance, bias_error, variance_error)


def _unit(vector: Tensor) -> Tensor:
    length: Tensor = vector.norm()
    return vector / length

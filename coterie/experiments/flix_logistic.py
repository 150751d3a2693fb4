"""Experiment flix/logistic: figures 2, 3 and 8 to 15 of the FLIX paper, every alpha and k at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie import models
from coterie._core import randomness
from coterie.algorithms.flix import FLIX
from coterie.data.clients import Pool
from coterie.data.partition import equal_shares
from coterie.data.readers import libsvm
from coterie.engine.federation import Federation
from coterie.experiments.flix_stacked import Array, Lane, Stack
from coterie.experiments.spec import Experiment, shared_data
from coterie.select.flix_runs import local_models
from coterie.theory import flix_rates, flix_steps
from coterie.theory.flix import Mixture

SIZES = {"mushrooms": None, "a6a": None, "w8a": 17_188, "ijcnn1": None}  # rows used; 17,188 as in w6a
EXACT = 1e-10  # gradient norm of the local models
ROUNDING = 1e-24  # relative squared errors below this are rounding errors
POINTS = 60  # per curve in a plot


@dataclass(frozen=True)
class Problem:
    """A federation with its local models, and a starting point x0 ~ N(0, I)."""

    fed: Federation
    own: Tensor
    x0: Tensor
    mixture: Mixture  # at alpha = 1

    @classmethod
    def make(cls, name: str, n: int, l2: float, seed: int) -> Problem:
        """Split a LIBSVM data set among n clients and find their local models."""
        pool = libsvm(shared_data(f"libsvm/{name}.bz2"))
        rows = SIZES[name]
        pool = pool if rows is None else Pool(pool.x[:rows], pool.y[:rows])
        fed = Federation.from_clients(equal_shares(pool, n), models.logistic(l2=l2), seed=seed)
        mixture = FLIX(alpha=1.0).mixture(fed)
        exact = {"local_tol": EXACT} if l2 else {"local": "sgd", "batch": 0, "local_steps": 300}
        lr = 1.0 / float(mixture.smoothness.max())
        own = local_models(fed, FLIX(alpha=0.5, local_lr=lr, **exact))
        x0 = randomness.normal(randomness.slots(randomness.key(seed, "flix start"), fed.d))
        return cls(fed, own, x0, mixture)

    def at(self, alpha: float) -> Mixture:
        """Return the constants of the mixtures with this alpha."""
        return Mixture.equal(alpha, self.mixture.smoothness, self.mixture.convexity)

    def minimiser(self, alpha: float) -> Tensor:
        """Return x*, found by Newton's method on the clients' Hessians."""
        x = self.mixture.average(self.own)
        for _ in range(50):
            gradients, hessians = self.derivatives(alpha, x)
            step = torch.linalg.solve(hessians.mean(0), gradients.mean(0))
            x = x - step / max(1.0, float(step.norm()))
            if float(step.norm()) <= 1e-13 * max(1.0, float(x.norm())):
                break
        return x

    def derivatives(self, alpha: float, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return G_i(x) [n, d] and its derivative [n, d, d]."""
        model: Any = self.fed.model
        gradients = torch.zeros_like(self.own)
        hessians = self.own.new_zeros(*self.own.shape, self.own.shape[-1])
        for place, batch in self.fed.runtime.rows("train").full(None):
            at = slice(None) if place is None else place
            w = alpha * x + (1 - alpha) * self.own[at]
            gradients[at] = alpha * model.grad(w, batch.x, batch.y, batch.weight)
            hessians[at] = alpha**2 * model.hessian(w, batch.x, batch.y, batch.weight)
        return gradients, hessians


@dataclass(frozen=True)
class Curves:
    """Recorded rounds [t] of a stack of runs, with losses, squared gradient norms and iterates [t, runs, ...]."""

    problem: Problem
    solver: str
    lanes: list[Lane]
    rounds: Array
    loss: Array
    squared_grad: Array
    x: Array

    @classmethod
    def draw(cls, problem: Problem, solver: str, lanes: list[Lane], rounds: int, every: int = 5) -> Curves:
        """Run the stack and record every so many rounds."""
        stack = Stack(problem.fed, problem.own, problem.mixture)
        steps = list(stack.run(solver, lanes, problem.x0, rounds, every))
        series = [np.stack([getattr(step, name) for step in steps]) for name in ("loss", "squared_grad", "x")]
        return cls(problem, solver, lanes, np.array([float(step.round) for step in steps]), *series)

    def name(self, lane: Lane) -> str:
        """Return the name of a run's solver: "gd" if nothing is compressed."""
        return "gd" if lane.k == self.problem.fed.d else self.solver

    def floats(self, lane: Lane) -> Array:
        """Return the uplink floats per client after each round; DIANA sends its first shifts uncompressed."""
        first = self.problem.fed.d if self.name(lane) == "diana" else 0
        return lane.k * self.rounds + first

    def plot(self, title: str, lanes: Sequence[Lane], distance: Array | None) -> dict[str, Any]:
        """Plot loss and distance (or gradient) against rounds and against floats, with at most `POINTS` points."""
        thin = slice(None, None, max(1, len(self.rounds) // POINTS))
        series = {"loss": self.loss}
        if distance is None:
            series["squared gradient norm"] = self.squared_grad
        else:
            series["relative squared distance"] = distance
        panels = []
        for what, values in series.items():
            for against in ("rounds", "uplink floats per client"):
                curves = {}
                for lane in lanes:
                    places = self.rounds if against == "rounds" else self.floats(lane)
                    shown = values[thin, self.lanes.index(lane)]
                    label = f"alpha {lane.alpha:g}, k {lane.k}"
                    curves[label] = [places[thin].tolist(), [float(f"{one:.6g}") for one in shown]]
                panels.append({"x": against, "y": what, "log": what != "loss", "curves": curves})
        return {"title": title, "panels": panels}


def grid(d: int) -> list[int]:
    """Return the paper's seven values of k, linearly spaced from 1 to d."""
    return [round(1 + j * (d - 1) / 6) for j in range(7)]


def logistic(experiment: Experiment, seed: int) -> dict[str, Any]:
    """Measure rates, stalls, floats and bounds on one data set (settings: data, alphas)."""
    plan = experiment.plans[0]
    name, alphas = str(plan.settings["data"]), [float(alpha) for alpha in plan.settings["alphas"]]
    found, plots, curve = regularised(name, alphas, plan.rounds, seed)
    more, others = unregularised(name, alphas, plan.rounds // 2, seed)
    return {**found, **more, "plots": {**plots, **others}, "curve": curve}


def regularised(
    name: str, alphas: list[float], rounds: int, seed: int
) -> tuple[dict[str, float], dict[str, Any], dict[str, Any]]:
    """Run with l2 = 0.1: gradient descent and DIANA on 50 clients, DCGD and DIANA on 8."""
    problem = Problem.make(name, 50, 0.1, seed)
    d = problem.fed.d
    lanes = [Lane(alpha, k) for alpha in alphas for k in grid(d)]
    curves = Curves.draw(problem, "diana", lanes, rounds)
    distance = distances(curves)
    gd, diana = [lane for lane in lanes if lane.k == d], [lane for lane in lanes if lane.k < d]
    found = {
        "gd_rate_gap": rate_gap(curves, distance, gd),
        "diana_rate_gap": max(
            rate_gap(curves, distance, [a for a in diana if a.k == k]) for k in grid(d)[:-1]
        ),
        "gd_over_bound": max(_loss_over_bound(curves, lane) for lane in gd),
        "diana_over_bound": max(over_bound(curves, distance, lane) for lane in diana),
        "gd_loss_order": order(curves.loss[0], curves, gd),
        **saving(problem),
    }
    few = Problem.make(name, 8, 0.1, seed)
    stalled, going = (Curves.draw(few, solver, lanes, rounds) for solver in ("dcgd", "diana"))
    distance_8, ends = distances(stalled), {}
    ends["dcgd"], ends["diana"] = tails(distance_8), tails(distances(going))
    shown = [lanes.index(lane) for lane in diana if lane.k == grid(d)[3]]
    found |= {
        "dcgd_over_bound": max(over_bound(stalled, distance_8, lane) for lane in diana),
        "dcgd_end": math.log10(ends["dcgd"][shown].min()),
        "diana_end": math.log10(max(ends["diana"][shown].max(), 1e-32)),
        "diana_over_dcgd": math.log10(float((ends["diana"] / ends["dcgd"])[shown].max())),
    }
    plots = {
        "gd": curves.plot(f"{name}: gradient descent, n = 50, l2 = 0.1", gd, distance),
        "diana": curves.plot(f"{name}: DIANA, Rand-k, n = 50, l2 = 0.1", lanes, distance),
        "dcgd": stalled.plot(f"{name}: CGD, Rand-k, n = 8, l2 = 0.1", lanes, distance_8),
    }
    shown_lane, thin = Lane(0.5, grid(d)[1]), slice(None, None, max(1, len(curves.rounds) // POINTS))
    curve = {
        "split": "train",
        "metric": "relative squared distance, DIANA at alpha 0.5 with the second k",
        "rounds": curves.rounds[thin].astype(int).tolist(),
        "values": distance[thin, lanes.index(shown_lane)].tolist(),
    }
    return found, plots, curve


def unregularised(
    name: str, alphas: list[float], rounds: int, seed: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Run with l2 = 0, where no minimiser need exist: gradient descent and DIANA on 100 clients, DCGD on 8."""
    found, plots = {}, {}
    for solver, n in (("diana", 100), ("dcgd", 8)):
        problem = Problem.make(name, n, 0.0, seed)
        d = problem.fed.d
        lanes = [Lane(alpha, k) for alpha in alphas for k in grid(d)]
        curves = Curves.draw(problem, solver, lanes, rounds, every=10)
        for kind, kept in ((solver, grid(d)[3]), *((("gd", d),) if solver == "diana" else ())):
            some = [lane for lane in lanes if lane.k == kept]
            found[f"{kind}_flat_order"] = order(curves.loss[-1], curves, some)
            found[f"{kind}_flat_small"] = float(curves.loss[-1, lanes.index(some[0])])
            found[f"{kind}_flat_one"] = float(curves.loss[-1, lanes.index(some[-1])])
        title = f"{name}: {'DIANA' if solver == 'diana' else 'CGD'}, Rand-k, n = {n}, unregularised"
        plots[f"{solver}-unregularised"] = curves.plot(title, lanes, None)
        if solver == "diana":
            gd = [lane for lane in lanes if lane.k == d]
            plots["gd-unregularised"] = curves.plot(
                f"{name}: gradient descent, n = {n}, unregularised", gd, None
            )
    return found, plots


def distances(curves: Curves) -> Array:
    """Return |x - x*|^2 / |x0 - x*|^2 along the iterates, [t, runs]."""
    best = {lane.alpha: curves.problem.minimiser(lane.alpha).numpy() for lane in curves.lanes}
    errors = np.square(curves.x - np.stack([best[lane.alpha] for lane in curves.lanes])).sum(-1)
    relative: Array = errors / errors[0]
    return relative


def tails(distance: Array) -> Array:
    """Average over the last quarter of the rounds, [runs]."""
    mean: Array = distance[-(len(distance) // 4) :].mean(0)
    return mean


def order(losses: Array, curves: Curves, lanes: Sequence[Lane]) -> float:
    """Return the largest loss of an alpha minus that of the next larger one: negative if sharing less lowers it."""
    values = losses[[curves.lanes.index(lane) for lane in lanes]]
    return float((values[:-1] - values[1:]).max())


def rate_gap(curves: Curves, distance: Array, lanes: Sequence[Lane]) -> float:
    """Return by how many percent the convergence factor differs between runs."""
    factors = [factor(curves.rounds, distance[:, curves.lanes.index(lane)]) for lane in lanes]
    return 100 * (max(factors) / min(factors) - 1)


def factor(rounds: Array, errors: Array) -> float:
    """Return the convergence factor per round between errors 1e-3 and 1e-12, or over the second half of the run."""
    low = errors <= 1e-12
    first, last = (int(np.argmax(errors <= level)) for level in (1e-3, 1e-12))
    if not low.any():
        first, last = len(errors) // 2, len(errors) - 1
    return float((errors[last] / errors[first]) ** (1 / (rounds[last] - rounds[first])))


def saving(problem: Problem, most: int = 4000) -> dict[str, float]:
    """Count uplink floats per client to a relative error of 1e-8 at alpha 0.5: gradient descent and DIANA, Rand-7."""
    stack, best = Stack(problem.fed, problem.own, problem.mixture), problem.minimiser(0.5).numpy()
    lanes, reached = [Lane(0.5, problem.fed.d), Lane(0.5, 7)], np.full(2, np.inf)
    start = float((problem.x0.numpy() - best) @ (problem.x0.numpy() - best))
    for step in stack.run("diana", lanes, problem.x0, most, every=1):
        near = np.square(step.x - best).sum(-1) <= 1e-8 * start
        reached = np.where(near, np.minimum(reached, step.round), reached)
        if np.isfinite(reached).all():
            break
    gd, diana = (float(k) for k in reached * [problem.fed.d, 7] + [0, problem.fed.d])
    return {"gd_floats": gd, "diana_floats": diana, "saving": gd / diana}


def _loss_over_bound(curves: Curves, lane: Lane) -> float:
    """Return the largest ratio of gradient descent's f~ - min f~ to (1 - mu / L)^t times its first value."""
    mixture, j = curves.problem.at(lane.alpha), curves.lanes.index(lane)
    gap = curves.loss[:, j] - curves.loss[:, j].min()
    seen = gap > 1e-10 * gap[0]
    bound = gap[0] * flix_rates.dgd_rate(mixture) ** curves.rounds
    return float((gap / bound)[seen].max())


def over_bound(curves: Curves, distance: Array, lane: Lane) -> float:
    """Return the largest ratio of the squared distance to the theorem's bound on its expectation.

    Over all rounds for DIANA. DCGD fluctuates around its floor, so quarters of its run are averaged.
    """
    problem, omega = curves.problem, curves.problem.fed.d / lane.k - 1.0
    mixture, errors = problem.at(lane.alpha), distance[:, curves.lanes.index(lane)]
    if curves.solver == "diana":
        gamma, beta = flix_steps.diana_step(mixture, omega), flix_steps.diana_beta(omega)
        scale = 1 + 4 * gamma**2 * omega / (mixture.n * beta) * float(mixture.curvatures.max()) ** 2
        bound = scale * flix_rates.diana_rate(mixture, omega) ** curves.rounds
    else:
        best = problem.minimiser(lane.alpha)
        floor = flix_rates.dcgd_floor(mixture, omega, problem.derivatives(lane.alpha, best)[0])
        start = float((problem.x0 - best).square().sum())
        bound = (1 - flix_steps.dcgd_step(mixture, omega) * mixture.mu) ** curves.rounds + floor / start
        quarters = [pair.mean(-1) for pair in np.array_split(np.stack([errors, bound]), 4, axis=-1)]
        return max(float(error / allowed) for error, allowed in quarters)
    return float((errors / bound)[errors > ROUNDING].max())

"""Experiment flix/bytes: how many bytes the eight solvers of FLIX need to an accuracy, by the ledger."""

from __future__ import annotations

import math
from typing import Any

import torch

from coterie.algorithms.flix import FLIX
from coterie.engine.federation import Federation
from coterie.experiments.flix_logistic import Problem
from coterie.experiments.spec import Experiment
from coterie.select.flix_runs import states

ACCURACIES = (1e-2, 1e-4, 1e-6)  # gap over the gap of the start
POINTS = 80  # per curve in the plot
STEPS = {"sgd": (0.3, 1.0, 3.0), "adam": (0.003, 0.01, 0.03)}  # tried; the lowest last gap is shown
BATCH = 32


def bytes_to_accuracy(experiment: Experiment, seed: int) -> dict[str, Any]:
    """Run all solvers on one data set (settings: data, alpha, keep) and count bytes up and down of all clients."""
    settings: dict[str, Any] = dict(experiment.plans[0].settings)
    alpha, share = settings["alpha"], settings["keep"]
    problem = Problem.make(settings["data"], settings.get("clients", 50), 0.1, seed)
    k, rounds = max(1, round(share * problem.fed.d)), experiment.plans[0].rounds
    least = _loss(problem, alpha, problem.minimiser(alpha))
    first = _loss(problem, alpha, problem.fed.initial_model()) - least
    found: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    uplinks: dict[str, Any] = {}
    for name, candidates in _solvers(alpha, k, problem.fed.d).items():
        runs = [_run(problem, method, rounds, alpha, least, first) for method in candidates]
        sent, gaps = min(runs, key=lambda pair: pair[1][-1])
        thin = max(1, len(sent) // POINTS)
        shown = [float(f"{max(gap, 1e-16):.4g}") for gap in gaps[::thin]]
        curves[name] = [[sum(both) for both in sent[::thin]], shown]
        uplinks[name] = [[up for up, _ in sent[::thin]], shown]
        for eps in ACCURACIES:
            reached = [both for both, gap in zip(sent, gaps, strict=True) if gap <= eps]
            found[f"{name} MB to {eps:g}"] = sum(reached[0]) if reached else math.nan
            found[f"{name} MB up to {eps:g}"] = reached[0][0] if reached else math.nan
        found[f"{name} last gap"] = gaps[-1]
    for eps in ACCURACIES:
        for way in ("MB", "MB up"):
            sizes = {name: found[f"{name} {way} to {eps:g}"] for name in curves}
            for name in ("scaffnew", "diana", "ef21"):
                found[f"{name} saves {way} to {eps:g}"] = sizes["dgd"] / sizes[name]
    panels = [
        {"x": way, "y": "gap over the first gap", "log": True, "curves": lines}
        for way, lines in (("megabytes, up and down", curves), ("megabytes up", uplinks))
    ]
    plot = {"title": f"{settings['data']}, alpha {alpha:g}", "panels": panels}
    return {
        **{name: value for name, value in found.items() if math.isfinite(value)},
        "plots": {"bytes": plot},
    }


def _solvers(alpha: float, k: int, d: int) -> dict[str, list[FLIX]]:
    """Return the candidates of every solver; those of theory have one."""

    def flix(**settings: Any) -> FLIX:
        return FLIX(alpha=alpha, **settings)

    return {
        "one-shot": [flix(solver="one-shot")],
        "dgd": [flix(start_at="average")],
        "dcgd": [flix(start_at="average", solver="dcgd", compressor=f"rand-{k}")],
        "diana": [flix(start_at="average", solver="diana", compressor=f"rand-{k}")],
        "ef21": [flix(start_at="average", solver="ef21", compressor=f"top-{k}")],
        "scaffnew": [flix(start_at="average", solver="scaffnew")],
        **{
            name: [flix(start_at="average", solver=name, lr=lr, batch=BATCH) for lr in steps]
            for name, steps in STEPS.items()
        },
    }


def _run(
    problem: Problem, method: FLIX, rounds: int, alpha: float, least: float, first: float
) -> tuple[list[tuple[float, float]], list[float]]:
    """Return megabytes sent up and down, and relative gaps, after every round."""
    sent, gaps = [], []
    count = 1 if method.solver == "one-shot" else rounds
    for fed, s in states(problem.fed, method, count, own=problem.own):
        sent.append(_megabytes(fed))
        gaps.append(max(0.0, _loss(problem, alpha, s.x) - least) / first)
    return sent, gaps


def _megabytes(fed: Federation) -> tuple[float, float]:
    return fed.ledger.total("bytes_up") / 1e6, fed.ledger.total("bytes_down") / 1e6


def _loss(problem: Problem, alpha: float, x: torch.Tensor) -> float:
    """Return f~(x)."""
    model: Any = problem.fed.model
    total = torch.zeros((), dtype=torch.float64)
    for place, batch in problem.fed.runtime.rows("train").full(None):
        own = problem.own[slice(None) if place is None else place]
        total += model.loss(alpha * x + (1 - alpha) * own, batch.x, batch.y, batch.weight).sum().double()
    return float(total) / problem.fed.n

"""Experiment asymptotics/risk: compare simulated bias and variance of every estimator with the predicted ones."""

from __future__ import annotations

from typing import Any

from coterie.experiments.spec import Experiment, Table
from coterie.theory.monte_carlo import ESTIMATORS, World, simulate


def simulated_risk(experiment: Experiment, seed: int) -> Table:
    """Simulate bias and variance of every estimator for the run's settings, and compare them with theory.

    The curve has the predicted risks on its horizontal axis and the simulated ones on its vertical axis: agreement
    is the diagonal.
    """
    settings: dict[str, Any] = dict(experiment.plans[0].settings)
    judged = settings.pop("judged", 30)
    world = World(**settings)
    found, predicted = simulate(world, judged, seed), world.predicted()
    metrics: Table = {}
    worst = 0.0
    for name in ESTIMATORS:
        ours, theory = found[name], predicted[name]
        metrics[f"{name} bias"], metrics[f"{name} variance"] = ours.bias, ours.variance
        metrics[f"{name} predicted bias"], metrics[f"{name} predicted variance"] = (
            theory.bias,
            theory.variance,
        )
        gaps = (
            (ours.bias - theory.bias) / max(ours.bias_error, 1e-12),
            (ours.variance - theory.variance) / max(ours.variance_error, 1e-12),
        )
        metrics[f"{name} errors"] = max(map(abs, gaps))
        worst = max(worst, *map(abs, gaps))
    metrics["worst"] = worst
    names = sorted(ESTIMATORS, key=lambda name: predicted[name].risk)
    metrics["curve"] = {
        "split": "simulated",
        "metric": "risk",
        "x": "predicted risk",
        "rounds": [predicted[name].risk for name in names],
        "values": [found[name].bias + found[name].variance for name in names],
    }
    return metrics

"""Experiments cobo/*: how close CoBo's weights come to the true clusters."""

from __future__ import annotations

from typing import Any

from coterie.algorithms import make
from coterie.experiments.jobs import federation
from coterie.experiments.spec import Experiment
from coterie.report.weights import weights_of
from coterie.train.fit import fit
from coterie.train.history import mean_over_clients

SHOWN = ("recovery", "inside", "between", "ari")


def weights(experiment: Experiment, seed: int) -> dict[str, Any]:
    """Train CoBo on the data of the run; return accuracy, recovery of the clusters, and a plot of W over time."""
    plan = experiment.plans[0]
    fed = federation(experiment, plan, seed)
    run = fit(fed, make("cobo", **plan.settings), plan.rounds, select=plan.select or "last")
    found = {name: run.history.curve("server", name)[1][-1] for name in SHOWN}
    if fed.has_rows("test"):
        found["accuracy"] = mean_over_clients(run.score("test", "accuracy"))
    pairs = run.fed.ledger.total("messages_up", phase="agree") / run.fed.ledger.total(
        "messages_up", phase="slope"
    )
    rounds, values = run.history.curve("server", "recovery")
    curve = {"split": "weights", "metric": "recovery", "rounds": rounds, "values": values}
    page = weights_of(run.history, fed.names, fed.clusters, f"{experiment.file.title}, seed {seed}")
    return {**found, "pair gradients": pairs, "curve": curve, "plots": {"weights": page}}

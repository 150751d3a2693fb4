"""Experiments flix/femnist and flix/shakespeare: table 1 of the FLIX paper, networks."""

from __future__ import annotations

from torch import Tensor

from coterie.algorithms import Algorithm, make
from coterie.algorithms.flix import FLIX
from coterie.engine.federation import Federation
from coterie.experiments.jobs import federation
from coterie.experiments.spec import Experiment
from coterie.select.flix_runs import local_models, states
from coterie.train.fit import fit
from coterie.train.history import mean_over_clients


def mixtures(experiment: Experiment, seed: int) -> dict[str, float]:
    """Return the test accuracy for every alpha, of local training, one shared model and FedAvg, and the chosen alpha.

    Settings: alphas, flix (settings of FLIX), fedavg (settings of FedAvg) and fedavg_lr (step sizes to try). FLIX takes
    one gradient per round, so it gets `rounds` times `steps` rounds, the number of FedAvg's local steps, unless
    `flix_rounds` says how many. Local models are trained once for all alphas.
    """
    plan = experiment.plans[0]
    asked = dict(plan.settings)
    fed, steps = federation(experiment, plan, seed), plan.rounds * asked["fedavg"]["steps"]
    steps = min(steps, asked.get("flix_rounds", steps))
    own = local_models(fed, FLIX(alpha=0.5, **asked["flix"]))
    scores = {}
    for alpha in (0.0, *asked["alphas"], 1.0):
        scores[alpha] = _scores(fed, mixed(fed, own, FLIX(alpha=alpha, **asked["flix"]), steps))
    inside = {alpha: score for alpha, score in scores.items() if 0 < alpha < 1}
    chosen = min(inside, key=lambda alpha: inside[alpha][0])
    averaged, step = min(
        (_scores(fed, _trained(fed, make("fedavg", lr=lr, **asked["fedavg"]), plan.rounds)), lr)
        for lr in asked["fedavg_lr"]
    )
    found = {f"flix_{alpha:g}": score[1] for alpha, score in scores.items()}
    found |= {"alpha": chosen, "flix": scores[chosen][1], "fedavg": averaged[1], "fedavg_lr": step}
    best = max(score[1] for score in inside.values())
    rivals = {"local": scores[0.0][1], "shared": scores[1.0][1], "fedavg": averaged[1]}
    found |= {f"gain_over_{name}": found["flix"] - value for name, value in rivals.items()}
    return {**found, "best_inside": best, "best_over_fedavg": best - averaged[1]}


def mixed(fed: Federation, own: Tensor, algorithm: FLIX, rounds: int) -> Tensor:
    """Return the deployed mixtures [n, d] after this many rounds from given local models."""
    *_, (trial, s) = states(fed, algorithm, 0 if algorithm.alpha == 0.0 else rounds, own)
    return trial.personal(algorithm, s)


def _trained(fed: Federation, algorithm: Algorithm, rounds: int) -> Tensor:
    """Return the deployed models after training."""
    return fit(fed, algorithm, rounds, evaluate_every=0, score_test=False).personal


def _scores(fed: Federation, personal: Tensor) -> tuple[float, float]:
    """Return the mean validation loss, by which settings are chosen, and the mean test accuracy in percent."""
    loss = mean_over_clients(fed.score(personal, "validation")["loss"])
    return loss, 100.0 * mean_over_clients(fed.score(personal, "test")["accuracy"])
